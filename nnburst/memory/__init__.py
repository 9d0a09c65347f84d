"""Memory pools: shared memory that client and service both reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .arena import Arena
    from .backings import BACKINGS
    from .image import FORMATS, ImageLayout, PixelFormat, check_layout
    from .kinds import KINDS, PROT_READ, PROT_WRITE, MemoryHandle
    from .managed import ManagedBuffer, RoleKey
    from .managed_gate import free_closed_buffers
    from .managed_request import BufferSet, BufferUse, BufferView
    from .managed_tokens import BufferTracker
    from .mapping import private_bytes
    from .memory import Memory
    from .staging import OpenRequest, Region, check_open, check_pools, open_request, read_constant, undecodable_pools
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            ".arena": "Arena",
            ".backings": "BACKINGS",
            ".image": "FORMATS ImageLayout PixelFormat check_layout",
            ".kinds": "KINDS PROT_READ PROT_WRITE MemoryHandle",
            ".managed": "ManagedBuffer RoleKey",
            ".managed_gate": "free_closed_buffers",
            ".managed_request": "BufferSet BufferUse BufferView",
            ".managed_tokens": "BufferTracker",
            ".mapping": "private_bytes",
            ".memory": "Memory",
            ".staging": "OpenRequest Region check_open check_pools open_request read_constant undecodable_pools",
        },
    )

__all__ = [
    "BACKINGS",
    "FORMATS",
    "KINDS",
    "PROT_READ",
    "PROT_WRITE",
    "Arena",
    "BufferSet",
    "BufferTracker",
    "BufferUse",
    "BufferView",
    "ImageLayout",
    "ManagedBuffer",
    "Memory",
    "MemoryHandle",
    "OpenRequest",
    "PixelFormat",
    "Region",
    "RoleKey",
    "check_layout",
    "check_open",
    "check_pools",
    "free_closed_buffers",
    "open_request",
    "private_bytes",
    "read_constant",
    "undecodable_pools",
]
