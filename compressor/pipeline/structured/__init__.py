"""Steps of passes that make linears and convolutions smaller, or put their channels in another order.

    channels.py       channels that one group of linears writes and one reads, heads too: choose, remove, record, plan
    inner_pruning.py  the passes on these: all but how many go
    widths.py         any channels: how many of each family go under a budget, and what the graph costs then
    orders.py         what an order of channels is good for: the linears behind free sets, and what these hold
    permutations.py   search an order of each set, apply it, compare the outputs, record

Invariant: which channels are one is read from the graph (:mod:`compressor.graph.dependencies`), never decided here.
"""
