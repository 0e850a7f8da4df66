"""Share what exports for other programs have in common: the dense form of a graph, options, writing, and the check.

Invariant: a site that a layout cannot hold exactly is refused by name before anything is written.
"""
