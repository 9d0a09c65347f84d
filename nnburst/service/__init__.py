"""The process boundary: a service that hosts devices, and clients that see them as if they were local.

No public names: `nnburst.launch` and `nnburst.connect` open services. docs/internals/protocol.md has the protocol.
"""
