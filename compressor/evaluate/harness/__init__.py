"""Measure a bundle by the tasks of EleutherAI's lm-evaluation-harness, as others measure their models.

Invariant: figures are of the bundle's own kernels; lm-eval is imported where a task runs, and nowhere else.
"""
