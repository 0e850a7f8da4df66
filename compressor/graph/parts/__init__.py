"""Cut a decoder's graph into parts that run one after another, or some of them.

Invariant: all parts in order compute what the whole does; no parameter is in two of them that the whole has once.
"""
