"""Attend over caches, packed or not, and over prompts.

Invariant: caches are written in place.
"""
