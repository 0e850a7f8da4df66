"""What is left out of a weight or of its inputs: blocks, whole columns, inputs that are small.

Invariant: a refit never raises an error under its Hessian, and counts are exact.
"""
