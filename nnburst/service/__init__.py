"""The process boundary: a service that hosts devices, and clients that see them as if they were local.

`start_child` is what most programs need. See ``docs/service.md`` for the protocol.
"""

from __future__ import annotations

from ._connection import ServiceConnection
from ._host import HostedConnection, ServiceHost
from ._launch import start_child
from ._proxies import RemoteBuffer, RemoteBurstContext, RemoteDevice, RemotePreparedModel
from ._quotas import Quotas

__all__ = [
    "HostedConnection",
    "Quotas",
    "RemoteBuffer",
    "RemoteBurstContext",
    "RemoteDevice",
    "RemotePreparedModel",
    "ServiceConnection",
    "ServiceHost",
    "start_child",
]
