"""Measure what alternatives of an architecture cost on the target: time and memory.

Invariant: of sub-layers that are alike one is measured.
"""
