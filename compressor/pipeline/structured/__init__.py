"""Steps of passes that make linears and convolutions smaller.

    channels.py       channels that one group of linears writes and one reads, heads too: choose, remove, record, plan
    inner_pruning.py  the passes on these: all but how many go
    widths.py         any channels: how many of each family go under a budget, and what the graph costs then

Invariant: which channels are one is read from the graph (:mod:`compressor.graph.dependencies`), never decided here.
"""
