"""Multiply prompts by panels of bytes, where registers have four lanes.

Invariant: a panel holds one tile's codes, written once a task and read for every token.
"""
