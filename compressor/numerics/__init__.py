"""Choose codes, scales and masks: tensors in, tensors out.

Invariant: knows no graph and no file.
"""
