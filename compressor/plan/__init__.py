"""Tell what a run will cost, before a weight is read.

Invariant: reads headers, no weights.
"""
