"""Let later layers of a decoder run only the tokens whose logits are wanted (SwiftKV, arXiv 2410.03960).

    layers.py    the later layers: the residual stream in front of each, what its keys and values are made of
    sharing.py   which of them may share keys and values, and the means of what makes these
    rewrite.py   keys and values from the stream behind the early layers; the rest on kept tokens
    figures.py   what a prompt costs, before and after
    predicted_caches.py   a small model in front that predicts keys and values of the other tokens (arXiv 2410.08391)

Invariant: read from the dataflow alone; what cannot be followed is named.
"""
