from .running import RunOptions as RunOptions
from .types import Capabilities as Capabilities
from .types import ExecutionPreference as ExecutionPreference
from .types import Operation as Operation
from .types import Priority as Priority
from .types import Request as Request
from .types import Timing as Timing
