from .client.controller import ExecutionBurstController as ExecutionBurstController
from .interfaces import BurstExecutorWithCache as BurstExecutorWithCache
from .server.server import ExecutionBurstServer as ExecutionBurstServer
from .stats import BurstStats as BurstStats
