"""Kinds of drafts, a module each, and the one list of them.

Invariant: a kind is a name in the registry, the entries of a library that it calls, and what makes its drafts.
"""
