"""How far outputs are from what a training wants.

Invariant: a loss is a mean over tokens, and so does not depend on how many there are.
"""
