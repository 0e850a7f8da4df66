"""Read and rewrite a captured graph: sites, segments, folding, residual stream, costs of nodes.

Invariant: what is known of a model is read from the dataflow, never from a table of architectures.
"""
