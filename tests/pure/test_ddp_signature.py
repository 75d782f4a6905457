"""A program that swaps the import calls the same constructor and finds the same methods."""

from __future__ import annotations

import inspect

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from guozhuang import DistributedDataParallel

# Names that PyTorch's class has for its own construction, or for what the wrapper here holds elsewhere.
NOT_OFFERED: set[str] = set()
SINCE_TORCH_2_15 = ["lazy_bucket_allocation"]


def test_constructor_has_torchs_parameters_in_torchs_order_with_torchs_defaults():
    ours = [
        (p.name, p.kind, p.default) for p in inspect.signature(DistributedDataParallel.__init__).parameters.values()
    ]
    theirs = [(p.name, p.kind, p.default) for p in inspect.signature(TorchDDP.__init__).parameters.values()]
    assert ours[: len(theirs)] == theirs
    assert [name for name, *_ in ours[len(theirs) :]] == SINCE_TORCH_2_15[: len(ours) - len(theirs)]


@pytest.mark.parametrize("name", sorted(n for n in dir(TorchDDP) if not n.startswith("_")))
def test_public_names_of_torchs_class_exist(name):
    assert name in NOT_OFFERED or hasattr(DistributedDataParallel, name)


@pytest.mark.parametrize(
    "name",
    ["join", "join_hook", "no_sync", "register_comm_hook", "scatter", "gather", "to_kwargs", "forward", "train"],
)
def test_methods_take_what_torchs_take(name):
    ours = inspect.signature(getattr(DistributedDataParallel, name)).parameters
    theirs = inspect.signature(getattr(TorchDDP, name)).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


PRIVATE = (
    *("_set_params_and_buffers_to_ignore_for_model", "_set_static_graph", "_register_builtin_comm_hook"),
    *("_get_ddp_logging_data", "_remove_autograd_hooks", "_check_reducer_finalized"),
)


@pytest.mark.parametrize("name", PRIVATE)
def test_private_methods_that_other_libraries_call_exist(name):
    assert callable(getattr(DistributedDataParallel, name))


def test_it_is_a_module_and_joinable_as_torchs_is():
    for base in (b for b in TorchDDP.__mro__ if b is not TorchDDP):
        assert issubclass(DistributedDataParallel, base), base
