"""The packed linear that skips inputs: small activations are zero, and the codes of their columns are not read.

Codes lie column by column, so that a column that is skipped is cache lines that are not read.  One token makes a list
of the columns that are left, in their order, and adds four of them at a time to the sums of a panel's rows, which stay
in the first-level cache: each is a long run of bytes, which the processor fetches ahead as such.  Several tokens skip
different columns: what is small for one of them is multiplied as zero.  Two to eight list the columns that any of them
leaves, and go the same way.  More read all columns, which become floats once for many tokens.  Sums go through a
group's columns in their order every way, and have the same bits.

Invariant: a column that is small for all of up to eight tokens is not read, and what is small is zero for its token.
"""
