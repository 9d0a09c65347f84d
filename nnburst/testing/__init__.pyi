from ._inject import Fault as Fault
from ._inject import inject as inject
from .clock import FakeClock as FakeClock
from .leaks import assert_nothing_left as assert_nothing_left
