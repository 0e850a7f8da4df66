"""Make programs for browsers in WGSL and WebAssembly, and run both here.

Invariant: the same walk of the Relax program makes both.
"""
