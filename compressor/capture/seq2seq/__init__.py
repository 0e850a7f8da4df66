"""Capture encoder-decoders of transformers: a source and the tokens so far in, logits out."""
