from .nncache import NNCache as NNCache
from .table import Capacity as Capacity
from .table import Policy as Policy
from .table import Select as Select
