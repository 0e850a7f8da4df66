"""Make bundles for ARM, on machines of that kind and on others.

Invariant: what was emulated is called so, and is never timed.
"""
