"""Compile the messages of the gateway. Needs grpcio-tools from the extra dev.

python packaging/protocol.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROTO = Path(__file__).resolve().parents[1] / "nnburst" / "gateway" / "open_inference.proto"
COMPILED = PROTO.with_suffix(".binpb")


def compile_to(path: Path) -> None:
    """Write the serialised FileDescriptorSet to a file."""
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={PROTO.parent}",
        f"--descriptor_set_out={path}",
    ]
    subprocess.run([*command, PROTO.name], check=True)


if __name__ == "__main__":
    compile_to(COMPILED)
