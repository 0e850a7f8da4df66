"""Run passes in order, and share among them: choosing sites, replacing, recording, resuming, planning.

Invariant: knows no pass by name.
"""
