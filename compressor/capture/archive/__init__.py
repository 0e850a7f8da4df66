"""Read programs that torch.export.save wrote, without unpickling or evaluating anything in them.

Invariant: of an archive only JSON and raw numbers are read; an operator that is not on a list is refused by name.
"""
