"""The Open Inference Protocol (version 2) in front of a shared service: gRPC and REST. Needs the extra ``oip``."""

from __future__ import annotations

from .inference import Inference, OutputTensor
from .models import Models
from .regions import Regions

__all__ = ["Inference", "Models", "OutputTensor", "Regions"]
