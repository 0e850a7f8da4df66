"""Stand in the place of a sub-layer: one class a file, which recipes name by the file.

Invariant: an alternative is data; nothing here changes a graph.
"""
