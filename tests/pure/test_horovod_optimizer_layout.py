"""Names, groups and places of gradients; no communication."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from guozhuang.compat.horovod.torch.gradient_layout import GradientLayout
from guozhuang.compat.horovod.torch.named_parameters import check_groups, grouped, names_of
from guozhuang.gradients.buckets import in_process_memory


def _parameters(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [nn.Parameter(torch.arange(float(torch.Size(shape).numel())).reshape(shape)) for shape in shapes]


# ---- names ------------------------------------------------------------------------------------------------------------


def test_without_names_parameters_are_numbered_through_all_groups() -> None:
    a, b, c = _parameters((2,), (3,), (4,))
    names = names_of(None, [{"params": [a, b]}, {"params": [c]}])
    assert list(names.values()) == ["allreduce.noname.0", "allreduce.noname.1", "allreduce.noname.2"]


def test_names_keep_the_order_in_which_they_were_given_and_may_be_more_than_there_are_parameters() -> None:
    a, b, c = _parameters((2,), (3,), (4,))
    names = names_of(iter([("z", a), ("a", b), ("other", c)]), [{"params": [b, a]}])
    assert [names[p] for p in (a, b, c)] == ["z", "a", "other"]
    assert list(names.values()) == ["z", "a", "other"]


def test_a_tensor_under_two_names_has_the_same_one_whatever_the_order() -> None:
    (a,) = _parameters((2,))
    assert (
        names_of([("x", a), ("y", a)], [{"params": [a]}])
        == names_of([("y", a), ("x", a)], [{"params": [a]}])
        == {a: "y"}
    )


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (lambda a, b: [a, b], "sequence of tuples"),
        (lambda a, b: [("x", a), ("x", b)], "must be unique. Found duplicates: x"),
        (lambda a, b: [("x", a)], r"were not named.*shapes \(3,\)"),
    ],
)
def test_names_that_cannot_be_are_refused(named: object, says: str) -> None:
    a, b = _parameters((2,), (3,))
    with pytest.raises(ValueError, match=says):
        names_of(named(a, b), [{"params": [a, b]}])  # type: ignore[operator]


# ---- groups -----------------------------------------------------------------------------------------------------------


def test_a_number_of_groups_gives_chunks_that_differ_by_one_at_most() -> None:
    parameters = _parameters(*[(1,)] * 5)
    names = list("abcde")
    assert grouped(names, parameters, 2, lambda told: told) == [[0, 1, 2], [3, 4]]
    assert grouped(names, parameters, 9, lambda told: told) == [[0], [1], [2], [3], [4]]


def test_the_order_is_that_of_the_first_rank() -> None:
    parameters = _parameters(*[(1,)] * 4)
    assert grouped(list("abcd"), parameters, 2, lambda _: list("dcba")) == [[3, 2], [1, 0]]
    with pytest.raises(ValueError, match=r"the first rank does not.*'b'"):
        grouped(list("ab"), parameters[:2], 1, lambda _: ["a"])


def test_chosen_groups_leave_the_rest_alone_and_pass_over_what_is_not_exchanged() -> None:
    a, b, c, frozen = _parameters((1,), (1,), (1,), (1,))
    assert grouped(list("abc"), [a, b, c], [[c, frozen, a], [frozen]], lambda told: told) == [[0, 2], [1]]
    assert grouped(list("abc"), [a, b, c], [[a, c]], lambda _: list("cba")) == [
        [2, 0],
        [1],
    ]  # in the first rank's order


@pytest.mark.parametrize("groups", [0, -1, 1.5, "two", (1,), True])
def test_what_is_no_number_and_no_list_is_refused(groups: object) -> None:
    with pytest.raises(ValueError, match="positive integer or a list of list"):
        check_groups(groups)


def test_groups_hold_tensors_each_once() -> None:
    a, b = _parameters((1,), (1,))
    check_groups([[a], [b]])
    with pytest.raises(ValueError, match=re.escape("must consist of torch.Tensor")):
        check_groups([["a"]])
    with pytest.raises(ValueError, match="only appear once"):
        check_groups([[a, b], [a]])


# ---- places -----------------------------------------------------------------------------------------------------------


class _Memory:
    """Counts what is allocated."""

    def __init__(self) -> None:
        self.flats: list[Tensor] = []

    def __call__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.flats.append(in_process_memory(num_elements, dtype, device))
        return self.flats[-1]


def _layout(parameters: list[Tensor], memory: _Memory) -> GradientLayout:
    return GradientLayout(parameters, memory, lambda dtype: dtype)


def test_neighbours_lie_next_to_each_other_in_the_reverse_order_of_registration() -> None:
    memory = _Memory()
    layout = _layout(_parameters((2, 3), (5,), (4,)), memory)
    assert not memory.flats
    places = [layout.place(i) for i in (2, 1, 0)]
    assert [flat.numel() for flat in memory.flats] == [15]
    assert [place.wire.storage_offset() for place in places] == [0, 4, 9]
    assert all(place.wire.is_contiguous() for place in places)
    assert layout.place(1) is places[1]


def test_dtypes_lie_apart_and_only_what_is_needed_is_allocated() -> None:
    memory = _Memory()
    parameters = [*_parameters((3,)), nn.Parameter(torch.zeros(7, dtype=torch.float64)), *_parameters((4,))]
    layout = _layout(parameters, memory)
    layout.place(2)
    assert [(flat.numel(), flat.dtype) for flat in memory.flats] == [(7, torch.float32)]
    layout.place(1)
    assert [(flat.numel(), flat.dtype) for flat in memory.flats[1:]] == [(7, torch.float64)]


def test_a_large_parameter_that_gets_no_gradient_costs_nothing() -> None:
    memory = _Memory()
    large = nn.Parameter(torch.empty(9 << 20))  # more than a flat tensor is to hold
    layout = GradientLayout([large, *_parameters((4,))], memory, lambda dtype: dtype)
    layout.place(1)
    assert [flat.numel() for flat in memory.flats] == [4]


def _formats() -> list[Tensor]:
    return [
        torch.randn(4, 3, 2, 5),
        torch.randn(4, 3, 2, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 4).t(),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(6, 4)[::2],
        torch.randn(()),
        torch.randn(1, 7, 1),
    ]


@pytest.mark.parametrize("index", range(len(_formats())))
def test_a_place_has_the_format_of_the_parameter_and_the_wire_is_its_memory(index: int) -> None:
    value = _formats()[index]
    place = _layout([*_parameters((3,)), value], _Memory()).place(1)
    place.gradient.copy_(value)
    assert place.gradient.shape == value.shape
    assert place.gradient.stride() == torch.empty_like(value).stride()
    assert torch.equal(place.gradient, value)
    assert place.wire.is_contiguous() and place.wire.numel() == value.numel()
    assert place.wire.data_ptr() == place.gradient.data_ptr()
    place.wire.mul_(2)
    assert torch.equal(place.gradient, value * 2)
    assert not place.gradient._is_view()


def test_who_has_another_memory_format_is_told_so() -> None:
    """The wires of both are (4, 3, 3, 3), but for the dim that is added."""
    weight = torch.randn(4, 3, 3, 3)
    plain, last = (
        _layout([weight.to(memory_format=each)], _Memory()).place(0).wire.shape
        for each in (torch.contiguous_format, torch.channels_last)
    )
    assert plain != last
    pointwise = torch.randn(4, 3, 1, 1)  # the same in both formats
    places = [
        _layout([pointwise.to(memory_format=each)], _Memory()).place(0)
        for each in (torch.contiguous_format, torch.channels_last)
    ]
    assert places[0].wire.shape == places[1].wire.shape == (4, 3, 1, 1)


def test_what_the_engine_writes_is_no_change_by_the_program() -> None:
    place = _layout(_parameters((3,)), _Memory()).place(0)
    before = place.gradient._version
    place.wire.add_(1)
    assert place.gradient._version == before
    place.gradient.add_(1)
    assert place.gradient._version > before


def test_a_gradient_that_is_still_held_keeps_its_value() -> None:
    (parameter,) = _parameters((2, 2))
    place = _layout([parameter], _Memory()).place(0)
    place.gradient.fill_(1.0)
    parameter.grad = place.gradient
    parameter.grad = None
    assert not place.leave_kept()
    same = place.gradient.data_ptr()
    assert same == place.wire.data_ptr()
    held = place.gradient
    assert not place.leave_kept()
    place.gradient.fill_(5.0)
    assert torch.equal(held, torch.ones(2, 2))
    assert place.gradient.data_ptr() == same and held.data_ptr() != same


@pytest.mark.parametrize("alias", [Tensor.detach, lambda one: one.view(-1), lambda one: one[0]])
def test_a_place_moves_away_from_who_holds_its_memory(alias: Callable[[Tensor], Tensor]) -> None:
    memory = _Memory()
    parameters = _parameters((3,), (2, 2))
    layout = _layout(parameters, memory)
    place, neighbour = layout.place(1), layout.place(0)
    place.gradient.fill_(1.0)
    held = alias(place.gradient)
    assert not neighbour.leave_kept()
    assert place.leave_kept()
    place.gradient.fill_(5.0)
    assert held.eq(1.0).all() and place.wire.eq(5.0).all()
    assert not place.leave_kept() and not neighbour.leave_kept() and len(memory.flats) == 2


def test_a_gradient_that_was_led_away_is_not_the_place() -> None:
    place = _layout(_parameters((2, 2)), _Memory()).place(0)
    gradient = place.gradient
    assert place.is_taken_by(gradient) and not place.is_taken_by(gradient.detach())
    gradient.data = torch.full((2, 2), 7.0)
    assert not place.is_taken_by(gradient)
    assert not place.leave_kept()
    assert place.gradient.data_ptr() == place.wire.data_ptr() and gradient.eq(7.0).all()


def test_a_place_moves_also_if_its_gradient_was_led_away_from_who_holds_its_memory() -> None:
    place = _layout(_parameters((2, 2)), _Memory()).place(0)
    place.gradient.fill_(1.0)
    held = place.gradient.detach()
    place.gradient.data = torch.zeros(2, 2)
    assert place.leave_kept()
    place.gradient.fill_(5.0)
    assert held.eq(1.0).all() and place.wire.eq(5.0).all()
