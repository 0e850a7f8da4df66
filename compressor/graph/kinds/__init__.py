"""Find what only some kinds of models have: tables of embeddings, gates of recurrent layers, encoders beside decoders.

Invariant: a graph without them is answered as well: with nothing.
"""
