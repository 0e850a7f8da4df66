"""Recognise attention that a model writes out, and put our operators in its place.

Invariant: a place is rewritten only if it computes what our operator computes, on random numbers.
"""
