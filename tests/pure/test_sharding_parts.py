"""Who owns which elements, how state is cut and put together, what is refused, and how a reader waits. No process."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from guozhuang.errors import UsageError
from guozhuang.gradients.buckets import dense_stride, view_in
from guozhuang.sharding.elementwise import ELEMENTWISE, needs_whole_tensors, step_cost
from guozhuang.sharding.fully import repeated_blocks
from guozhuang.sharding.gathered import Arriving, Gathering
from guozhuang.sharding.parts import ALIGN_ELEMENTS, BucketLayout, Member, in_memory_order, lay_out
from guozhuang.sharding.shared.embedding_rows import embeddings_of
from guozhuang.sharding.shared.linear_gradients import linear_layers_of
from guozhuang.sharding.state import apart, cut, is_elementwise, regroup
from tests.drawing import examples

CPU = torch.device("cpu")


@st.composite
def layouts(draw: st.DrawFn) -> BucketLayout:
    sizes = draw(st.lists(st.one_of(st.integers(0, 5), st.integers(6, 400)), min_size=1, max_size=12))
    positions = draw(st.permutations(range(len(sizes))))
    members = [
        Member(
            size,
            draw(st.sampled_from([torch.float32, torch.bfloat16])),
            CPU,
            draw(st.integers(0, 2)),
            position,
            draw(st.one_of(st.none(), st.floats(0.0, 9.0))),
        )
        for size, position in zip(sizes, positions, strict=True)
    ]
    cap_bytes = draw(st.sampled_from([64, 1000, 1 << 20]))
    block_elements = draw(st.sampled_from([16, 64, 1 << 17]))
    return lay_out(members, draw(st.integers(1, 5)), cap_bytes, block_elements)


@given(layouts())
@examples()
def test_every_element_is_owned_once_and_blocks_stay_inside_their_slice(layout: BucketLayout) -> None:
    owners: list[list[int]] = [[0] * member.num_elements for member in layout.members]
    for rank in range(layout.num_ranks):
        for block in layout.blocks_of(rank):
            bucket = layout.buckets[block.bucket]
            low, high = bucket.slice_of(rank)
            assert low <= block.start < block.end <= high
            assert block.start % ALIGN_ELEMENTS == 0 == block.end % ALIGN_ELEMENTS
            assert block.is_whole or block.num_elements <= layout.block_elements
            assert block.group == bucket.group and block.is_whole == bucket.is_whole
            if block.is_whole:
                (piece,) = block.pieces
                assert (piece.start, piece.end) == (0, layout.members[piece.parameter].num_elements)
            for piece in block.pieces:
                _, offset = layout.places[piece.parameter]
                assert piece.offset == offset + piece.start
                assert block.start <= piece.offset and piece.offset + piece.end - piece.start <= block.end
                for element in range(piece.start, piece.end):
                    owners[piece.parameter][element] += 1
    assert all(count == 1 for counts in owners for count in counts)


@given(layouts())
@examples()
def test_the_pieces_in_all_ranks_slices_are_the_parameters(layout: BucketLayout) -> None:
    elements: list[list[int]] = [[] for _ in layout.members]
    for bucket in layout.buckets:
        for low, high in map(bucket.slice_of, range(layout.num_ranks)):
            for piece in layout.pieces_in(bucket, low, high):
                assert piece.bucket == bucket.index and low <= piece.offset < high
                elements[piece.parameter] += range(piece.start, piece.end)
    assert elements == [list(range(member.num_elements)) for member in layout.members]


@given(layouts(), st.data())
@examples()
def test_separate_parameters_share_no_block(layout: BucketLayout, data: st.DataObject) -> None:
    separate = data.draw(st.frozensets(st.integers(0, len(layout.members) - 1)))
    for rank in range(layout.num_ranks):
        whole = {(p.parameter, e) for b in layout.blocks_of(rank) for p in b.pieces for e in range(p.start, p.end)}
        blocks = layout.blocks_of(rank, separate)
        assert {(p.parameter, e) for b in blocks for p in b.pieces for e in range(p.start, p.end)} == whole
        assert all(len(b.parameters) == 1 for b in blocks if b.parameters & separate)


@given(layouts())
@examples()
def test_buckets_come_in_the_order_in_which_gradients_are_complete(layout: BucketLayout) -> None:
    last = [min(layout.members[i].position for i in bucket.parameters) for bucket in layout.buckets]
    assert last == sorted(last, reverse=True)
    for bucket in layout.buckets:
        members = [layout.members[i] for i in bucket.parameters]
        assert {(m.group, m.dtype, m.is_whole) for m in members} == {(bucket.group, bucket.dtype, bucket.is_whole)}


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=40), st.integers(1, 6))
def test_whole_parameters_are_owned_so_that_ranks_have_nearly_equal_work(costs: list[float], num_ranks: int) -> None:
    layout = lay_out([Member(3, torch.float32, CPU, 0, i, cost) for i, cost in enumerate(costs)], num_ranks, 64)
    work = [sum(costs[i] for b in layout.blocks_of(r) for i in b.parameters) for r in range(num_ranks)]
    least = max(
        sum(costs) / num_ranks, *costs, sum(sorted(costs)[-num_ranks - 1 :][:2]) if len(costs) > num_ranks else 0
    )
    assert max(work) <= least * (4 / 3) + 1e-6
    assert sum(len(layout.blocks_of(r)) for r in range(num_ranks)) == len(costs)


def parameters_of(layout: BucketLayout) -> list[Tensor]:
    return [torch.randn(m.num_elements) for m in layout.members]


def state_like(parameter: Tensor, step: float) -> dict[str, Any]:
    return {"step": torch.tensor(step), "average": torch.randn_like(parameter), "note": None}


@given(layouts(), st.data())
@examples(40)
def test_state_survives_being_cut_and_split(layout: BucketLayout, data: st.DataObject) -> None:
    parameters = parameters_of(layout)
    steps = data.draw(st.lists(st.sampled_from([None, 3.0, 4.0]), min_size=len(parameters), max_size=len(parameters)))
    full = {i: state_like(p, s) for i, (p, s) in enumerate(zip(parameters, steps, strict=True)) if s is not None}
    separate = apart(full, layout, parameters, "Mine")
    more = separate | data.draw(st.frozensets(st.integers(0, len(parameters) - 1)))
    for rank in range(layout.num_ranks):
        blocks, finer = layout.blocks_of(rank, separate), layout.blocks_of(rank, more)
        weights, finer_weights = ([torch.zeros(b.num_elements) for b in some] for some in (blocks, finer))
        values = cut(full, parameters, blocks, weights, "Mine")
        again = regroup(list(zip(blocks, values, strict=True)), finer, finer_weights)
        for block, state in [*zip(blocks, values, strict=True), *zip(finer, again, strict=True)]:
            for piece in block.pieces:
                expected = full.get(piece.parameter)
                if expected is None:
                    assert not state
                    continue
                start = piece.offset - block.start
                found = state["average"][start : start + piece.end - piece.start]
                assert torch.equal(found, expected["average"][piece.start : piece.end])
                assert state["step"] == expected["step"] and state["step"] is not expected["step"]
                assert state["note"] is None


def test_state_of_neither_kind_is_refused_by_name() -> None:
    weight = torch.zeros(4, 6)
    assert is_elementwise("average", torch.zeros(4, 6), weight, "Mine")
    assert not is_elementwise("step", torch.zeros(()), weight, "Mine")
    assert not is_elementwise("step", torch.zeros(1), weight, "Mine")
    assert not is_elementwise("step", torch.zeros(()), torch.zeros(()), "Mine")
    assert is_elementwise("average", torch.zeros(()), torch.zeros(()), "Mine")
    with pytest.raises(UsageError, match=r"Mine keeps 'row' of shape \(4, 1\)"):
        is_elementwise("row", torch.zeros(4, 1), weight, "Mine")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 8)[:, ::2],
        torch.randn(()),
        torch.randn(0, 3),
    ],
    ids=["rows", "transposed", "channels_last", "gaps", "number", "empty"],
)
def test_a_tensor_keeps_values_and_strides_in_flat_memory(tensor: Tensor) -> None:
    flat = torch.zeros(3 + tensor.numel())
    place = view_in(flat, 3, tensor)
    place.copy_(tensor)
    assert torch.equal(place, tensor)
    assert place.stride() == dense_stride(tensor)
    assert torch.equal(in_memory_order(tensor, tensor), flat[3:])
    other = tensor.contiguous()  # row-major values of a parameter of any layout
    assert torch.equal(in_memory_order(other, tensor), flat[3:])


# ---- which optimizers ---------------------------------------------------------------------------------------------------


def pair() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4))]


class Renamed(torch.optim.AdamW):
    """Steps as its parent does."""


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Declared(Own):
    elementwise = True


class Shampoo(Own):
    whole_tensors = True

    def step_cost(self, parameter: Tensor, group: Any) -> float:
        return float(parameter.numel()) - group["lr"]


class Denied(torch.optim.SGD):
    elementwise = False


@pytest.mark.parametrize("name", [kind.__name__ for kind in ELEMENTWISE])
def test_elementwise_optimizers_of_torch_are_known(name: str) -> None:
    assert not needs_whole_tensors(getattr(torch.optim, name)(pair(), lr=0.1))


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_others_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot step parts of the weights: it "):
        needs_whole_tensors(getattr(torch.optim, name)(pair()))


def test_a_users_own_class_is_believed_if_it_declares_itself() -> None:
    assert not needs_whole_tensors(Renamed(pair()))
    assert not needs_whole_tensors(Declared(pair(), lr=0.1))
    assert needs_whole_tensors(Shampoo(pair(), lr=0.1))
    assert needs_whole_tensors(torch.optim.Muon(pair())) and needs_whole_tensors(torch.optim.Adafactor(pair()))
    with pytest.raises(
        UsageError, match=r"Own cannot .*declare it.*Own\.elementwise = True.*Own\.whole_tensors = True"
    ):
        needs_whole_tensors(Own(pair(), lr=0.1))
    one = Own(pair(), lr=0.1)
    one.elementwise = True  # type: ignore[attr-defined]
    assert not needs_whole_tensors(one)
    one.whole_tensors = True  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="elementwise = True and whole_tensors = True"):
        needs_whole_tensors(one)
    with pytest.raises(UsageError, match="Denied declares"):
        needs_whole_tensors(Denied(pair(), lr=0.1))
    with pytest.raises(UsageError, match="differentiable"):
        needs_whole_tensors(torch.optim.SGD(pair(), lr=0.1, differentiable=True))


def test_the_cost_of_a_step_grows_as_its_products_do() -> None:
    sizes = [nn.Parameter(torch.zeros(size)) for size in ((768, 768), (3072, 768), (768, 3072), (2, 4))]
    muon = torch.optim.Muon(sizes)
    square, tall, wide, tiny = (step_cost(muon, p, muon.param_groups[0]) for p in sizes)
    assert tall == wide and 2.5 < tall / square < 3.5 and square / tiny > 100
    mine = Shampoo(sizes, lr=1.0)
    assert step_cost(mine, sizes[3], mine.param_groups[0]) == 7.0
    mine.param_groups[0]["lr"] = float("nan")
    with pytest.raises(UsageError, match=r"Shampoo\.step_cost must return a finite number.*nan"):
        step_cost(mine, sizes[3], mine.param_groups[0])


# ---- reading waits --------------------------------------------------------------------------------------------------------


class Slow:
    """A work that writes when it is waited for."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.num_waits = parameters, 0

    def wait(self) -> bool:
        if self.num_waits == 0:
            for parameter in self.parameters:
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    parameter.fill_(7.0)
        self.num_waits += 1
        return True


READERS = {
    "module": lambda m: m(torch.ones(1, 3)),
    "another's forward": lambda m: nn.functional.linear(torch.ones(1, 3), m.weight),
    "norm": lambda m: m.weight.norm(),
    "data": lambda m: m.weight.data,
    "state_dict": lambda m: m.state_dict(),
    "deepcopy": copy.deepcopy,
    "deepcopy of one": lambda m: copy.deepcopy(m.weight),
    "save": lambda m: torch.save(m, io.BytesIO()),
    "foreach": lambda m: torch._foreach_norm([m.weight]),
    "average": lambda m: torch.optim.swa_utils.AveragedModel(m).update_parameters(m),
    "load": lambda m: m.load_state_dict(nn.Linear(3, 2).state_dict()),
    "double": lambda m: m.double(),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "no_grad copy": lambda m: m.weight.detach().clone(),
    "indexing": lambda m: m.weight[0],
    "print": lambda m: repr(m.weight),
    "in place": lambda m: m.weight.data.mul_(2.0),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_waits_for_weights_on_their_way(name: str) -> None:
    module = nn.Linear(3, 2)
    work = Slow(list(module.parameters()))
    Gathering(work, list(module.parameters()))  # type: ignore[arg-type]
    READERS[name](module)
    assert work.num_waits >= 1
    assert all(type(p) is nn.Parameter for p in module.parameters())
    if name == "deepcopy of one":
        Gathering(Slow(list(module.parameters())), list(module.parameters()))  # type: ignore[arg-type]
        other = copy.deepcopy(module.weight)
        assert type(other) is nn.Parameter and bool((other == 7.0).all())


COMPILED = """
import torch
from guozhuang.sharding.gathered import reads_past_python
model = torch.nn.Linear(2, 2)
torch.optim.SGD(model.parameters(), lr=0.1).step()
assert not reads_past_python(model)
assert reads_past_python(torch.nn.Sequential(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))))
{how}
assert reads_past_python(model)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch.compile(model, backend='eager')", "model.compile(backend='eager')"])
def test_compiled_code_is_known_to_read_past_python(how: str) -> None:
    subprocess.run([sys.executable, "-c", COMPILED.format(how=how)], timeout=60, check=True)


def test_what_reads_no_element_does_not_wait() -> None:
    module = nn.Linear(3, 2)
    module(torch.ones(1, 3)).sum().backward()
    work = Slow(list(module.parameters()))
    gathering = Gathering(work, list(module.parameters()))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert module.weight.shape == (2, 3) and module.weight.grad is not None and isinstance(module.weight, nn.Parameter)
    optimizer.zero_grad()
    module.zero_grad()
    assert list(module.named_parameters()) and module.weight.requires_grad and module.weight.numel() == 6
    assert work.num_waits == 0 and type(module.weight) is Arriving
    gathering.finish()
    gathering.finish()
    assert type(module.weight) is nn.Parameter and bool((module.weight == 7.0).all())


# ---- blocks for fully_shard ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.out = nn.Linear(3, 3)
        self.out.weight = self.layers[1].weight


def test_repeated_blocks_are_the_outermost_and_own_their_parameters() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
    assert repeated_blocks(encoder) == list(encoder.layers)
    tied = Tied()
    assert repeated_blocks(tied) == [tied.layers[0], tied.layers[2]]
    stages = nn.Sequential(
        nn.Linear(2, 2), *(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)), nn.Linear(2, 2)
    )
    assert repeated_blocks(stages) == [stages[1], stages[2]]
    assert repeated_blocks(nn.Linear(2, 2)) == []


def test_a_parametrization_is_not_computed_to_look_at_a_layer() -> None:
    """spectral_norm goes one step of its power iteration each time that the weight is read."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(1000, 600))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert not linear_layers_of(layer) and not embeddings_of(layer)
    assert all(value.equal(before[name]) for name, value in layer.state_dict().items())
