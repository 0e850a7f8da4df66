"""Decide which entries of weights are zero while they are trained.

Invariant: from the step on that :meth:`is_final` names, the zeros stay.
"""
