"""Services, which run devices in other processes, and their clients.

`nnburst.launch` and `nnburst.connect` open services.
"""
