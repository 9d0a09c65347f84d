from ..cache.reasons import CacheReason as CacheReason
from ..model.extensions import ModelMetadata as ModelMetadata
from ..service.wire.protocol import Sandbox as Sandbox
from ..watch.stats import Latency as Latency
from .compile.caching import CacheReport as CacheReport
from .request.node_args import NodeArg as NodeArg
from .run.burst_pool import Restart as Restart
