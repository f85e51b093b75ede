"""ONNX operators as operators of the canonical graph, one function each."""
