"""Let a decoder's tokens leave after some of its blocks: logits there, blocks that samples skip.

Invariant: logits of an exit are made by the model's own final norm and head; no parameter is added.
"""
