"""Prove that no batch entry's output depends on another entry's input.

Invariant: every node that cannot be proven independent is named.
"""
