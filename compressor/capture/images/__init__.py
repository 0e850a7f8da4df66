"""Capture image classifiers of transformers: pixels in, logits out.

Invariant: sizes come from the model's files; no picture is read here.
"""
