"""The device that runs any ONNX model with ONNX Runtime. Needs the extra ``onnx``."""
