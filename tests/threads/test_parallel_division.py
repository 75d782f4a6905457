"""Divided parameters: parts and wholes, uneven and interleaved and shared ones, tied ones of several stages, their norms."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from guozhuang.errors import MismatchError, UsageError
from guozhuang.optim.divided import DividedOptimizer
from guozhuang.parallel.axes import make_axes
from guozhuang.parallel.division import Division, disown, divide, division_of, norm_of, norms_of, part, whole
from guozhuang.parallel.equal_batches import EqualBatches, _checksum
from guozhuang.parallel.spans import parts, take
from guozhuang.sharding import shard
from guozhuang.sharding.elementwise import choose_keepers
from guozhuang.world.layout import Layout

from .ranks import run_threads

# Of 12 rows: what each rank of two keeps. Uneven; slices of a packed matrix; rows that both keep.
SPANS: tuple[tuple[tuple[tuple[int, int], ...], ...], ...] = (
    (((0, 5),), ((5, 12),)),
    (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))),
    (((0, 8),), ((4, 12),)),
    (((0, 12),), ()),
)


def values(*shape: int) -> torch.Tensor:
    return torch.sin(torch.arange(1.0, 1 + math.prod(shape))).view(shape)


def test_a_stage_sends_elements_in_their_order_and_not_in_that_of_its_memory() -> None:
    def on_rank(rank: int, size: int) -> None:
        given = values(2, 3, 4, 5)
        parameter = nn.Parameter(given.to(memory_format=torch.channels_last))
        disown(parameter, (1,), dist.group.WORLD)  # type: ignore[arg-type]
        division = division_of(parameter)
        assert division is not None and torch.equal(whole(parameter, division), given)

    run_threads(on_rank, 2)


def test_parts_and_wholes() -> None:
    def on_rank(rank: int, size: int) -> None:
        axes = make_axes(Layout(pp=2, tp=2))
        index = axes.index("tp")
        held = []
        for dim in (0, 1):
            for spans in SPANS:
                shape = (12, 3) if dim == 0 else (3, 12)
                parameter = nn.Parameter(values(*shape))
                parameter.grad = values(*shape) * 2
                divide(parameter, dim - 2, spans[index], axes.group("tp"))
                disown(parameter, (dim,), axes.group("pp"))
                division = division_of(parameter)
                assert division is not None and parameter.shape == division.part_shape
                if axes.index("pp") == dim:
                    rows = values(*shape).movedim(dim, 0)
                    kept = torch.cat([rows[start:stop] for start, stop in spans[index]] or [rows[:0]])
                    torch.testing.assert_close(parameter.detach(), kept.movedim(0, dim), rtol=0, atol=0)
                    assert parameter.grad is not None and torch.equal(parameter.grad, parameter.detach() * 2)
                else:
                    assert parameter.numel() == 0 and parameter.grad is None
                assert torch.equal(whole(parameter, division), values(*shape))
                assert torch.equal(part(values(*shape), division), parameter)
                held.append(parameter)
        wanted = [values(12, 3)] * 4 + [values(3, 12)] * 4
        for norm_type in (1.0, 2.0, 3.5, math.inf):
            found = norm_of(held, held, norm_type)
            torch.testing.assert_close(found, torch.cat([each.reshape(-1) for each in wanted]).double().norm(norm_type))
            each = norms_of(held, held, norm_type)
            mine = [i for i in range(8) if i // 4 == axes.index("pp")]
            for i in mine:
                torch.testing.assert_close(each[i], wanted[i].double().norm(norm_type))
        with pytest.raises(UsageError, match="above 0"):
            norm_of(held, held, 0.0)

    run_threads(on_rank, 4)


def test_norms_count_tied_and_whole_parameters_once_and_find_nan() -> None:
    def on_rank(rank: int, size: int) -> None:
        stages = make_axes(Layout(pp=3)).group("pp")
        tied, mine, gone = nn.Parameter(values(4)), nn.Parameter(values(2)), nn.Parameter(values(5))
        disown(tied, (0, 2), stages)
        disown(mine, (1,), stages)
        disown(gone, (2,), stages)
        buffer = values(3)
        disown(buffer, (1,), stages, keep=True)
        assert buffer.numel() == 3 and tied.numel() == (0 if rank == 1 else 4)
        expected = torch.cat([values(4), values(2)]).double().norm()
        torch.testing.assert_close(norm_of([tied, mine, gone], [tied, mine, None]), expected)
        if rank == 1:
            with torch.no_grad():
                mine[0] = math.nan
        assert norm_of([tied, mine], [tied, mine], math.inf).isnan()
        assert norm_of([tied, mine], [tied, mine], 2.0).isnan()

    run_threads(on_rank, 3)


def test_nothing_is_divided_by_one_rank() -> None:
    def on_rank(rank: int, size: int) -> None:
        axes = make_axes(Layout(dp=2))
        assert axes.group("tp") is None and axes.group("pp", "tp") is None
        parameter = nn.Parameter(values(4))
        divide(parameter, 0, ((0, 4),), axes.group("tp"))
        disown(parameter, (0,), axes.group("pp"))
        assert division_of(parameter) is None
        torch.testing.assert_close(norm_of([parameter], [parameter]), values(4).double().norm())
        assert whole(parameter, Division(parameter.shape)).equal(parameter)

    run_threads(on_rank, 2)


def test_a_destroyed_group_is_made_anew() -> None:
    """The other rank still holds the destroyed group: it must not go on with it alone."""

    def on_rank(rank: int, size: int) -> None:
        first = make_axes(Layout(dp=2)).group("dp")
        assert first is not None
        dist.destroy_process_group(first)
        if rank == 0:
            del first
        second = make_axes(Layout(dp=2)).group("dp")
        mine = torch.tensor([rank])
        dist.all_reduce(mine, group=second)
        assert mine.item() == 1

    run_threads(on_rank, 2)


def test_groups_of_axes() -> None:
    def on_rank(rank: int, size: int) -> Any:
        axes = make_axes(Layout(pp=2, dp=2, tp=2))
        here = torch.tensor([float(1 << rank)])
        sums = {}
        for names in (
            ("pp",),
            ("dp",),
            ("tp",),
            ("dp", "space", "sequence"),
            ("pp", "space", "sequence", "tp"),
            ("pp", "dp"),
        ):
            total = here.clone()
            torch.distributed.all_reduce(total, group=axes.group(*names))
            sums[names] = int(total) == sum(1 << peer for peer in axes.ranks(*names))
        return sums, axes.group("dp") is axes.group("dp", "space", "sequence"), axes.index("pp"), axes.size("tp")

    for rank, (sums, is_shared, stage, size) in enumerate(run_threads(on_rank, 8)):
        assert all(sums.values()) and is_shared and stage == rank // 4 and size == 2


def test_norm_of_complex_parts() -> None:
    whole_one = torch.complex(values(12, 3), values(12, 3).flip(0))

    def on_rank(rank: int, size: int) -> None:
        parameter = nn.Parameter(whole_one.clone())
        divide(parameter, 0, SPANS[0][rank], make_axes(Layout(tp=2)).group("tp"))
        torch.testing.assert_close(norm_of([parameter], [parameter], 3.0), whole_one.abs().double().norm(3.0))

    run_threads(on_rank, 2)


MATRICES = ((6, 5, 0), (5, 9, 1), (3, 4, 0), (3, 3, None), (7, 3, 1))  # their shapes, and the dim that is cut


def muon(steps: int, axes: Any = None, is_sharded: bool = False) -> list[torch.Tensor]:
    """Matrices after some steps, of which some have no gradient: of one process, or of slices of ranks."""
    model = nn.ParameterList(values(rows, columns) for rows, columns, _ in MATRICES)
    group = axes and axes.group("tp")
    for p, (_, _, dim) in zip(model, MATRICES, strict=True):
        if group is not None and dim is not None:
            divide(p, dim, [parts(p.shape[dim], group.size())[group.rank()]], group)
    stepped: Any = torch.optim.Muon(model.parameters(), lr=0.02)
    if group is not None:
        choose_keepers(stepped, axes.size("dp") if is_sharded else 1)
        if is_sharded:
            stepped = shard(model, stepped, axes.group("dp"))[1]
        else:
            stepped = DividedOptimizer(stepped, (group,), needs_whole=True)
    for step in range(steps):
        for i, (p, (rows, columns, _)) in enumerate(zip(model, MATRICES, strict=True)):
            gradient, division = values(columns + step, rows).t()[:, :columns], division_of(p)
            if division is not None and division.dim is not None:
                gradient = take(gradient, division.dim, division.spans)
            p.grad = None if i == step else gradient.clone()
        stepped.step()
    return [p.detach() if (d := division_of(p)) is None else whole(p, d) for p in model]


@pytest.mark.parametrize(
    ("layout", "is_sharded"),
    [
        pytest.param(Layout(tp=3), False, marks=pytest.mark.slow),
        pytest.param(Layout(dp=2, tp=2), False, marks=pytest.mark.slow),
        (Layout(dp=2, tp=2), True),
        pytest.param(Layout(dp=2, tp=3), True, marks=pytest.mark.slow),
    ],
)
def test_matrices_in_slices_are_stepped_to_the_same_bits(layout: Layout, is_sharded: bool) -> None:
    """With equal gradients a step of slices, of uneven length too, is that of whole matrices, though it rounds to bfloat16."""
    wanted = muon(4)
    for found in run_threads(lambda rank, size: muon(4, make_axes(layout), is_sharded), layout.size):
        for value, whole_one in zip(found, wanted, strict=True):
            assert torch.equal(value, whole_one)


def test_only_batches_that_differ_are_told_apart() -> None:
    """Views, and objects whose texts differ between ranks, are no other batch."""
    rows = torch.arange(30.0).view(10, 3)
    assert _checksum(rows[1:3].view(-1).view(torch.uint8)) == _checksum(rows[1:3].clone().view(-1).view(torch.uint8))
    assert _checksum(rows.view(-1).view(torch.uint8)) != _checksum(rows.flip(0).view(-1).view(torch.uint8))

    def on_rank(rank: int, size: int) -> None:
        batches = EqualBatches(make_axes(Layout(tp=2)), torch.device("cpu"))
        where, names = torch.device("cuda", rank), {"a"} if rank else {"b"}
        numbers = torch.view_as_complex(rows[:, :2].contiguous()).conj()
        with batches.compared(
            "training", (rows[1:3], numbers, numbers.imag, rows[:0]), {"where": where, "names": names}
        ):
            pass
        for other in (rows[rank:], numbers[rank], -0.0 if rank else 0.0, "ab"[rank], None if rank else rows):
            with (
                pytest.raises(MismatchError, match="input 0 of the model differs"),
                batches.compared("training", (other,), {}),
            ):
                pass

    run_threads(on_rank, 2)
