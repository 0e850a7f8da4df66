"""List what bundles are exported to: one file each, named as ``--to`` names it.

Invariant: a file knows its layout and nothing of the others; there is no list to edit.
"""
