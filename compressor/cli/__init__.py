"""The `compress` command: parse, call, print.

Invariant: no torch, transformers or TVM before a command needs it.
"""
