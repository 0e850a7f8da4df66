"""Choose blocks and columns of weights, and small inputs, that are left out.

Invariant: a refit never raises an error under its Hessian, and counts are exact.
"""
