"""The Open Inference Protocol (version 2) over gRPC and REST, for a shared service. Needs the extra ``oip``.

The package has no public names. `nnburst serve --oip` runs the gateway.
"""
