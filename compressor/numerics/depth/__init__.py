"""Decide how many blocks a token runs: by its position, or by how sure an exit is.

Invariant: numbers of blocks, positions and confidences go in, and no model does.
"""
