"""Give models our attention, cache and masks while they are captured, through transformers' interfaces.

Invariant: what our operators cannot express is refused by name; nothing that changes the result is dropped.
"""
