"""Run passes in order, and give them what they share: choosing sites, replacing, recording, resuming, planning.

Invariant: knows no pass by name.
"""
