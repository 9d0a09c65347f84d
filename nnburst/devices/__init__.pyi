from .interfaces import Device as Device
from .interfaces import PreparedModel as PreparedModel
from .local import LocalDevice as LocalDevice
from .local import LocalModel as LocalModel
from .registry import device_names as device_names
