"""Capture encoder-decoders of transformers: a source and the tokens so far in, logits out.

Invariant: attention layers are told apart by what they write to a cache, never by their names.
"""
