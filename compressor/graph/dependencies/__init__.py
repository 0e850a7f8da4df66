"""Find which channels of which parameters belong together, and take some of them away.

    labels.py     which labels are the same channel, and which have to stay
    rules.py      what an operator does to the axes of its inputs
    channels.py   the families of channels of a graph; removing some

Invariant: an operator without a rule makes the channels that it reads stay, and is named.
"""
