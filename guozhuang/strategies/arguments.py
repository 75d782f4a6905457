"""What ``prepare`` is given: things of the right kinds, and a model, an optimizer and a strategy that go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from guozhuang.data_parallel import DataParallel
from guozhuang.distributed import DistributedDataParallel
from guozhuang.errors import UsageError, explain
from guozhuang.strategies.table import Strategy
from guozhuang.strategies.ways import takes_several, wraps_in_ddp
from guozhuang.world import World

_WRAPPERS = (DistributedDataParallel, DataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)
# Arguments of DistributedDataParallel that say how gradients are grouped and awaited, but not what is computed.
_HOW_ONLY = {"find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb", "batched_grad_copy"}
_HOW_ONLY |= {"bucket_cap_mb_list", "lazy_bucket_allocation", "skip_all_reduce_unused_params"}


def check_kinds(model: Any, strategy: Any, layout: Any, num_replicas: Any, ddp_options: Any) -> None:
    """Raise if something that ``prepare`` was given is not of the kind that it takes there.

    Raises:
        UsageError: the text says what was given, and where.
    """
    if isinstance(strategy, Optimizer):
        what = "prepare() takes several optimizers as a list, and a strategy in the place of this one"
        raise UsageError(explain(what, value=type(strategy).__name__, fix="call prepare(model, [first, second])"))
    for given, kinds, name, wanted in (
        (model, nn.Module, "model", "a module"),
        (strategy, str | None, "strategy", 'a name, such as "ddp"'),
        (layout, str | None, "layout", 'a text, such as "pp=2,dp=auto"'),
        (num_replicas, int | None, "num_replicas", "a count"),
        (ddp_options, Mapping | None, "ddp_options", "a dict of arguments of DistributedDataParallel"),
    ):
        if not isinstance(given, kinds):
            shown = given if isinstance(given, str | int | float) else type(given).__name__
            shown = f"the class {given.__name__}" if isinstance(given, type) else shown
            raise UsageError(explain(f"prepare() takes {wanted} as {name}", value=shown, fix=f"give {wanted}"))


def check_pair(
    model: nn.Module, optimizers: Sequence[Optimizer], chosen: Strategy, world: World, num_replicas: int | None
) -> None:
    """Raise if a model, its optimizers and a strategy do not go together in this world.

    Raises:
        UsageError: the text says which of them does not.
    """
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise UsageError(
            explain(
                "prepare() takes a torch optimizer as its second value, or several",
                value=", ".join(type(each).__name__ for each in optimizers) or "none",
                rank=world.rank,
                fix="make one from model.parameters() and hand it over",
            )
        )
    if len(optimizers) > 1 and not takes_several(chosen.prepare):
        what = f"strategy {chosen.name} takes a model together with its one optimizer, and there are {len(optimizers)}"
        fix = "make one optimizer for all parameters, or choose ddp or sharded"
        raise UsageError(explain(what, value=chosen.name, rank=world.rank, fix=fix))
    if chosen.one_process and world.size > 1:
        what = f"strategy {chosen.name} is for one process and this world has {world.size} ranks"
        fix = "start the script in one process, or choose a strategy of several ranks such as ddp"
        raise UsageError(explain(what, value=chosen.name, rank=world.rank, fix=fix))
    if num_replicas is not None and (chosen.name != "dp" or num_replicas < 1):
        raise UsageError(
            explain("num_replicas is a count >= 1 for the strategy dp only", value=num_replicas, fix="leave it out")
        )
    if isinstance(model, _WRAPPERS):
        raise UsageError(
            explain("the model is wrapped already", value=type(model).__name__, fix="hand over the bare model")
        )
    own = {id(parameter) for parameter in model.parameters()}
    if not any(parameter.requires_grad for parameter in model.parameters()):
        fix = "call requires_grad_(True) on what is to be trained, or use the model as it is"
        raise UsageError(explain("no parameter of the model requires a gradient", value=type(model).__name__, fix=fix))
    strangers = sum(id(p) not in own for each in optimizers for group in each.param_groups for p in group["params"])
    if strangers:
        raise UsageError(
            explain(
                "the optimizer holds parameters that are not the model's",
                value=strangers,
                rank=world.rank,
                fix="make the optimizer from the parameters of the very model you hand over",
            )
        )
    bags = nn.Embedding | nn.EmbeddingBag
    limited = [name for name, part in model.named_modules() if isinstance(part, bags) and part.max_norm is not None]
    has_shares = world.layout.dp > 1 or (chosen.name == "dp" and num_replicas != 1)
    if limited and has_shares and chosen.exact:
        what = "an embedding with max_norm changes its weights in forward, each rank those of the rows that it looks up"
        fix = "leave max_norm out, and limit all rows after each step: with torch.no_grad(): weight.renorm_(2, 0, max_norm)"
        raise UsageError(explain(what, value=", ".join(limited), rank=world.rank, fix=fix))


def check_ddp_options(chosen: Strategy, options: Mapping[str, Any]) -> None:
    """Raise if a strategy that does not wrap the model in DistributedDataParallel is given arguments that it cannot take.

    Raises:
        UsageError: the text names them.
    """
    others = sorted(options.keys() - _HOW_ONLY)
    if others and not wraps_in_ddp(chosen.prepare):
        what = f"strategy {chosen.name} does not wrap the model in DistributedDataParallel, so it cannot take these arguments"
        raise UsageError(explain(what, value=others, fix="leave them out, or choose a strategy such as ddp"))
