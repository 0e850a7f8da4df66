"""Channels one by one: their order in caches, and depthwise weights, whose rows read inputs of their own.

Invariant: no channel's numbers depend on those of another but through what is stored once for several.
"""
