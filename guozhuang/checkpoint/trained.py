"""The state of a prepared model and its optimizer, by names that are the same under every strategy.

[Note: replicated, divided or each rank's own] The parameters of most strategies are replicas: each rank holds all, with equal
bits. Under ``sharded`` and its stages ranks hold parts, of which all ranks together make whole tensors. Under a weight exchange
the ranks' weights differ between exchanges, so they are made equal first (``agree``), as before every evaluation, and the
training goes on from there; their optimizers and the exchange's own state stay each rank's own. Under ``none`` everything is
each rank's own. Buffers (running statistics) always are: ranks see different batches.

What was each rank's own in the saved run and is shared in the one that goes on, as a diloco optimizer that ddp takes over, is
made one: all ranks take that of rank 0. An average would be the state of no training: its steps and its bits are nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from guozhuang.checkpoint.files import digest
from guozhuang.checkpoint.kept import extra_states, with_extra_state
from guozhuang.checkpoint.tree import copied, flatten
from guozhuang.errors import UsageError, explain
from guozhuang.registry import Trained
from guozhuang.sharding.whole import division_if_any, full, full_weights, is_divided, is_dtensor
from guozhuang.units import listed

_MAX_NAMED = 5


def capture(trained: Trained, is_first: bool) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return the state of a model and its optimizer. Every rank must call it.

    Args:
        trained: the model and the optimizer.
        is_first: whether this is rank 0, which saves what is not a rank's own.

    Returns:
        What all ranks share, what is this rank's own (both without copies), and whether all ranks hold replicas of what they
        share. If they hold parts, ranks other than the first return nothing for it. See [Note: replicated, divided or each
        rank's own].

    Raises:
        UsageError: the model is lazy, and no forward has given its parameters a shape yet.
    """
    module, model, optimizer = trained.module, trained.model, trained.optimizer
    if shapeless := _shapeless(module):
        what = "parameters of lazy modules have no shape before the first forward, so there is nothing to save"
        raise UsageError(explain(what, value=listed(shapeless, _MAX_NAMED), fix="save after the first forward"))
    settle(trained)
    _drop_gathered(module)
    shared: dict[str, Any] = {"strategy": trained.strategy, "class": type(module).__name__}
    shared |= {"tied": _tied(module), "left_out": _left_out(module)}
    shared["frozen"] = [name for name, p in module.named_parameters() if not p.requires_grad]
    own: dict[str, Any] = {"buffers": _buffers(module), "extra": extra_states(module)}
    left_alone: frozenset[str] = getattr(model, "ignored", frozenset())
    parameters = full_weights(module)
    state = _optimizer_state(module, optimizer)
    own["exchange"] = _exchange_state(model, optimizer)
    if _keeps_weights_apart(trained):
        own["parameters"], own["optimizer"] = parameters, state
        return shared, own, True
    own["parameters"] = {name: p for name, p in parameters.items() if name in left_alone}
    if _keeps_optimizers_apart(trained):
        own["optimizer"] = state
    divided = _is_in_parts(trained)
    if divided and not is_first:
        return {}, own, False
    shared["parameters"] = {name: p for name, p in parameters.items() if name not in left_alone}
    if "optimizer" not in own:
        shared["optimizer"] = state
    return shared, own, not divided


def make_one(trained: Trained, own: Mapping[str, Any], first: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return what this rank restores as its own, and what of it was made one for all ranks: those of rank 0.

    Args:
        trained: the model and the optimizer.
        own: what was saved on this rank, or on one that takes its place.
        first: what was saved on rank 0.
    """
    found, made = dict(own), []
    if "optimizer" in own and not _keeps_optimizers_apart(trained):
        found["optimizer"] = first["optimizer"]
        made.append("optimizer")
    left_alone: frozenset[str] = getattr(trained.model, "ignored", frozenset())
    shared = {name: value for name, value in first.get("parameters", {}).items() if name not in left_alone}
    if shared and not _keeps_weights_apart(trained):
        found["parameters"] = {**own["parameters"], **shared}
        made.append("weights")
    return found, made


def replicas(trained: Trained) -> list[str]:
    """Return a line for each value that must be equal on all ranks, with the hash of its bits, to be compared; not collective.

    There are none for a model or an optimizer of which ranks hold parts.
    """
    if _keeps_weights_apart(trained) or _is_in_parts(trained):
        return []
    left_alone: frozenset[str] = getattr(trained.model, "ignored", frozenset())
    named = trained.module.named_parameters()
    tensors = {name: p.detach() for name, p in named if name not in left_alone and not is_lazy(p)}
    plain = None
    if not _keeps_optimizers_apart(trained):
        plain = flatten(_optimizer_state(trained.module, trained.optimizer), "optimizer", tensors)
    return [*(f"{name} {digest(t.cpu().contiguous())[:16]}" for name, t in tensors.items()), f"the optimizer {plain}"]


def _keeps_weights_apart(trained: Trained) -> bool:
    return trained.strategy == "none"


def _keeps_optimizers_apart(trained: Trained) -> bool:
    return _keeps_weights_apart(trained) or _exchanges_weights(trained.model)


def _is_in_parts(trained: Trained) -> bool:
    return is_divided(trained.module) or hasattr(trained.optimizer, "carrier") or _has_parts(trained.module)


def _has_parts(module: nn.Module) -> bool:
    return any(division_if_any(p) is not None for p in module.parameters())


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers; whole ones, from the ranks that compute with them, of a model that a layout has divided."""
    return {name: b if division_if_any(b) is None else full(b) for name, b in module.named_buffers()}


def settle(trained: Trained) -> None:
    """Make weights equal that are exchanged now and then; other strategies need nothing. Every rank must call it."""
    if _exchanges_weights(trained.model):
        trained.model.agree()


def check(trained: Trained, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise unless a saved state fits a model and its optimizer; change nothing.

    Raises:
        UsageError: names, shapes or dtypes differ; the text names them.
    """
    saved = {**shared.get("parameters", {}), **own.get("parameters", {})}
    get_shapes = {name for name in _shapeless(trained.module) if name in saved or name in own["buffers"]}
    free = {*shared["left_out"], *_left_out(trained.module), *get_shapes}
    for what, mine, theirs in (
        ("parameters", trained.module.named_parameters(), saved),
        ("buffers", trained.module.named_buffers(), own["buffers"]),
    ):
        _compare(what, *({name: t for name, t in dict(some).items() if name not in free} for some in (mine, theirs)))
    with_extra = {name for name, _ in with_extra_state(trained.module)}
    if differ := sorted(with_extra.symmetric_difference(own["extra"])):
        what = f"the checkpoint is of another model: extra states are here or in it, not in both: {listed(differ, _MAX_NAMED)}"
        raise UsageError(explain(what, fix="make the model as in the saved run"))
    state = own.get("optimizer") or shared["optimizer"]
    kind = _kind_of(trained.optimizer)
    if state.get("class", kind) != kind:
        what = f"the checkpoint holds the state of {state['class']}, and the optimizer here is {kind}"
        raise UsageError(explain(what, fix=f"make the optimizer as in the saved run, by {state['class']}"))
    groups = _names(trained.module, trained.optimizer)
    if [sorted(names) for names in groups] != [sorted(names) for names in state["names"]]:
        what = "the optimizer's groups hold other parameters than when the checkpoint was saved"
        value = f"groups of {[len(n) for n in groups]} parameters, saved {[len(n) for n in state['names']]}"
        raise UsageError(explain(what, value=value, fix="make the optimizer with the same groups"))


def restore(trained: Trained, shared: Mapping[str, Any], own: Mapping[str, Any], same_run: bool) -> str:
    """Set a model and its optimizer to a saved state that :func:`check` has accepted. Every rank must call it.

    Extra states of modules are code of the script: they come first, with the objects of ``gz.keep``.

    Args:
        trained: the model and the optimizer.
        shared: what all ranks share.
        own: what was saved on this rank, or on one that takes its place.
        same_run: whether strategy and number of ranks are those of the saved run, so that the exchange's state fits.

    Returns:
        What could not be restored, for the log; "" if everything was.
    """
    module, model, optimizer = trained.module, trained.model, trained.optimizer
    _drop_gathered(module)
    parameters = {**shared.get("parameters", {}), **own.get("parameters", {})}
    _give_shapes(module, {**parameters, **own["buffers"]})
    _set_parameters(module, parameters)
    _set_buffers(module, own["buffers"])
    _load_optimizer(module, optimizer, own.get("optimizer") or shared["optimizer"])
    return _load_exchange(model, optimizer, own.get("exchange") or {}, same_run)


def switched(trained: Trained, shared: Mapping[str, Any]) -> str:
    """Return the names of some parameters that were frozen in the saved run and are not now, or the other way round."""
    now = {name for name, p in trained.module.named_parameters() if not p.requires_grad}
    names = sorted(now.symmetric_difference(shared.get("frozen", now)))
    return listed(names, _MAX_NAMED)


def _exchanges_weights(model: Any) -> bool:
    return getattr(model, "around", None) is not None and callable(getattr(model, "agree", None))


def _tied(module: nn.Module) -> dict[str, str]:
    """Return the further names of tensors that have several, each with the first one."""
    first: dict[int, str] = {}
    found = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            if first.setdefault(id(tensor), name) != name:
                found[name] = first[id(tensor)]
    return found


def _left_out(module: nn.Module) -> list[str]:
    """Return the names of the buffers that ``state_dict`` leaves out."""
    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, part in module.named_modules()
        for name in sorted(part._non_persistent_buffers_set)
    ]


# ---- lazy modules ---------------------------------------------------------------------------------------------------------


def _shapeless(module: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that get their shapes from the first forward."""
    return [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if is_lazy(tensor)]


def _give_shapes(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) and name in saved:
            tensor.materialize(saved[name].shape)


# ---- parameters -----------------------------------------------------------------------------------------------------------


def _drop_gathered(module: nn.Module) -> None:
    """Let ``fully_shard`` drop whole parameters that it kept from a forward, so that the module holds its parts again."""
    for part in module.modules():
        if is_divided(part) and callable(getattr(part, "reshard", None)):
            part.reshard()  # type: ignore[operator]


@torch.no_grad()
def _set_parameters(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    for name, parameter in module.named_parameters():
        parameter.copy_(_part_like(parameter, saved[name]))


@torch.no_grad()
def _set_buffers(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    mine, parts = dict(module.named_buffers()), dict(module.named_modules())
    for name, value in saved.items():
        buffer = mine.get(name)
        value = value if buffer is None else _part_like(buffer, value)
        if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
            buffer.copy_(value)
            continue
        # One that ``state_dict`` leaves out, as a cache that the module makes or enlarges while it trains.
        path, _, last = name.rpartition(".")
        owner = parts.get(path)
        device = next((p.device for p in module.parameters()), value.device) if buffer is None else buffer.device
        if owner is not None and (last in owner._buffers or not hasattr(owner, last)):
            owner.register_buffer(last, value.to(device, copy=True), persistent=False)


def _part_like(parameter: Any, value: Tensor) -> Tensor:
    """Return of a whole ``value`` what ``parameter`` holds of its own; ``value`` itself if the parameter is not divided."""
    division = division_if_any(parameter)
    if division is not None:
        from guozhuang.parallel.division import part  # imported already, by who divided it

        return part(value, division) if value.shape == division.shape else value
    if not is_dtensor(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def _compare(what: str, mine: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    def kind(tensor: Tensor | None) -> str:
        if tensor is None:
            return "nothing"
        division = division_if_any(tensor)
        shape = "of no shape yet" if is_lazy(tensor) else tuple((division or tensor).shape)
        return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"

    differ = [
        f"{name} ({kind(mine.get(name))} here, {kind(saved.get(name))} saved)"
        for name in dict.fromkeys((*mine, *saved))
        if kind(mine.get(name)) != kind(saved.get(name))
    ]
    if differ:
        text = f"the checkpoint is of another model: its {what} differ: {listed(differ, _MAX_NAMED)}"
        raise UsageError(explain(text, fix="make the model as in the saved run"))


# ---- the optimizer --------------------------------------------------------------------------------------------------------


def _names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    name_of = {id(p): name for name, p in module.named_parameters()}
    return [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state by the names of its parameters. Without state there is none: no step is made to get one."""
    saved = optimizer.state_dict()
    names = _names(module, optimizer)
    name_of = dict(zip((i for g in saved["param_groups"] for i in g["params"]), _all(names), strict=True))
    state = {
        name_of.get(key, key): {k: full(v) if isinstance(v, Tensor) else v for k, v in values.items()}
        if isinstance(values, Mapping)
        else values
        for key, values in saved["state"].items()
    }
    groups = [{key: value for key, value in group.items() if key != "params"} for group in saved["param_groups"]]
    rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    return {"class": _kind_of(optimizer), "names": names, "state": state, "groups": groups, "rest": rest}


def _kind_of(optimizer: Any) -> str:
    """Return the name of the class of the script's own optimizer, which a strategy may have put another one around."""
    inner = getattr(optimizer, "inner", None)
    return type(inner if isinstance(inner, Optimizer) else optimizer).__name__


def _load_optimizer(module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    names = _names(module, optimizer)
    index_of = {name: i for i, name in enumerate(_all(names))}
    parameters = dict(module.named_parameters())
    state: dict[Any, Any] = {}
    for name, values in saved["state"].items():
        if name not in index_of:
            state[name] = values
            continue
        like: Any = parameters[name]
        state[index_of[name]] = {
            key: _part_like(like, v) if isinstance(v, Tensor) and v.shape == like.shape and v.dim() else v
            for key, v in values.items()
        }
    groups = [
        {**group, "params": [index_of[name] for name in some]}
        for group, some in zip(saved["groups"], names, strict=True)
    ]
    # Copies: torch keeps tensors of the state that it is given, and these belong to a mapped file.
    optimizer.load_state_dict({**saved["rest"], "state": copied(state), "param_groups": groups})
    # ``torch`` casts floating-point states to the parameter's dtype; a state in float32 of bfloat16 weights must stay so.
    whole: Any = getattr(optimizer, "inner", None) if getattr(optimizer, "is_resting", False) else optimizer
    held: Any = {} if hasattr(whole, "carrier") else whole.state
    for name, values in saved["state"].items():
        kept: Any = held.get(parameters[name]) if name in parameters else None
        for key, value in values.items() if kept else ():
            if isinstance(value, Tensor) and isinstance(kept.get(key), Tensor) and kept[key].dtype != value.dtype:
                like = value if kept[key].shape == value.shape else _part_like(parameters[name], value)
                kept[key] = copied(like).to(kept[key].device)


def _all(names: Sequence[Sequence[str]]) -> Iterator[str]:
    return (name for some in names for name in some)


# ---- the exchange ---------------------------------------------------------------------------------------------------------


def _exchange_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the state of the exchange of gradients or weights; empty if the strategy has none."""
    owner = _owner(model, optimizer)
    return {} if owner is None else dict(owner.exchange_state_dict())


def _owner(model: Any, optimizer: Any) -> Any:
    """Return the object that saves the exchange's state: the sharded optimizer, also of a divided model, or the wrapper."""
    averages = getattr(
        getattr(optimizer, "carrier", None), "averages", True
    )  # else the wrapper does, and has the state
    owners = (optimizer, model) if averages else (model,)
    return next((each for each in owners if hasattr(type(each), "exchange_state_dict")), None)


def _load_exchange(model: Any, optimizer: Any, saved: Mapping[str, Any], same_run: bool) -> str:
    owner = _owner(model, optimizer)
    if owner is None:
        return ""
    if same_run and saved:
        owner.load_exchange_state_dict(saved)
        return ""
    if _exchanges_weights(model):
        model.around.restart(0)  # its state is of other weights until here
    fresh = owner.exchange_state_dict()
    if saved.keys() != fresh.keys() or not saved:
        return ""
    # Another number of ranks: what a method remembers of its errors belongs to its ranks. The numbers of steps stay, because
    # warm-ups count by them, and so does what an exchange of weights keeps that is equal on all ranks.
    wanted = {**fresh, "step": saved["step"]}
    if "layout" in fresh:
        wanted["layout"] = saved["layout"]
    left_out = "what the exchange of gradients remembers of its errors" if _keeps(saved["exchange"]) else ""
    if "weights" in fresh:
        wanted["weights"] = saved["weights"]
    try:
        owner.load_exchange_state_dict(wanted)
    except UsageError:
        if "weights" not in fresh:
            raise
        model.around.restart(int(saved["weights"]["step"]))
        left_out = "the state of the exchange of weights"
    return left_out


def _keeps(state: Any) -> bool:
    """Tell whether a saved state holds any tensor."""
    if isinstance(state, Mapping):
        return any(_keeps(each) for each in state.values())
    return isinstance(state, Tensor)
