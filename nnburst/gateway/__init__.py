"""The Open Inference Protocol (version 2) in front of a shared service: gRPC and REST. Needs the extra ``oip``.

No public names: `nnburst serve --oip` runs it.
"""
