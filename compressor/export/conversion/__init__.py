"""Convert a bundle or a quantised checkpoint to another program's layout.

Invariant: a weight keeps its values to the last bit, or its loss is measured, by request, and told by name.
"""
