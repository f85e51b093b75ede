"""ONNX multi-device annotations (IR 11): a plan written as them, and pins read from them."""
