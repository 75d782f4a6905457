"""Names, groups and places of gradients; no communication."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from guozhuang.compat.horovod.torch.backward_passes import HookedParameter
from guozhuang.compat.horovod.torch.gradient_units import _FlatGradients
from guozhuang.compat.horovod.torch.named_parameters import check_groups, grouped, names_of
from guozhuang.compat.horovod.torch.optimizer import DistributedOptimizer
from guozhuang.gradients.buckets import in_process_memory

from .horovod_alone import MirrorChannel


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


# ---- flat tensors -------------------------------------------------------------------------------------------------------


def _flat(*parameters: Tensor) -> _FlatGradients:
    return _FlatGradients([HookedParameter(p, str(i), 1) for i, p in enumerate(parameters)], in_process_memory)


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
def test_a_gradient_has_the_format_of_the_parameter_and_the_wire_is_its_memory(index: int) -> None:
    value = _formats()[index]
    flat = _flat(*_parameters((3,)), value)
    flat.begin(1.0)
    gradient, wire = flat.bucket.views[1], flat.wire(1)
    gradient.copy_(value)
    assert gradient.shape == value.shape and gradient.stride() == torch.empty_like(value).stride()
    assert wire.is_contiguous() and wire.numel() == value.numel() and wire.data_ptr() == gradient.data_ptr()
    version = gradient._version
    wire.mul_(2)
    assert torch.equal(gradient, value * 2)
    assert gradient._version == version  # what the engine writes is no change by the program


def test_who_has_another_memory_format_is_told_so() -> None:
    """The wires of both are (4, 3, 3, 3), but for the dim that is added."""

    def shapes(weight: Tensor) -> list[torch.Size]:
        flats = [_flat(weight.to(memory_format=each)) for each in (torch.contiguous_format, torch.channels_last)]
        return [flat.wire(0).shape for flat in flats if flat.begin(1.0)]

    plain, last = shapes(torch.randn(4, 3, 3, 3))
    assert plain != last
    assert shapes(torch.randn(4, 3, 1, 1)) == [(4, 3, 1, 1)] * 2  # the same in both formats


def test_gradients_lie_in_reverse_apart_by_dtype_and_large_ones_that_never_come_cost_nothing(
    channel: MirrorChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, torch.dtype]] = []

    def allocate(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made.append((num_elements, dtype))
        return in_process_memory(num_elements, dtype, device)

    monkeypatch.setattr(channel, "allocate", allocate)
    large = nn.Parameter(torch.empty(9 << 20))  # more than a flat tensor is to hold
    parameters = [large, nn.Parameter(torch.zeros(7, dtype=torch.float64)), *_parameters((3,), (4,))]
    optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    parameters[3].sum().backward()
    assert made == [(7, torch.float32)]
    parameters[1].sum().backward()
    assert made == [(7, torch.float32), (7, torch.float64)]
    optimizer.load_state_dict(optimizer.state_dict())
