"""Run recurrent layers token by token, divided over threads by batch entry, head and channels.

Invariant: states are written in place, and a token's arithmetic does not depend on how many come with it.
"""
