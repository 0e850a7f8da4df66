"""Prove that no batch entry's output depends on another's input.

Invariant: what it cannot prove it names.
"""
