"""Routed linears on a GPU: of the weights of all experts, those of a token's experts are read.

Invariant: launches know how many pairs of token and expert there are, and not whose they are.
"""
