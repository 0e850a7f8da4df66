"""Capture models that embed pictures and texts into one space: one graph, which is cut into two entries.

Invariant: what makes similarities of embeddings is read from the dataflow.
"""
