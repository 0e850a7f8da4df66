"""Read and rewrite a captured graph: sites, segments, folding, residual stream, costs of nodes.

Invariant: facts about a model are read from its dataflow, never from a table of architectures.
"""
