"""Read compressed-tensors checkpoints (llm-compressor): the scheme of each module, and its layouts.

Invariant: a layout is chosen by the configuration and held against every tensor's type and shape.
"""
