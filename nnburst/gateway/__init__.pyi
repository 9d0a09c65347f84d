from .inference import Inference as Inference
from .inference import OutputTensor as OutputTensor
from .models import Models as Models
from .regions import Regions as Regions
