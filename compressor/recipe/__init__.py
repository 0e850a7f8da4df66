"""Read recipes; every error names file and line.

Invariant: reads no tensor and runs no pass.
"""
