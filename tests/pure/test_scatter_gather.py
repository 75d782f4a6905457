"""Cutting and joining of nested values: what is cut, what is shared, what is refused."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from guozhuang.data_parallel.scatter_gather import gather, scatter
from guozhuang.errors import UsageError
from tests.drawing import examples

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any = None

    @cached_property
    def rows(self) -> int:
        return len(self.x)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any


class Encoding(UserDict):  # type: ignore[type-arg]
    """Keeps more than its items, as the encodings of `transformers` do."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.kind = "encoding"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if dataclasses.is_dataclass(one):
        return all(_same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return bool(one == other)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.tuples(children, children)
    named = st.dictionaries(st.sampled_from("abc"), children, max_size=3)
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        named,
        named.map(OrderedDict),
        named.map(lambda d: defaultdict(list, d)),
        named.map(Encoding),
        named.map(MappingProxyType),
        pairs.map(Pair._make),
        pairs.map(lambda p: Plain(*p)),
        pairs.map(lambda p: Frozen(*p)),
    )


def _nested(rows: int, dim: int) -> st.SearchStrategy[Any]:
    def tensor(sizes: list[int]) -> Tensor:
        shape = [*sizes[:dim], rows, *sizes[dim:]]
        return torch.arange(torch.Size(shape).numel()).reshape(shape)

    tensors = st.lists(st.integers(1, 2), min_size=dim, max_size=2).map(tensor)
    others = st.one_of(st.none(), st.integers(), st.booleans(), st.text(max_size=2), st.just(torch.float16))
    return st.recursive(st.one_of(tensors, tensors, others), _containers, max_leaves=6)


@examples(150)
@given(st.data(), st.integers(1, 9), st.integers(1, 4), st.integers(0, 1))
def test_round_trip(data: st.DataObject, rows: int, num_devices: int, dim: int) -> None:
    value = [torch.zeros([1] * dim + [rows]), data.draw(_nested(rows, dim))]
    shares = scatter(value, [CPU] * num_devices, dim)
    expected = torch.zeros(rows).chunk(num_devices)
    assert [s[0].size(dim) for s in shares] == [len(e) for e in expected]
    assert _same(gather(shares, CPU, dim), value)


@examples(60)
@given(st.data(), st.integers(1, 4))
def test_every_share_is_a_copy_of_the_containers(data: st.DataObject, num_devices: int) -> None:
    # A replica that adds to a list or dict must not change the caller's, nor another replica's.
    value = data.draw(_containers(st.one_of(st.none(), st.integers()).flatmap(lambda x: st.just([x]))))
    for share in scatter(value, [CPU] * num_devices):
        assert _same(share, value)
    inner = scatter({"x": [1]}, [CPU] * 2)
    assert inner[0] is not inner[1]
    assert inner[0]["x"] is not inner[1]["x"]


@pytest.mark.parametrize("rows", range(1, 8))
@pytest.mark.parametrize("num_devices", range(1, 5))
def test_cut_as_torch_chunks(rows: int, num_devices: int) -> None:
    x = torch.randn(2, rows)
    for dim in (1, -1):
        shares = scatter(x, [CPU] * num_devices, dim)
        assert _same(shares, list(x.chunk(num_devices, 1)))
        assert all(s.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for s in shares)


def test_what_is_not_cut_is_shared() -> None:
    marker, scalar = object(), torch.tensor(3.0)
    holder = Plain(x="words", y=marker)
    shares = scatter({"m": marker, "s": scalar, "h": holder, "x": torch.arange(3), "size": torch.Size([4])}, [CPU] * 2)
    assert [s["x"].tolist() for s in shares] == [[0, 1], [2]]
    for share in shares:
        assert share["m"] is marker
        assert share["s"] is scalar
        assert share["h"] is holder
        assert share["size"] == torch.Size([4])
        assert type(share["size"]) is torch.Size


def test_nothing_to_cut_gives_a_share_per_device() -> None:
    assert scatter(("x", None), [CPU] * 3) == [("x", None)] * 3
    assert [tuple(s.shape) for s in scatter(torch.zeros(0, 2), [CPU] * 3)] == [(0, 2)] * 3


def test_a_tensor_without_rows_follows_the_others() -> None:
    shares = scatter((torch.zeros(0), torch.arange(2)), [CPU] * 3)
    assert [(len(a), b.tolist()) for a, b in shares] == [(0, [0]), (0, [1])]


def test_copied_containers_keep_their_own_attributes_and_drop_cached_results() -> None:
    value = Plain(torch.arange(4))
    assert value.rows == 4
    assert [s.rows for s in scatter(value, [CPU] * 2)] == [2, 2]
    assert value.rows == 4
    shares = scatter(Encoding({"x": torch.arange(4)}), [CPU] * 2)
    assert [s.kind for s in shares] == ["encoding"] * 2
    assert scatter(defaultdict(list, x=torch.arange(4)), [CPU] * 2)[1]["new"] == []


def test_gradients_flow_through_both() -> None:
    x = torch.randn(5, 2, requires_grad=True)
    weights = torch.randn(5, 2)
    (gather(scatter({"x": x}, [CPU] * 3), CPU)["x"] * weights).sum().backward()
    assert torch.equal(x.grad, weights)


def test_shares_of_an_input_with_history_cannot_be_changed_in_place() -> None:
    x = torch.randn(4, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="modified inplace"):
        scatter(x, [CPU] * 2)[0].add_(1)


def test_tensors_whose_rows_cannot_belong_together_are_refused() -> None:
    # torch's own drops the second half of the rows here.
    with pytest.raises(
        UsageError, match=r"input\['x'\] of shape \(4, 2\): 2; input\['mask'\]\[0\] of shape \(1, 2\): 1"
    ):
        scatter({"x": torch.zeros(4, 2), "mask": (torch.zeros(1, 2),)}, [CPU] * 2)


def test_a_missing_dimension_is_named() -> None:
    with pytest.raises(UsageError, match=r"The input\[0\]\.y has no dimension 1 .*\(3,\)"):
        scatter([Plain(None, torch.zeros(3))], [CPU] * 2, dim=1)


def test_packed_sequences_are_refused() -> None:
    packed = pack_padded_sequence(torch.zeros(3, 2, 1), torch.tensor([3, 2]))
    with pytest.raises(UsageError, match="PackedSequence"):
        scatter(packed, [CPU] * 2)
    with pytest.raises(UsageError, match="PackedSequence"):
        gather([packed, packed], CPU)


def test_containers_that_cannot_be_rebuilt_are_refused() -> None:
    class Needy(list):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__()

    value = Needy()
    value.append(torch.zeros(2))
    with pytest.raises(UsageError, match="Needy cannot be rebuilt"):
        scatter(value, [CPU] * 2)


def test_scalars_become_a_vector_with_a_warning() -> None:
    losses = [torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)]
    with pytest.warns(UserWarning, match=r"output\.x .* vector"):
        joined = gather([Plain(loss) for loss in losses], CPU, dim=1).x
    assert joined.tolist() == [1, 2]
    (joined * torch.tensor([3.0, 4.0])).sum().backward()
    assert [loss.grad.item() for loss in losses] == [3, 4]


def test_named_results_of_torch_are_joined() -> None:
    x = torch.randn(5, 3)
    joined = gather([share.max(1) for share in scatter(x, [CPU] * 2)], CPU)
    assert type(joined) is torch.return_types.max
    assert torch.equal(joined.indices, x.max(1).indices)


def test_sparse_outputs_are_joined() -> None:
    x = torch.eye(4)
    assert torch.equal(gather([part.to_sparse() for part in x.chunk(2)], CPU).to_dense(), x)


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([{"a": 1}, {"b": 1}], "replica 0 returned the parts"),
        ([{"a": [torch.ones(1)]}, {"a": [None]}], r"output\['a'\]\[0\] .*Tensor, replica 1 returned NoneType"),
        ([[1], (1,)], "returned list, replica 1 returned tuple"),
        ([[1], [1, 2]], "the parts"),
        ([Plain(1), Plain(2)], r"output\.x .*replica 0 returned 1, replica 1 returned 2"),
        ([torch.ones(1, 2), torch.ones(1, 3)], r"concatenated along dimension 0.*\[\(1, 2\), \(1, 3\)\]"),
        ([torch.ones(1), torch.tensor(1.0)], "concatenated"),
        ([object(), object()], "object"),
    ],
)
def test_outputs_that_differ_are_refused(outputs: list[Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        gather(outputs, CPU)
