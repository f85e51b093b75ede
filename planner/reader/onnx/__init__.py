"""An ONNX file: opened, checked, and its statements as records."""
