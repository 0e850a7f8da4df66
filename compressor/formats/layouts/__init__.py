"""How bits of masks and codes lie where they are not all stored, or not in tiles of interleaved words.

Where blocks are left out, every tile of 16 rows keeps as many columns, and all parts of the dense format are of these
alone, in their order; groups are of kept columns.  A bit says which: block ``c`` (a column, or four) is bit ``c % 8``
of byte ``c // 8``::

    kept             uint8    [ceil(out / 16), 8 * ceil(blocks / 64)]    ceil(out / 32) of blocks of 32 rows

Of N:M, each row keeps N of every M columns, and all parts of the dense format are of these.  The combinations of M
columns are numbered in lexicographic order; group ``g`` has bits ``g * b`` to ``g * b + b - 1`` of its row, b the bits
of the largest number::

    patterns         int32    [ceil(out / 16), ceil(groups * b / 32), 16]

Where single weights are left out (``_B1x1``), scales and zeros are those of the dense format.  A step is 64 columns of
a tile, and its mask 16 rows of 8 bytes: column ``64 * s + c`` is bit ``c % 8`` of byte ``c // 8`` of step ``s``.  Codes
that are kept follow one another in the order of these bits, step after step and tile after tile.  64 of them are
packed at once, plane after plane: in a ``p``-bit plane code ``k`` lies in byte ``k % (8 * p)`` at bits ``p * (k // (8 *
p))`` and on.  64 more codes are there so that whole registers can be loaded::

    codes            uint8    [(ceil(kept / 64) + 1) * 8 * bits]
    kept             uint8    [ceil(out / 16), ceil(in / 64), 16, 8]
    starts           int32    [ceil(out / 16)]    number of each tile's first code

Where inputs are skipped (``_SKIP``), codes lie column by column in panels of rows
(:func:`compressor.formats.parts.panel_rows`).  Of 8 bits, a byte is a row's code less its zero point,
signed; of 4 bits, 16 bytes hold 32 rows, the first 16 in the lower halves::

    codes            uint8    [panels, in, bytes of a panel's rows]    in place of the tiles
    thresholds       float32  [in]    inputs of a smaller size count as zero

Where codes of 8 bits lie in two planes (``_P4``), a chunk has eight columns, whose upper and lower four bits are a word
each; the words of each plane follow one another as those of a format of 4 bits do::

    codes            int32    [ceil(out / 16), ceil(in / 8), 1, 16]    upper bits
    lower            int32    [ceil(out / 16), ceil(in / 8), 1, 16]

Rows of packed caches are rounded and packed in one (:mod:`compressor.formats.layouts.packed_cache`).

Invariant: each function that packs codes has one that undoes it exactly.
"""
