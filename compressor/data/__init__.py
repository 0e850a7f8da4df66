"""Load text, images and sound: samples to calibrate on, data to evaluate on.

Invariant: does not know what is done with them.
"""
