"""Which parts of a model a pipeline can cut between, found without tracing."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from guozhuang.parallel.pipeline.blocks import find_blocks, find_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Wide(nn.Module):
    """A block with experts: a list inside of each element of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block() for _ in range(3))


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(8, 4)
        self.encoder = Encoder()
        self.drop = nn.Dropout()
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


class Stages(nn.Module):
    def __init__(self, *counts: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.pool = nn.ModuleList(nn.BatchNorm1d(2) for _ in counts)
        for i, count in enumerate(counts):
            setattr(self, f"layer{i}", nn.Sequential(*(Block() for _ in range(count))))


class Children(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = Block(), Block()
        self.out = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())


class Around(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.net = inside


BERT_UNITS = "embeddings encoder.layer.0 encoder.layer.1 encoder.layer.2 drop head.0 head.1 head.2"


@pytest.mark.parametrize(
    ("model", "lists", "units"),
    [
        (Bert(), {"encoder.layer": 3}, BERT_UNITS),
        (Around(Bert()), {"net.encoder.layer": 3}, " ".join(f"net.{name}" for name in BERT_UNITS.split())),
        (Stages(1, 1), {"pool": 2}, "stem pool.0 pool.1 layer0.0 layer1.0"),
        (
            Stages(2, 3),
            {"layer0": 2, "layer1": 3},
            "stem pool.0 pool.1 layer0.0 layer0.1 layer1.0 layer1.1 layer1.2",
        ),
        (nn.ModuleList(Wide() for _ in range(4)), {"": 4}, "0 1 2 3"),
        (Children(), {}, "down up out.0 out.1"),
        (Around(Children()), {}, "net.down net.up net.out.0 net.out.1"),
        (nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.ReLU())), {}, "a b"),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2),
            {"layers": 2},
            "layers.0 layers.1",
        ),
        (nn.Linear(2, 2), {}, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_blocks_and_units_of_models(model, lists, units):
    assert {each.name: len(each.modules) for each in find_blocks(model)} == lists
    assert " ".join(find_units(model)) == units


def test_lists_inside_of_blocks_are_taken_only_where_the_outer_ones_are_too_short():
    model = nn.Sequential(Wide(), Wide())
    assert [each.names for each in find_blocks(model, at_least=2)] == [("0", "1")]
    assert [each.name for each in find_blocks(model, at_least=4)] == ["0.experts", "1.experts"]


def test_a_module_under_two_names_is_one_unit():
    model = Bert()
    model.again = model.embeddings
    assert " ".join(find_units(model)) == BERT_UNITS
