"""Commands that have commands of their own.

Invariant: no torch, transformers or TVM before a command needs it.
"""
