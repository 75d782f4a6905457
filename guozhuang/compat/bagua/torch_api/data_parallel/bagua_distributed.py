"""``BaguaDistributedDataParallel``: the object behind ``with_bagua``, which trains a module without wrapping it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from guozhuang.distributed import DistributedDataParallel
from guozhuang.errors import UsageError, explain
from guozhuang.gradients.passes import UncopiedHook

from .. import env
from ..algorithms import Algorithm, AlgorithmImpl
from ..algorithms.base import NotCopied, local_names
from ..bucket import BaguaBucket, buckets_of
from ..communicators import BaguaProcessGroup, _get_default_group, from_torch_group

if TYPE_CHECKING:
    from collections.abc import Iterator

_MIB = 1 << 20


class _Optimizers(NotCopied, list[Optimizer]):
    """The optimizers of a module."""


class _Buckets(NotCopied, Sequence[BaguaBucket]):
    """The buckets of a module as they are now; the engine may change them."""

    def __init__(self, trained_by: BaguaDistributedDataParallel) -> None:
        self._trained_by = trained_by

    def __getitem__(self, place: Any) -> Any:
        return self._trained_by.bagua_buckets[place]

    def __len__(self) -> int:
        return len(self._trained_by.bagua_buckets)


class BaguaDistributedDataParallel(NotCopied):
    """Trains a module on all ranks by an algorithm, through hooks on the module. ``module.bagua_ddp`` is one.

    Every rank must construct it. Parameters and buffers get rank 0's values (with Bagua, trained parameters only), and so do
    options and states of the optimizers. A copy or a pickle of the module has None in its place.

    Args:
        module: the module. Parameters named in its ``_bagua_params_and_buffers_to_ignore`` or
            ``_ddp_params_and_buffers_to_ignore``, and the experts of a MoE layer, stay on their rank.
        optimizers: all optimizers that step its parameters.
        algorithm: the choice of the method.
        process_group: the ranks: a group of Bagua's or of ``torch.distributed``; None: all.
        do_flatten: only checked: gradients are always views of buckets.
        find_unused_parameters: parameters may get no gradient in a step.

    Attributes:
        bagua_train_step_counter: the number of forwards in training mode.
        bagua_algorithm: the method at work.
        bagua_optimizers: the optimizers.
        process_group: the ranks, as Bagua's group.
        parameters_to_ignore: names of parameters that stay on their rank.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        process_group: Any = None,
        do_flatten: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        self.process_group = _group_of(process_group)
        self._group: dist.ProcessGroup = self.process_group.torch_group
        self.bagua_optimizers = _checked_optimizers(optimizers)
        if not isinstance(algorithm, Algorithm):
            fix = 'give e.g. bagua.torch_api.algorithms.Algorithm.init("gradient_allreduce")'
            raise UsageError(explain("with_bagua takes an Algorithm", value=algorithm, fix=fix))
        self.bagua_algorithm: AlgorithmImpl = algorithm.reify(self.process_group)
        if not isinstance(self.bagua_algorithm, AlgorithmImpl):
            what = "Guozhuang stands in for Bagua's Python interface; its Rust core (bagua_core) is not there"
            fix = "let reify return an AlgorithmImpl with a GradientExchange or a WeightExchange of Guozhuang"
            raise NotImplementedError(explain(what, value=type(self.bagua_algorithm).__name__, fix=fix))
        self.bagua_train_step_counter = 0
        self._module, self._find_unused = module, find_unused_parameters
        self._sync = True
        self._is_pending = self._was_loaded = False
        self._used: set[str] = set()
        self.parameters_to_ignore = local_names(module)
        if sparse := [name for name, part in module.named_modules() if getattr(part, "sparse", False) is True]:
            what = "sparse gradients are not supported, as in Bagua"
            fix = "set sparse=False, or train with Guozhuang's strategy sparse-rows"
            raise NotImplementedError(explain(what, value=", ".join(sparse), fix=fix))
        self.bagua_algorithm.check(module, self.bagua_optimizers, do_flatten)
        if (before := vars(module).get("bagua_ddp")) is not None:
            before.end()
        self._ddp = self._begin(1)
        self._expect_backward()
        self._handles = [
            module.register_forward_pre_hook(UncopiedHook(self._before_forward), prepend=True),
            module.register_forward_hook(UncopiedHook(self._after_forward)),
            *(each.register_step_pre_hook(UncopiedHook(self._before_step)) for each in self.bagua_optimizers),
            *(each.register_step_post_hook(UncopiedHook(self._after_step)) for each in self.bagua_optimizers),
            *(part.register_load_state_dict_post_hook(UncopiedHook(self._on_loaded)) for part in module.modules()),
        ]
        if find_unused_parameters:
            for name, p in self._trained():
                hook = UncopiedHook(lambda _, name=name: self._used.add(name))
                self._handles.append(p.register_post_accumulate_grad_hook(hook))
        held = vars(module)
        held.update(bagua_ddp=self, bagua_algorithm=self.bagua_algorithm, bagua_buckets=_Buckets(self))
        held["bagua_optimizers"] = _Optimizers(self.bagua_optimizers)
        held.setdefault("bagua_module_name", f"{type(module).__name__}_{id(module)}")

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward averages gradients; set it to False to let them add up, as ``no_sync`` of PyTorch does."""
        return self._sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._sync = self._ddp.require_backward_grad_sync = value
        self._expect_backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank inside the ``with`` block."""
        before, self.require_backward_grad_sync = self._sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def bagua_buckets(self) -> list[BaguaBucket]:
        """The buckets in which gradients or weights are exchanged."""
        return buckets_of(self._ddp, self.bagua_algorithm, self._trained())

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """Return the names and parameters that take part; with ``find_unused_parameters`` those that had a gradient so far."""
        found = self._trained()
        return [(name, p) for name, p in found if name in self._used] if self._used else found

    def end(self) -> None:
        """Take the hooks off the module and its optimizers, and end started exchanges. Every rank must call it."""
        for handle in self._handles:
            handle.remove()
        self._end_exchanges()

    # ---- beginnings and ends of the exchanges ----------------------------------------------------------------------------

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        named = self._module.named_parameters()
        return [(name, p) for name, p in named if p.requires_grad and name not in self.parameters_to_ignore]

    def _begin(self, forward: int) -> DistributedDataParallel:
        """Make all ranks equal, and prepare the exchanges; return the wrapper that averages gradients."""
        method, module = self.bagua_algorithm, self._module
        with _ignoring(module, self.parameters_to_ignore):
            ddp = DistributedDataParallel(
                module,
                process_group=self._group,
                forward_sync_buffers=False,
                bucket_cap_mb_list=[env.get_default_bucket_size() / _MIB],
                find_unused_parameters=self._find_unused,
            )
        local = [p for name, p in module.named_parameters() if name in self.parameters_to_ignore]
        for optimizer in self.bagua_optimizers:
            _send_state(optimizer, self._group, local)
        exchange = method.gradients(forward, self.bagua_optimizers)
        if exchange is None:
            ddp.leave_gradients_local()
        else:
            ddp.use_exchange(exchange)
            ddp.require_backward_grad_sync = self._sync
            assert ddp.reducer is not None
            ddp.reducer.after_pass = self._expect_backward
        method.begin(self._trained(), self._group, forward)
        return ddp

    def _expect_backward(self) -> None:
        """Average gradients in each backward, as Bagua does: also where the script calls methods or parts of the module."""
        if self._ddp.reducer is not None and self._ddp.reducer.after_pass is not None:
            self._ddp.reducer.expect_backward(self._sync)

    def _end_exchanges(self) -> None:
        self._ddp.leave_gradients_local()
        self.bagua_algorithm.end()
        self._is_pending = False

    # ---- moments of a training step --------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._count_forward()
        self._ddp.before_module()

    def _count_forward(self) -> None:
        self.bagua_train_step_counter += 1
        method, forward = self.bagua_algorithm, self.bagua_train_step_counter
        if method.need_reset(forward) or (self._was_loaded and method.restarts_when_loaded):
            self._end_exchanges()
            self._ddp = self._begin(forward)
            self._expect_backward()
        self._was_loaded = False
        with torch.no_grad():
            method.before_forward(forward)

    def _after_forward(self, module: nn.Module, _: Any, outputs: Any) -> None:
        found = self._ddp.behind_module(outputs)
        if module.training and torch.is_grad_enabled():
            self._is_pending = True
            if self.bagua_algorithm.exchange is not None:
                for output in found:
                    output.register_hook(self._in_backward)

    def _in_backward(self, _: Tensor) -> None:
        if self._is_pending:
            Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        if self._is_pending:
            self._is_pending = False
            with torch.no_grad():
                self.bagua_algorithm.after_backward(self.bagua_train_step_counter)

    def _before_step(self, *_: Any) -> None:
        self._after_backward()

    def _after_step(self, *_: Any) -> None:
        with torch.no_grad():
            self.bagua_algorithm.after_step(self.bagua_train_step_counter)

    def _on_loaded(self, *_: Any) -> None:
        self._was_loaded = True


def _group_of(group: Any) -> BaguaProcessGroup:
    if group is None:
        return _get_default_group()
    if isinstance(group, BaguaProcessGroup):
        return group
    if isinstance(group, dist.ProcessGroup):
        return from_torch_group(group)
    fix = "give new_group(...), a group of torch.distributed, or None for all ranks"
    raise UsageError(explain("process_group is a process group", value=group, fix=fix))


def _checked_optimizers(optimizers: Any) -> list[Optimizer]:
    found = list(optimizers) if isinstance(optimizers, (list, tuple)) else None
    if found is None or not all(isinstance(each, Optimizer) for each in found):
        raise UsageError(explain("optimizers is a list of optimizers", value=optimizers, fix="give [optimizer]"))
    for each in found:
        if isinstance(each, torch.optim.LBFGS):
            what = "the state of LBFGS is not sent to other ranks"
            raise UsageError(explain(what, value=type(each).__name__, fix="take another optimizer"))
    return found


@contextmanager
def _ignoring(module: nn.Module, names: set[str]) -> Iterator[None]:
    """Let the module name what PyTorch's wrapper leaves alone, inside the ``with`` block."""
    name = "_ddp_params_and_buffers_to_ignore"
    before = vars(module).get(name)
    vars(module)[name] = sorted(names)
    try:
        yield
    finally:
        if before is None:
            del vars(module)[name]
        else:
            vars(module)[name] = before


def _send_state(optimizer: Optimizer, group: dist.ProcessGroup, local: Sequence[Tensor]) -> None:
    """Give all ranks the options and the state of rank 0's optimizer, but for the parameters ``local``. Collective."""
    if group.size() == 1:
        return
    sent: list[Any] = [optimizer.state_dict() if group.rank() == 0 else None]
    dist.broadcast_object_list(sent, group_src=0, group=group)
    if group.rank() != 0:
        kept = {p: optimizer.state[p] for p in local if p in optimizer.state}
        optimizer.load_state_dict(sent[0])
        for p in local:
            optimizer.state.pop(p, None)
        optimizer.state.update(kept)
