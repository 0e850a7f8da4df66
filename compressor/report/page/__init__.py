"""Write pages about bundles: one file, with charts drawn here, without script, that asks for nothing.

Invariant: all text is escaped, by `report/page/elements.py` alone; no page has a script or a reference to another file.
"""
