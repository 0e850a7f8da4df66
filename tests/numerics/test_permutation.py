"""Orders of channels: against all ways to part a few of them, and never worth less than what was."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from compressor.formats.extras import ColumnBlocks, KeptOfGroup
from compressor.numerics.channels.exchanges import exchange, rounds_of
from compressor.numerics.channels.permutation import Goal, KeptBlocks, KeptOfGroups, Piece
from compressor.numerics.channels.shared_scales import SharedScales
from compressor.numerics.sparsity.block_sparsity import best_blocks, block_mask, of_tiles
from compressor.numerics.sparsity.n_of_m import largest_of_groups


def partings(items: list[int], size: int) -> Iterator[list[int]]:
    """Yield all ways to part items into clusters, whose order does not matter."""
    if not items:
        yield []
        return
    first, others = items[0], items[1:]
    for chosen in itertools.combinations(others, size - 1):
        for rest in partings([i for i in others if i not in chosen], size):
            yield [first, *chosen, *rest]


def random_piece(channels: int, size: int, seed: int, kept: float = 0.0, across: bool = False) -> Piece:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(channels, 20, generator=generator) * torch.rand(channels, 1, generator=generator)
    weights = torch.rand(channels, generator=generator)
    return Piece(values if not kept and size != 4 else values.square(), weights, size, kept, across)


def worth_of_all(goal: Goal, piece: Piece) -> list[float]:
    """Return what each parting is worth: the sum over its clusters, which are fewer than the partings."""
    channels, size = len(piece.values), piece.size
    all_of_them = partings([*range(channels)], size)
    if piece.across:
        return [goal.value(piece, torch.tensor(parting)) for parting in all_of_them]
    alone = {}
    for cluster in itertools.combinations(range(channels), size):
        own = replace(piece, values=piece.values[[*cluster]], weights=piece.weights[[*cluster]])
        alone[cluster] = goal.value(own, torch.arange(size))
    return [sum(alone[tuple(one[i : i + size])] for i in range(0, channels, size)) for one in all_of_them]


@pytest.mark.parametrize(("goal", "channels", "size", "kept", "across", "least"), [
    (KeptOfGroups(2), 8, 4, 0.0, False, 1.0),  # one pair of clusters, of which all partings are tried
    (KeptOfGroups(1), 8, 4, 0.0, False, 1.0),
    (KeptOfGroups(2), 12, 4, 0.0, False, 0.93),
    (KeptOfGroups(1), 8, 2, 0.0, False, 1.0),
    (KeptOfGroups(3), 10, 5, 0.0, False, 0.85),  # single swaps
    (KeptBlocks(), 12, 4, 0.5, False, 0.6),
    (KeptBlocks(), 8, 4, 0.5, True, 1.0),
    (SharedScales(False), 12, 3, 0.0, False, 0.98),
    (SharedScales(True), 12, 3, 0.0, False, 0.85),
])  # fmt: skip
def test_orders_are_close_to_the_best_of_all(
    goal: Goal, channels: int, size: int, kept: float, across: bool, least: float
) -> None:
    """The search reaches at least this share of the gain of the best partition, on each of four problems."""
    for seed in range(4):
        piece = random_piece(channels, size, seed, kept, across)
        before, found = goal.value(piece, torch.arange(channels)), goal.search([piece], 100)
        best = max(worth_of_all(goal, piece))
        assert sorted(found.tolist()) == [*range(channels)]
        assert goal.value(piece, found) >= before + least * (best - before) - 1e-9 * abs(best)


def test_clusters_that_are_hidden_are_found() -> None:
    """Rows that keep the same columns, columns of one size and columns that compete, all shuffled."""
    shuffle = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    hidden = torch.arange(64) // 16
    rows = torch.where(torch.arange(32) // 8 == hidden[:, None], 1.0, 0.01)[shuffle]
    piece = Piece(rows, torch.ones(64), 16, 0.25)
    found = KeptBlocks().search([piece], 100)
    assert all(len({*hidden[shuffle][found].view(4, 16)[i].tolist()}) == 1 for i in range(4))
    sizes = (10.0 ** -hidden.float())[shuffle]
    scales = SharedScales(False)
    found = scales.search([Piece(sizes[:, None].expand(64, 8), torch.ones(64), 16)], 100)
    assert scales.value(Piece(sizes[:, None], torch.ones(64), 16), found) == pytest.approx(
        -sum(4 * 16 * 100.0**-i for i in range(4)), rel=1e-5
    )
    large = (torch.arange(64) < 32).float()[shuffle]  # two large ones in each group of four lose nothing
    goal = KeptOfGroups(2)
    piece = Piece(large[:, None], torch.ones(64), 4)
    assert goal.value(piece, goal.search([piece], 100)) == 32


def test_values_are_what_the_passes_keep() -> None:
    """Against the masks of the pruning passes, on weights whose columns, or rows, are in that order."""
    W = torch.randn(48, 32, generator=torch.Generator().manual_seed(2)).square()
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    for pattern in (KeptOfGroup(2, 4), KeptOfGroup(4, 8), KeptOfGroup(1, 2)):
        expected = float(W[:, order][largest_of_groups(W[:, order], pattern)].double().sum())
        piece = Piece(W.t().contiguous(), torch.ones(32), pattern.size)
        assert KeptOfGroups(pattern.kept).value(piece, order) == pytest.approx(expected, rel=1e-6)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3))
    kept = best_blocks(of_tiles(W[order].double()), 8, ColumnBlocks(75))
    expected = float(W[order][block_mask(kept, 48, 32)].double().sum())
    assert KeptBlocks().value(Piece(W, torch.ones(48), 16, 0.25), order) == pytest.approx(expected, rel=1e-6)
    # Blocks of 32 rows by four columns, in the order of columns: half of each tile's.
    W = torch.rand(64, 48, generator=torch.Generator().manual_seed(4))
    kept = best_blocks(of_tiles(W[:, order].double()), 24, ColumnBlocks(50, 4))
    expected = float(W[:, order][block_mask(kept, 64, 48)].double().sum())
    blocks = W.view(2, 32, 48).sum(1).t().contiguous()
    assert KeptBlocks().value(Piece(blocks, torch.ones(48), 4, 0.5, True), order) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("count", [2, 5, 8])
def test_every_two_clusters_meet(count: int) -> None:
    rounds = list(itertools.islice(rounds_of(count), count - 1 + count % 2))
    met = [tuple(sorted(pair)) for pairs in rounds for pair in pairs.t().tolist()]
    assert sorted(met) == list(itertools.combinations(range(count), 2))


def test_rounds_end_with_the_last_exchange() -> None:
    calls = []

    def never(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(len(pairs))
        return pairs.flip(1), torch.zeros(len(pairs), dtype=torch.bool)

    assert exchange(torch.arange(24), 4, 100, never).tolist() == [*range(24)] and calls == [3] * 6
