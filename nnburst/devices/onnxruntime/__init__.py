"""The device that runs ONNX models with ONNX Runtime. It needs the extra ``onnx``."""
