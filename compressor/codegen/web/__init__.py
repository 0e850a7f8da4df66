"""Make programs for browsers in WGSL and WebAssembly, and run both here.

Invariant: one walk of the Relax program serves both.
"""
