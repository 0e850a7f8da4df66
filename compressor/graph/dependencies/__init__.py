"""Find which channels of which parameters belong together, take some of them away, or put them in another order.

    labels.py      which labels are the same channel, and which have to stay
    axes.py        the labels of each tensor's axes
    computing.py   what operators that compute do to the axes of their inputs
    moving.py      and those that move entries
    attention.py   attention: whole heads
    rules.py       the rule of each operator
    resizing.py    sizes that a node states, once channels are gone
    channels.py    the families of channels of a graph; removing some
    permuting.py   sets of channels that may change places; the change

Invariant: an operator without a rule makes the channels that it reads stay, and is named.
"""
