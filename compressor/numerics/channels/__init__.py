"""Channels one by one: their order in caches and in weights, and depthwise weights, whose rows read own inputs.

Invariant: no channel's numbers depend on those of another but through what is stored once for several.
"""
