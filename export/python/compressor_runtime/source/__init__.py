"""Turn a source (a text's tokens, or sound) into the keys and values that an encoder-decoder's decoder reads.

Invariant: an encoder runs once a source.
"""
