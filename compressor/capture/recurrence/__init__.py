"""Give recurrent layers our operators and explicit states while a model is captured.

Invariant: what is replaced has computed the same as the original on random numbers, in the same run.
"""
