from .descriptor import Grantor as Grantor
from .descriptor import MQDescriptor as MQDescriptor
from .event_flag import EventFlag as EventFlag
from .queue import MemTransaction as MemTransaction
from .queue import MessageQueue as MessageQueue
