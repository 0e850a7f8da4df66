"""Write a run's results for people and programs: JSON, JUnit, pages, a model card.

Invariant: reads outcomes and changes none.
"""
