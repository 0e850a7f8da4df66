"""Say what each operator of ONNX is in PyTorch, one file a family.

Invariant: an operator computes what the standard says, or refuses by name.
"""
