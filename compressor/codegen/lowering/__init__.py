"""Lower a captured graph to Relax and its operators to kernels, phase by phase.

Invariant: after each phase the stored bytes are checked.
"""
