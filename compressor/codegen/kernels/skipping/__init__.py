"""The packed linear that skips inputs: small activations are zero, and the codes of their columns are not read.

Codes lie column by column, so that a column that is skipped is cache lines that are not read.  One token makes a list
of the columns that are left, in their order, and adds four of them at a time to the sums of a panel's rows, which stay
in the first-level cache: each is a long run of bytes, which the processor fetches ahead as such.  Several tokens skip
different columns.  Their columns are all read, and become floats once for many tokens; what is small is multiplied as
zero.  Sums go through a group's columns in their order either way, and have the same bits.

Invariant: what is small is not read by one token, and is zero for several.
"""
