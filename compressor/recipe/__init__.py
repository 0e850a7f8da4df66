"""Read recipes; every error says file and line.

Invariant: reads no tensor and runs no pass.
"""
