"""Builds ONNX graphs of model families, without weights."""
