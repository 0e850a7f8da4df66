"""Run independent jobs: in this process, in a pool of processes, or on a Ray cluster.

Invariant: knows functions by their import names and arguments as data, and nothing of models.
"""
