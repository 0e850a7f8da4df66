"""Measure and choose how a bundle drafts, before it is finished.

Invariant: what is chosen by measurements is locked, and a locked run does not choose again.
"""
