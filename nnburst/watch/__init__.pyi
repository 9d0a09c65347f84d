from .reader import FoundPage as FoundPage
from .reader import find_services as find_services
from .reader import look as look
from .stats import Histogram as Histogram
from .stats import RowKind as RowKind
from .stats import RowStats as RowStats
from .stats import ServiceStats as ServiceStats
