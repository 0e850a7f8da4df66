"""Write a compressed graph as an ONNX model, operator by operator.

Invariant: a node without a rule is refused by name; codes, scales and zero points are the graph's, never fitted again.
"""
