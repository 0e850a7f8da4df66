"""Find what a model's attention asks for, and put our operators in the place of attention that it writes out.

Invariant: a place is rewritten only if it computes what our operator computes, on random numbers.
"""
