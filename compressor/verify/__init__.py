"""Prove and check: batch independence, smoke test, `compress verify`.

Invariant: changes nothing.
"""
