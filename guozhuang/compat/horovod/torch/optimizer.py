"""``DistributedOptimizer``: the user's optimizer, whose ``step`` uses the combined gradients of all ranks."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from guozhuang.compat.horovod.common import elastic_variables
from guozhuang.compat.horovod.common.process_sets import ProcessSet, global_process_set
from guozhuang.compat.horovod.common.state import required
from guozhuang.errors import explain

from .backward_passes import BackwardPasses
from .compression import Compression, check_compression
from .functions import broadcast_object
from .gradient_units import AdasumUnits, GradientUnits
from .mpi_ops import Adasum, Average, Sum, allreduce, size
from .named_parameters import ParameterGroups, check_groups, grouped, names_of

# Methods that a learning-rate scheduler may have replaced on the wrapped optimizer's instance; they are not copied.
_OWN_METHODS = frozenset({"add_param_group", "load_state_dict", "step", "zero_grad"})


class _Distributed(Optimizer):
    """Base of both distributed optimizers. Among the bases it precedes the user's optimizer, whose methods ``super()`` calls.

    Attributes:
        op, process_set: the arguments of ``DistributedOptimizer``.
    """

    op: int
    process_set: ProcessSet
    _exchange: BackwardPasses
    _is_exchanging: bool
    _names: dict[Tensor, str]
    _wrapped: Optimizer

    def _take_over(self, optimizer: Optimizer, names: dict[Tensor, str], op: int, process_set: ProcessSet) -> None:
        """Take all attributes of ``optimizer``: the same parameter groups and state, not copies."""
        self.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name not in _OWN_METHODS})
        self._wrapped, self._names, self.op, self.process_set = optimizer, names, op, process_set

    def _hook(self) -> None:
        """Begin to exchange gradients, if there are other ranks, or if an elastic driver may add ranks later."""
        here, is_member = required(), self.process_set.included()
        if is_member is None:
            fix = "give it to hvd.init(process_sets=[...]), or call hvd.add_process_set first"
            raise ValueError(explain(f"{self.process_set} is not registered", rank=here.rank, fix=fix))
        self._is_exchanging = is_member and (here.size > 1 or elastic_variables.driver() is not None)
        if self._is_exchanging:
            self._exchange.take([p for group in self.param_groups for p in group["params"]])

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        return self._names

    @property
    def _handles(self) -> dict[Any, tuple[Any, Any]]:
        return self._exchange.handles()

    @property
    def _allreduce_delay(self) -> dict[Tensor, int]:
        left = {one.parameter: one.left for one in self._exchange.hooked}
        return {p: left.get(p, self.backward_passes_per_step) for p in self._names}

    @property
    def backward_passes_per_step(self) -> int:
        """Return the number of backward passes before each step."""
        return self._exchange.num_passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._exchange.num_passes = checked_passes(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each ``step``. Call it between steps, on every rank.

        Raises:
            ValueError: the number is less than one.
        """
        self.backward_passes_per_step = passes
        self._exchange.abandon()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Its gradients are exchanged too; every rank must add the same group, between steps."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]["params"]
        for parameter in added:
            self._names.setdefault(parameter, f"allreduce.noname.{len(self._names)}")
        if self._is_exchanging:
            self._exchange.take(added)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as the wrapped optimizer does; the results of running exchanges are dropped."""
        self._exchange.abandon()
        super().load_state_dict(state_dict)
        # Loading makes new groups and state; share them with the wrapped optimizer again, whose groups a scheduler changes.
        self._wrapped.param_groups, self._wrapped.state = self.param_groups, self.state

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients as the wrapped optimizer does; call it between steps.

        Raises:
            AssertionError: gradients are being exchanged.
        """
        self._may_zero()
        super().zero_grad(*args, **kwargs)

    def _may_zero(self) -> None:
        if self._exchange.is_open:
            what = (
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition"
            )
            fix = "call zero_grad() after step(), or before backward()"
            raise AssertionError(explain(what, fix=fix))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as an optimizer of the wrapped class: hooks and running exchanges belong to this process."""
        return _empty, (type(self._wrapped),), self.__getstate__()

    def _stepped(self) -> None:
        # A scheduler of the wrapped optimizer reads this attribute to warn if it steps before the optimizer.
        self._wrapped._opt_called = True  # type: ignore[attr-defined]


class _DistributedOptimizer(_Distributed):
    """The user's optimizer, which combines gradients over all ranks before each step."""

    _synchronized = False
    _should_synchronize = True
    _warns_of_two_exchanges = True

    def synchronize(self) -> None:
        """Wait until all gradients are combined; afterwards ``.grad`` holds the result, the same on all ranks.

        Every member of the process set must call, or ``step``. Parameters without a gradient take part with zeros.

        Raises:
            HorovodInternalError: an exchange failed: ranks differ, or one is lost.
        """
        self._exchange.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` not synchronize, after ``synchronize`` was called explicitly::

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as the wrapped optimizer does; the results of running exchanges are dropped."""
        super().load_state_dict(state_dict)
        self._synchronized, self._should_synchronize = False, True

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Synchronize, unless inside ``skip_synchronize``, and step as the wrapped optimizer does.

        Args:
            closure: computes the loss and its gradients anew; these are combined after each call, unless ``closure`` calls
                ``synchronize`` itself. LBFGS, which decides by the loss how often to call it, gets the loss of all ranks.
            *args, **kwargs: further arguments of the wrapped optimizer's ``step``.

        Returns:
            The result of the wrapped optimizer's ``step``.
        """
        if self._should_synchronize:
            # Open: gradients have come since ``synchronize``.
            if self._warns_of_two_exchanges and self._synchronized and not self._exchange.is_open:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                    "This can cause training slowdown: everything is exchanged twice. Call step() inside "
                    "`with optimizer.skip_synchronize():`.",
                    stacklevel=2,
                )
            if closure is None or self._exchange.is_open:
                self.synchronize()
        again = None if closure is None else self._synchronizing(closure, self._should_synchronize)
        # Pass a closure only if there is one: the ``step`` of some optimizers takes none.
        arguments = (again, *args) if again is not None or args else ()
        result = super().step(*arguments, **kwargs)
        self._synchronized = False
        self._stepped()
        return result

    def _synchronizing(self, closure: Callable[[], Any], always: bool) -> Callable[[], Any]:
        def call() -> Any:
            self._synchronized = False
            loss = closure()
            if self._exchange.is_open or (always and not self._synchronized):
                self.synchronize()
            return self._of_all_ranks(loss) if isinstance(self, LBFGS) and self._is_exchanging else loss

        return call

    def _of_all_ranks(self, loss: Any) -> Tensor:
        own = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
        return allreduce(
            own.clone(), name=f"loss.{min(self._names.values())}", op=self.op, process_set=self.process_set
        )

    # Prevents PyTorch from running users' step hooks here: the wrapped class's ``step``, which this one calls, runs them.
    step.hooked = True  # type: ignore[attr-defined]


class _DistributedAdasumOptimizer(_Distributed):
    """The user's optimizer, which steps on each gradient of this rank as it comes, and adds the adaptive sum of all steps."""

    _exchange: AdasumUnits

    def synchronize(self) -> None:
        """Do nothing: gradients are not exchanged; ``step`` waits for the exchange of the weights' changes."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise AssertionError: with Adasum the exchange is a part of the step."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    @Optimizer.profile_hook_step  # calls the step hooks that users register
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the adaptive sum of the steps of all ranks and add it to the weights. Every rank must call this.

        Args:
            closure: computes the loss and the gradients of this step.

        Returns:
            The result of ``closure``.
        """
        loss = closure() if closure is not None else None
        self._exchange.finish()
        self._stepped()
        return loss

    def _step_on(self, parameters: Sequence[Tensor]) -> None:
        """Step as the wrapped optimizer does, on these parameters alone, without the hooks that users register."""
        chosen = {id(p) for p in parameters}
        kept = [group["params"] for group in self.param_groups]
        hooked = getattr(super(), "step").__func__  # noqa: B009 - to mypy it is no bound method
        try:
            for group in self.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in chosen]
            (hooked.__wrapped__ if getattr(hooked, "hooked", False) else hooked)(self)
        finally:
            for group, members in zip(self.param_groups, kept, strict=True):
                group["params"] = members

    step.hooked = True  # type: ignore[attr-defined]


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: ParameterGroups | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer step on the combined gradients of all ranks. Every rank must call, after ``hvd.init()``.

    While backward runs each gradient is sent as soon as it is computed; ``step()`` waits for the results. ``synchronize()``
    waits earlier, so that the combined gradients can be clipped or unscaled, see ``skip_synchronize``.

    Args:
        optimizer: any torch optimizer; the returned one shares its parameter groups and state.
        named_parameters: pairs of name and parameter, for all parameters of the optimizer (``model.named_parameters()``).
            Ranks match gradients by these names. None: by the place in the optimizer.
        compression: the compressor of gradients that are sent; see ``Compression``.
        backward_passes_per_step: number of backward passes whose gradients are added up on this rank before they are sent.
            They are not divided by that number.
        op: Average or Sum; Adasum makes each rank step by itself and combines the steps, by the adaptive sum.
        gradient_predivide_factor: of Average: gradients are divided by it before they are summed, and by
            size / factor afterwards.
        num_groups: the older form of an integer in ``groups``.
        groups: number of groups in which gradients are sent, or lists of parameters that form groups; a parameter in none of
            them is sent by itself. Not used with Adasum.
        sparse_as_dense: send sparse gradients as dense ones; otherwise their rows are gathered.
        process_set: the ranks that exchange; on other ranks the optimizer steps alone.

    Returns:
        An object of a class with the name of the optimizer's own, derived from it.

    Raises:
        ValueError: names are missing or double, groups cannot be formed, a number is invalid, or Adasum with LBFGS.
        NotImplementedError: Adasum in a process set other than the global one.
    """
    check_arguments(optimizer, compression)
    if op not in (Average, Sum, Adasum):
        raise ValueError(explain("op is no way to combine gradients", value=op, fix="use hvd.Average, Sum or Adasum"))
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(explain("gradient_predivide_factor not supported with op != Average", value=op))
    if not gradient_predivide_factor > 0:
        raise ValueError(explain("gradient_predivide_factor must be > 0", value=gradient_predivide_factor))
    if num_groups != 0:
        text = "Parameter `num_groups` has been replaced by `groups`; pass the number there."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    checked_passes(backward_passes_per_step)
    if groups is not None:
        check_groups(groups)
    names = names_of(named_parameters, optimizer.param_groups)
    if op == Adasum and size() > 1:
        if isinstance(optimizer, LBFGS):
            fix = "use op=hvd.Average"
            raise ValueError(explain("LBFGS cannot step on one parameter at a time, as op=Adasum has it do", fix=fix))
        if process_set is not global_process_set:
            raise NotImplementedError(
                "Adasum works among all ranks only, not in other process sets than the global one."
            )
        if groups is not None:
            text = "groups are not used with op=Adasum, which combines each parameter's step by itself."
            warnings.warn(text, stacklevel=2)
        adaptive: Any = derived(_DistributedAdasumOptimizer, optimizer)
        adaptive._take_over(optimizer, names, op, process_set)
        adaptive._exchange = AdasumUnits(names, process_set, backward_passes_per_step, compression, adaptive._step_on)
        adaptive._hook()
        return adaptive
    made: Any = derived(_DistributedOptimizer, optimizer)
    made._take_over(optimizer, names, op, process_set)
    made._exchange = GradientUnits(
        names, process_set, backward_passes_per_step, compression, op, gradient_predivide_factor, sparse_as_dense
    )
    made._hook()
    if groups is not None:
        _form_groups(made._exchange, groups, process_set)
    return made


def check_arguments(optimizer: Any, compression: Any) -> None:
    """Raise ValueError unless the optimizer can be made distributed, with this compressor."""
    if isinstance(optimizer, _Distributed):
        raise ValueError(
            explain("the optimizer is distributed already", value=type(optimizer).__name__, fix="wrap it once")
        )
    if not isinstance(optimizer, Optimizer):
        what = "DistributedOptimizer wraps an optimizer of torch.optim, or one derived from torch.optim.Optimizer"
        raise ValueError(explain(what, value=type(optimizer).__name__, fix="give the optimizer, not the model"))
    check_compression(compression)


def _empty(kind: type[Optimizer]) -> Optimizer:
    return kind.__new__(kind)


def derived(kind: type[_Distributed], optimizer: Optimizer) -> Any:
    """Return a bare object of a new class of the optimizer's own name, derived from ``kind`` and the optimizer's class."""
    base = type(optimizer)
    body = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    made: Any = types.new_class(base.__name__, (kind, base), exec_body=lambda namespace: namespace.update(body))
    return made.__new__(made)


def _form_groups(exchange: GradientUnits, groups: ParameterGroups, process_set: ProcessSet) -> None:
    if not exchange.hooked:
        return
    assert process_set.ranks, "it is registered"
    first = process_set.ranks[0]

    def of_first_rank(names: list[str]) -> list[str]:
        agreed: list[str] = broadcast_object(names, root_rank=first, process_set=process_set)
        return agreed

    names = [one.name for one in exchange.hooked]
    exchange.group(grouped(names, [one.parameter for one in exchange.hooked], groups, of_first_rank))


def checked_passes(passes: int) -> int:
    """Return the number of backward passes before each step; ValueError if it is less than one."""
    if passes <= 0:
        raise ValueError(explain("backward_passes_per_step must be > 0", value=passes))
    return passes
