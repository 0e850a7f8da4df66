"""Use the machine that compresses: files, cache, digests, memory, processor, child processes.

Invariant: knows no model, no format and no target.
"""
