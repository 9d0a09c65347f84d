"""The process boundary: a service that hosts devices, and clients that see them as if they were local.

`start_child` is what most programs need. The protocol: docs/internals/protocol.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .client.connection import ServiceConnection, connect_to
    from .client.proxies import RemoteBuffer, RemoteBurstContext, RemoteDevice, RemotePreparedModel
    from .host.host import HostedConnection, ServiceHost
    from .host.quotas import PER_USER, Quotas
    from .process.daemon import AccessPolicy, Daemon, activated_sockets, notify_manager
    from .process.discovery import claim, dial, owner_of, peer_of, peer_pidfd, running_services
    from .process.launch import safe_command, service_environment, start_child
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            ".client.connection": "ServiceConnection connect_to",
            ".client.proxies": "RemoteBuffer RemoteBurstContext RemoteDevice RemotePreparedModel",
            ".host.host": "HostedConnection ServiceHost",
            ".host.quotas": "PER_USER Quotas",
            ".process.daemon": "AccessPolicy Daemon activated_sockets notify_manager",
            ".process.discovery": "claim dial owner_of peer_of peer_pidfd running_services",
            ".process.launch": "safe_command service_environment start_child",
        },
    )

__all__ = [
    "PER_USER",
    "AccessPolicy",
    "Daemon",
    "HostedConnection",
    "Quotas",
    "RemoteBuffer",
    "RemoteBurstContext",
    "RemoteDevice",
    "RemotePreparedModel",
    "ServiceConnection",
    "ServiceHost",
    "activated_sockets",
    "claim",
    "connect_to",
    "dial",
    "notify_manager",
    "owner_of",
    "peer_of",
    "peer_pidfd",
    "running_services",
    "safe_command",
    "service_environment",
    "start_child",
]
