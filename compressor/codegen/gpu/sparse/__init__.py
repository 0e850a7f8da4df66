"""Linears on a GPU whose weights are left out in part: single ones of every few, or columns of a tile of rows."""
