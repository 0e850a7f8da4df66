"""Make experts ours: each becomes a linear of its own that reads the rows of its tokens.

Invariant: experts come through transformers' interface for them, or are refused by name.
"""
