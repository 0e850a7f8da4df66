"""Write a rewritten but unpacked model as other tools load it: a Hugging Face folder, or a program of torch.export.

Invariant: what is written is read again and has to be the same program; what a folder or a program cannot say is
refused before any weight is read.
"""
