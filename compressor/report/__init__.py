"""Write a run's results for people and programs: JSON, JUnit.

Invariant: reads outcomes and changes none.
"""
