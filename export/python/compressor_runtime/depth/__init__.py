"""Run a decoder in stages, and not all of them for each token.

Invariant: a stage that is run late writes the keys and values that it would have written at once.
"""
