"""From a compressed graph and its kernels to the files of a bundle."""

from __future__ import annotations
