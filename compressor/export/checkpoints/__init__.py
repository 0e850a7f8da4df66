"""Write a rewritten but unpacked model as other tools load it: a Hugging Face folder.

Invariant: what is written is captured again and has to be the same program with the same numbers; what a configuration
cannot say is refused before any weight is read.
"""
