"""Lower experts: stack what passes saw one by one, and call the kernels that read a token's experts alone.

Invariant: every stacked weight is a copy of its experts' stored parts, bit by bit.
"""
