"""Compile candidates of kernels, to be timed on another machine.

Invariant: nothing here runs a kernel; a candidate is the kernel that a bundle would get, cut down to the tokens that
it is timed on.
"""
