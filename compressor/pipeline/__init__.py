"""Run passes in order, with what they share: sites, replacing, recording, resuming, planning.

Invariant: knows no pass by name.
"""
