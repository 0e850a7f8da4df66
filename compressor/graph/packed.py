"""Packed linears of a graph: their weights, their biases, and new ones on a tensor's way."""

from __future__ import annotations
