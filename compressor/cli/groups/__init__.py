"""Commands that have commands of their own, and the one that asks.

Invariant: no torch, transformers or TVM before a command needs it.
"""
