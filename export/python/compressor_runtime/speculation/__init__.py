"""Draft tokens cheaply, and verify several of them in one step of the model.

Invariant: drafts decide how fast tokens come, never which.
"""
