"""Routed linears on a GPU: of the weights of all experts, those of a token's experts are read."""
