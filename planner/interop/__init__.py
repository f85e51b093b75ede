"""Handing over: settings of other launchers from a plan and back as pins, and annotated ONNX
files."""
