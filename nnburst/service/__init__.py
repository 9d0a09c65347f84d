"""Services and the clients of services. A service runs devices in another process.

`nnburst.launch` and `nnburst.connect` open services.
"""
