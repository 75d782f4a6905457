"""``ShardedOptimizer``: wraps the user's own optimizer, with which each rank steps its part of the weights.

[Note: two views of one optimizer] The user's instance makes the steps, see [Note: a wrapped optimizer] in optim/wrapped.py.
Between steps its groups hold the user's parameters; while it steps, and only then, they hold this rank's blocks. Its ``state``
belongs to the blocks at all times.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ..errors import UsageError, explain
from ..groups import agree
from ..groups.subgroups import timeout_s
from ..optim.layerwise import LayerwiseOptimizer, Wholes
from ..optim.wrapped import WrappedOptimizer
from ..parallel.division import division_of, summed
from ..parallel.state import fit
from ..weights.points import points_of
from ..world.devices import device_of
from .carrier import Carrier
from .elementwise import needs_whole_tensors, step_cost, steps_as_torch
from .parts import BucketLayout, Member, lay_out
from .state import Values, apart, check_kinds, cut, regroup, signs, whole

MakeCarrier = Callable[[Sequence[str], Sequence[nn.Parameter], BucketLayout], Carrier]


class ShardedOptimizer(WrappedOptimizer):
    """Steps this rank's part of the weights with the user's optimizer, and sends the new weights to all ranks.

    Made by :func:`guozhuang.sharding.shard`. Every rank must call ``step``, ``state_dict`` and ``load_state_dict``.
    ``param_groups`` are those of the user's optimizer. Changes of them (a learning rate, ``add_param_group``, a parameter
    that is frozen or unfrozen) take effect at the next step, and must be the same on all ranks.

    Attributes:
        inner: the user's optimizer. See [Note: two views of one optimizer].
        carrier: moves gradients and weights between ranks.
        group: the ranks.

    Args:
        model: the model.
        inner: the user's optimizer.
        group: the ranks.
        make_carrier: makes the carrier for parameters in a layout.
        is_later: whether the parameters are divided by :meth:`begin` only.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        group: dist.ProcessGroup,
        make_carrier: MakeCarrier,
        is_later: bool = False,
    ) -> None:
        self.wrap(inner, moves_state_hooks=True)
        self.group, self._model, self._make_carrier = group, model, make_carrier
        self._points = points_of(group)
        self._who = type(inner).__name__
        self._kinds_checked, self._is_later = False, is_later
        self._saved_exchange: Mapping[str, Any] = {}
        self._are_whole = needs_whole_tensors(inner)
        self._is_layerwise = isinstance(inner, LayerwiseOptimizer)
        # A subclass may do more in step(), such as count its calls, so its step() is called once for all blocks.
        self._steps_in_parts = steps_as_torch(type(inner))
        self.carrier: Carrier
        own = {p: inner.state.pop(p) for g in inner.param_groups for p in g["params"] if p in inner.state}
        self._connect(own)

    # ---- attributes that other parts of PyTorch read ---------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """This rank's present state: for each parameter of which it owns a part, that part's elements, 1-dimensional.

        An optimizer that steps whole tensors keeps its state as it is, on the rank that owns the parameter.

        A copy, for inspection; ``state_dict()`` returns the state of whole parameters.
        """
        found: defaultdict[Tensor, Any] = defaultdict(dict)
        for block, weight in zip(self._blocks, self._weights, strict=True):
            for piece in block.pieces:
                into = found[self._parameters[piece.parameter]]
                start = piece.offset - block.start
                for key, value in self.inner.state.get(weight, {}).items():
                    if not block.is_whole and isinstance(value, Tensor) and value.shape == weight.shape:
                        part = value[start : start + piece.end - piece.start]
                        into[key] = torch.cat([into[key], part]) if key in into else part.clone()
                    else:
                        into[key] = copy.deepcopy(value)
        found.update((p, values) for p, values in self._others.items())
        found.update((key, value) for key, value in self.inner.state.items() if not isinstance(key, Tensor))
        return defaultdict(dict, {key: value for key, value in found.items() if value})

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return device_of(p for group in self.param_groups for p in group["params"])

    def begin(self) -> None:
        """Divide the parameters that this rank holds, after stages of a pipeline were chosen. Every rank must call it."""
        self._is_later = False
        self._rebuild()
        if self._saved_exchange:
            self.load_exchange_state_dict(self._saved_exchange)

    # ---- methods that make a step ------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """Average gradients, step this rank's part, and send the new weights to all ranks. Every rank must call it.

        Args:
            closure: computes the loss and the gradients; called once, before gradients are averaged.
            grad_scaler: passed by ``torch.amp.GradScaler.step``. If any rank finds a gradient that is not finite, all skip.

        Returns:
            The result of ``closure``, else None.

        Raises:
            UsageError: gradients cannot be averaged (see :class:`~guozhuang.sharding.carrier.Carrier`); the groups of the
                optimizer were changed in an unsupported way; the state cannot be cut in parts.
            MismatchError: ranks changed the groups differently.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._points.inside("optimizer.step()"):
            self._step(grad_scaler)
        return loss

    def _step(self, grad_scaler: Any) -> None:
        """Do what :meth:`step` does after the closure. Classes override this one, for PyTorch wraps each class's ``step``
        to call the hooks of steps, so that a ``step`` calling its base class's would call them twice."""
        self.follow_groups()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # for schedulers, where nothing is stepped
        if grad_scaler is not None:
            self.collect()
            gradients = [w.grad for w in self.carrier.weights if w.grad is not None]
            if not self.unscale_together(grad_scaler, gradients, self.device, (self.group, *self.peers)):
                self.carrier.skip()
                return
        if not self._steps_in_parts or (self._are_whole and self._is_cut):
            self.collect()
        for part in self.carrier.stretches():
            self._follow_splits()
            with self._joined(part) as parts, self.inner_holds(parts):
                self.inner.step()
        if not self._kinds_checked and not self._are_whole:
            check_kinds(((w, self.inner.state.get(w, {})) for w in self.carrier.weights), self._who)
            self._kinds_checked = bool(self.inner.state)
        changed = [p for p in self._parameters if p.grad is not None]
        torch.autograd.graph.increment_version(changed)  # so that a graph that saved old values raises in backward
        self.carrier.publish()

    def follow_groups(self, wanted: Collection[int] | None = None) -> None:
        """Divide anew if other parameters are trained than before, and some are wanted. Every rank must call it."""
        held = (p for group in self.param_groups for p in group["params"])
        if self._signature() == self._known or (wanted and not any({id(p), id(p.grad)} & set(wanted) for p in held)):
            return
        if self.carrier.is_collected:
            what = "parameters were frozen, thawed or added after gz.clip_grad_norm_ had averaged the gradients of this step"
            raise UsageError(explain(what, rank=self.group.rank(), fix="do so before the forward or after the step"))
        self._rebuild()

    def collect(self) -> None:
        """Average gradients over ranks; a second call before the step does nothing. Every rank must call it."""
        self.follow_groups()
        self.carrier.collect()
        self._follow_splits()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and the averages of them that ``clip_grad_norm_`` may have computed."""
        super().zero_grad(set_to_none)
        self.carrier.skip()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model as in ``torch.optim``; they are divided among the ranks at the next step."""
        self.inner.add_param_group(param_group)
        strangers = {id(p) for p in self.inner.param_groups[-1]["params"]} - {id(p) for p in self._model.parameters()}
        if strangers:
            del self.inner.param_groups[-1]
            what = "the new group holds parameters that are not the model's"
            raise UsageError(explain(what, value=len(strangers), fix="add parameters of the model that was prepared"))

    # ---- methods that save and load the state in checkpoints ---------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in the format of ``torch.optim``, the same on every rank. Every rank must call it.

        It can be loaded into the same optimizer on one process, and here on any number of ranks.

        Raises:
            WorldError: a rank did not call within the group's time-out; the text names it.
            MismatchError: ranks hold different groups.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._points.meet("optimizer.state_dict()")
        index_of = {id(p): i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        state: dict[Any, Any] = {}
        for parameter, values in self._whole().items():
            state[index_of[id(parameter)]] = values
        state = dict(sorted(state.items()))
        state.update((key, value) for key, value in self.inner.state.items() if not isinstance(key, Tensor))
        groups = [
            {**{k: v for k, v in g.items() if k != "params"}, "params": [index_of[id(p)] for p in g["params"]]}
            for g in self.param_groups
        ]
        found: dict[str, Any] = {"state": state, "param_groups": groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, found)
            found = found if result is None else result
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole state, which a sharded or an unsharded run saved. Every rank must call it.

        Raises:
            ValueError: the state has other groups, or other numbers of parameters in them, than this optimizer.
            MismatchError: ranks were given different states.
            WorldError: a rank did not call within the group's time-out; the text names it.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = hook(self, state_dict)
            state_dict = state_dict if result is None else result
        saved, groups = state_dict["param_groups"], self.param_groups
        counts = [[len(g["params"]) for g in some] for some in (groups, saved)]
        if counts[0] != counts[1]:
            what = f"the loaded state has groups of {counts[1]} parameters, this optimizer groups of {counts[0]}"
            raise UsageError(explain(what, rank=self.group.rank(), fix="make the optimizer with the same groups"))
        own = [p for g in groups for p in g["params"]]
        by_id = dict(zip((i for g in saved for i in g["params"]), own, strict=True))
        loaded = {by_id[key]: values for key, values in state_dict["state"].items() if key in by_id}
        rest = {key: value for key, value in state_dict["state"].items() if key not in by_id}
        self.follow_groups()
        full = {i: loaded[p] for i, p in enumerate(self._parameters) if p in loaded}
        lines = signs(full, self._parameters, self._are_whole, self._who)
        agree(self.group, "the optimizer's state to load", lines, timeout_s(self.group), "load the same on every rank")
        self.carrier.skip()
        per_block = self._divide(full)
        numbers = iter(range(len(self._blocks)))
        with self._as_blocks():
            packed = [
                {
                    **{k: v for k, v in saved[i].items() if k != "params"},
                    "params": [next(numbers) for _ in group["params"]],
                }
                for i, group in enumerate(groups)
            ]
            state = {i: values for i, values in enumerate(per_block) if values} | rest
            self.inner.load_state_dict({"state": state, "param_groups": packed})
        self._others = {p: copy.deepcopy(values) for p, values in loaded.items() if id(p) not in self._index_of}
        self._kinds_checked = False
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def exchange_state_dict(self) -> dict[str, Any]:
        """Return the state that an exchange given to ``shard`` needs to resume exactly; empty without such an exchange.

        Every rank must call; each saves its own.
        """
        if self._is_later:
            return dict(self._saved_exchange)
        used = self.carrier.exchanging
        return {} if used is None else used.state_dict()

    def load_exchange_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state that :meth:`exchange_state_dict` returned on this rank. Every rank must call.

        Raises:
            UsageError: the state was saved with another exchange, or for other parameters.
        """
        if self._is_later:
            self._saved_exchange = saved
            return
        used = self.carrier.exchanging
        if (used is None) != (not saved):
            what = "the checkpoint was saved " + ("with" if used is None else "without") + " an exchange of gradients"
            fix = "give shard() the exchange that it was saved with"
            raise UsageError(explain(what, rank=self.group.rank(), fix=fix))
        if used is not None:
            used.load_state_dict(saved)

    # ---- methods that switch the optimizer between whole parameters and blocks ---------------------------------------------

    def _as_blocks(self, chosen: Iterable[int] | None = None) -> AbstractContextManager[None]:
        """Put the chosen blocks, by default all, into the user's optimizer. See [Note: two views of one optimizer]."""
        return self.inner_holds(self._parts(range(len(self._blocks)) if chosen is None else chosen))

    def _parts(self, chosen: Iterable[int]) -> list[list[Tensor]]:
        parts: list[list[Tensor]] = [[] for _ in self.param_groups]
        for i in chosen:
            parts[self._blocks[i].group].append(self._weights[i])
        return parts

    def _joined(self, chosen: Iterable[int]) -> AbstractContextManager[list[list[Tensor]]]:
        """Return the chosen blocks by group, whole where a layout has cut them and this optimizer needs whole tensors."""
        if not self._are_whole or not self._is_cut:
            return nullcontext(self._parts(chosen))
        from ..optim.whole_matrices import joined  # imported only when needed

        parts = self._parts(
            sorted(chosen, key=lambda i: self._blocks[i].pieces[0].parameter)
        )  # as on ranks with other slices
        known = {id(w): b.pieces[0].parameter for b, w in zip(self._blocks, self._weights, strict=True)}
        return joined(parts, lambda weight: self._parameters[known[id(weight)]])

    def _signature(self) -> list[list[int]]:
        return [[id(p) for p in group["params"] if self._is_divided(p)] for group in self.inner.param_groups]

    def _is_divided(self, parameter: Tensor) -> bool:
        """Return whether a parameter is divided among the ranks: it is trained, and this rank's stage holds it."""
        division = division_of(parameter)
        return parameter.requires_grad and not self._is_later and (division is None or division.is_owned)

    def _values(self, blocks: Sequence[Any], weights: Sequence[nn.Parameter]) -> list[tuple[Any, Values]]:
        return [(b, self.inner.state.get(w, {})) for b, w in zip(blocks, weights, strict=True)]

    def _follow_splits(self) -> None:
        """Convert the optimizer's state if the carrier has replaced its blocks by finer ones."""
        if self.carrier.blocks is not self._blocks:
            self._follow(regroup(self._values(self._blocks, self._weights), self.carrier.blocks, self.carrier.weights))

    def _follow(self, per_block: Sequence[Values]) -> None:
        """Use the carrier's present blocks, and make ``per_block``, with an entry for each, the optimizer's state."""
        self._blocks, self._weights = self.carrier.blocks, self.carrier.weights
        rest = {key: value for key, value in self.inner.state.items() if not isinstance(key, Tensor)}
        self.inner.state = defaultdict(dict, rest)
        self.inner.state.update((w, v) for w, v in zip(self._weights, per_block, strict=True) if v)

    def _divide(self, full: dict[int, Values]) -> list[Values]:
        """Cut the state of whole parameters into the carrier's blocks; split blocks whose parameters have unequal numbers."""
        separate = apart(full, self.carrier.layout, self._parameters, self._who)
        self.carrier.split(frozenset(range(len(self._parameters))) if self._is_layerwise else separate)
        per_block = cut(full, self._parameters, self.carrier.blocks, self.carrier.weights, self._who)
        self._follow(per_block)
        return per_block

    def _connect(self, own: dict[Any, Values]) -> None:
        """Divide the parameters in the optimizer's groups, and ``own``, the state of whole parameters, among the ranks."""
        position = {id(p): i for i, p in enumerate(self._model.parameters())}
        name_of = {id(p): name for name, p in self._model.named_parameters()}
        chosen = [(g, p) for g, group in enumerate(self.param_groups) for p in group["params"] if self._is_divided(p)]
        members = [
            Member(p.numel(), p.dtype, p.device, g, position[id(p)], self._cost(p, g) if self._are_whole else None)
            for g, p in chosen
        ]
        layout = lay_out(members, self.group.size())
        self._parameters = [p for _, p in chosen]
        if isinstance(self.inner, LayerwiseOptimizer):
            self.inner.wholes = Wholes() if self._is_later else _WholesOfBlocks(self)
        self._index_of = {id(p): i for i, p in enumerate(self._parameters)}
        self._is_cut = any((d := division_of(p)) is not None and d.dim is not None for p in self._parameters)
        self._known = self._signature()
        names = [name_of[id(p)] for p in self._parameters]
        full = {self._index_of[id(p)]: values for p, values in own.items() if id(p) in self._index_of}
        self._others = {p: values for p, values in own.items() if id(p) not in self._index_of}
        lines = [*names, *layout.describe(), *signs(full, self._parameters, self._are_whole, self._who)]
        fix = "make the optimizer the same way on every rank"
        agree(self.group, "the optimizer's parameters and state", lines, timeout_s(self.group), fix)
        self.carrier = self._make_carrier(names, self._parameters, layout)
        alive = weakref.WeakMethod(self.follow_groups)
        self.carrier.follow = lambda wanted: None if (follow := alive()) is None else follow(wanted)
        self._divide(full)

    def _cost(self, parameter: Tensor, group: int) -> float:
        return step_cost(self.inner, parameter, self.param_groups[group])

    def _whole(self) -> dict[Any, Values]:
        """Return every parameter's whole state. Every rank must call it."""
        lines = [f"{self._who}, groups of {[len(g) for g in self._known]} parameters that require a gradient"]
        fix = "call state_dict() on every rank, then save on one"
        agree(self.group, "the state of the optimizer", lines, timeout_s(self.group), fix)
        values = [v for _, v in self._values(self._blocks, self._weights)]
        full = whole(self.carrier.layout, self._parameters, self._blocks, values, self.group)
        return {self._parameters[i]: v for i, v in full.items()} | self._others

    def _rebuild(self) -> None:
        """Divide all parameters among the ranks again, after the optimizer's groups were changed."""
        own = self._whole()
        for group in self.param_groups:
            # Some optimizers (Adagrad) create the state of a parameter as soon as it is added to a group.
            own.update({p: self.inner.state.pop(p) for p in group["params"] if p in self.inner.state})
        fit(own)
        self.carrier.close()
        self._connect(own)


class _WholesOfBlocks(Wholes):
    """Knows norms of the whole parameters of which this rank's blocks are parts; no block holds parts of two parameters."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def _index(self, weights: Sequence[Tensor]) -> list[int]:
        """Return the parameter of which each of the optimizer's weights is a part."""
        carrier = self._optimizer.carrier
        known = {id(w): block.pieces[0].parameter for block, w in zip(carrier.blocks, carrier.weights, strict=True)}
        return [known[id(weight)] for weight in weights]

    @override
    def num_dims(self, parameter: Tensor) -> int:
        return len(self._optimizer._parameters[self._index([parameter])[0]].shape)

    @override
    def norms(self, parameters: Sequence[Tensor], values: Sequence[Sequence[Tensor | None]]) -> list[list[Tensor]]:
        places, known = self._index(parameters), self._optimizer._parameters
        squares = torch.zeros(len(values), len(known), dtype=torch.float64, device=self._optimizer.device)
        for k, some in enumerate(values):
            given = [(i, value) for i, value in zip(places, some, strict=True) if value is not None]
            if given:
                norms = torch.stack(torch._foreach_norm([value for _, value in given])).to(squares)
                squares[k].index_add_(0, torch.tensor([i for i, _ in given], device=squares.device), norms**2)
        dist.all_reduce(squares, group=self._optimizer.group)
        by_parameter = summed(known, squares.t().contiguous(), 2.0)
        return [[row[i] for i in places] for row in by_parameter.t().sqrt().unbind()]
