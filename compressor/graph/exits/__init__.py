"""Let a decoder's tokens leave after some of its blocks: logits there, blocks and networks that some tokens pass by.

Invariant: logits of an exit are made by the model's own final norm and head; no parameter is added for them.
"""
