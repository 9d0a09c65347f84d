"""The process boundary: a service that hosts devices, and clients that see them as if they were local.

No public names: `nnburst.launch` and `nnburst.connect` are the way in. The protocol: docs/internals/protocol.md.
"""
