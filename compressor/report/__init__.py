"""Write what a run leaves for people and programs: JSON, JUnit.

Invariant: only looks down: it reads outcomes and changes none.
"""
