from .image import FORMATS as FORMATS
from .image import ImageLayout as ImageLayout
