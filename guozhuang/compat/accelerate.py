"""Hugging Face Accelerate, and the Trainer that stands on it, train by Guozhuang's strategies.

With GUOZHUANG_STRATEGY in the environment scripts stay as they are (``_guozhuang_start`` brings them here). Else one line::

    from guozhuang.compat.accelerate import Accelerator       # in place of accelerate's; Accelerator(strategy="sharded")
    guozhuang.compat.accelerate.use("sharded")                # for the Trainer, before its TrainingArguments are made

[Note: states of ranks] Weights, and the state of an optimizer that all ranks share, are in the files that Accelerate and the
Trainer write. What differs between ranks (an exchange's residuals, the optimizers of ranks that train alone) is beside them,
in one file for each rank; a run with another number of ranks begins without it.
"""

from __future__ import annotations

import copyreg
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState
from torch import nn
from torch.optim import Optimizer

from guozhuang.compat import prepared
from guozhuang.distributed import DistributedDataParallel
from guozhuang.errors import UsageError, explain
from guozhuang.launch.options import nodes
from guozhuang.sharding import clip_grad_norm_
from guozhuang.strategies import is_prepared
from guozhuang.world import current, init, shutdown

_OWN_STATE = "guozhuang_rank{}.pt"
_asked: list[str] = []


def use(strategy: str) -> None:
    """Let every Accelerator that is made from now on, also by a Trainer, train by a strategy. Every rank must call it.

    Args:
        strategy: a name that ``gz.prepare`` knows.

    Raises:
        RuntimeError: Accelerate has met the other ranks already, by a group of its own.
    """
    if PartialState._shared_state:
        raise RuntimeError(
            "use() came after Accelerate had started; call it before TrainingArguments and Accelerators are made"
        )
    _asked[:] = [strategy]


def _strategy() -> str | None:
    return _asked[0] if _asked else os.environ.get("GUOZHUANG_STRATEGY") or None


@functools.cache
def state_class(theirs: type) -> type:
    """Return the class of which ``PartialState()`` makes objects."""
    return theirs if issubclass(theirs, _State) else type(theirs.__name__, (_State, theirs), {})


@functools.cache
def accelerator_class(theirs: type) -> type:
    """Return the class of which ``Accelerator()``, or a script's subclass of it, makes objects."""
    return theirs if issubclass(theirs, _Accelerator) else type(theirs.__name__, (_Accelerator, theirs), {})


def launched(theirs: Callable[..., Any], asked: Any) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment by which ``accelerate launch`` starts a script, where it has no GPUs to count.

    Accelerate would start one process then, unless mpirun starts more, whatever ``--num_processes`` says. Where a strategy is
    asked for, ``guozhuang run`` starts as many ranks on CPUs, unless the process was started as one of several itself.
    """
    command, environment = theirs(asked)
    is_wanted = _strategy() and (asked.num_processes or 1) > 1 and asked.num_machines == 1
    on_cpus = asked.cpu or asked.use_cpu or not torch.accelerator.is_available()
    if is_wanted and on_cpus and not asked.mpirun_hostfile and not _is_one_of_several():
        run = [sys.executable, "-m", "guozhuang", "run", "-np", str(asked.num_processes), "--standalone", "--no-python"]
        command = [*run, *command]
    return command, environment


def _is_one_of_several() -> bool:
    """Return whether mpirun, srun, ``guozhuang run`` or another launcher started this process and others beside it."""
    try:
        return prepared.is_one_of_several() or nodes.of_this_agent(os.environ) is not None
    except UsageError:  # several on this node
        return True


def __getattr__(name: str) -> Any:
    if name == "Accelerator":
        return accelerator_class(accelerate.Accelerator)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _StandIn:
    """The part of both classes that pickles their objects as objects of Accelerate's own class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg._reconstructor, (type(self).__bases__[1], object, None), dict(vars(self))  # type: ignore[attr-defined]


class _State(_StandIn):
    """The part of ``PartialState`` that lets ``gz.init`` meet the other ranks, and says that they have CPUs where they do.

    It acts where a strategy is asked for, and where the backend is "shm", whose name Accelerate refuses on CPUs.
    """

    initialized: bool
    backend: str | None

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        if (
            not self.initialized
            and (_strategy() is not None or options.get("backend") == "shm")
            and "init_method" not in options
            and _is_one_of_several()
        ):
            timeout = options.pop("timeout", None)
            limit = {} if timeout is None else {"timeout_s": timeout.total_seconds()}
            asked = options.pop("backend", None)
            # Accelerate calls no backend by a name that it does not know: the group is there when it looks.
            world = init(None if prepared.is_gone(asked) else asked, "cpu" if cpu else None, **limit)
            cpu = world.device.type == "cpu"
            # The launchers that Accelerate knows tell it these; of srun it knows nothing.
            told = {"RANK": world.rank, "WORLD_SIZE": world.size}
            told |= {"LOCAL_RANK": world.local_rank, "LOCAL_WORLD_SIZE": world.local_size}
            for name, number in told.items():
                os.environ.setdefault(name, str(number))
            super().__init__(cpu, **options)  # type: ignore[call-arg]
            self.backend = dist.get_backend()
            if prepared.is_gone(asked):
                prepared.say_once(f"backend {asked} is not installed; the group is one of {self.backend}")
            return
        super().__init__(cpu, **options)  # type: ignore[call-arg]

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the world as ``gz.shutdown`` does, if it is to be left."""
        if group is None and current() is not None:
            shutdown()
        super().destroy_process_group(group)  # type: ignore[misc]


class _Accelerator(_StandIn):
    """The part of ``Accelerator`` that prepares models by ``gz.prepare`` in place of PyTorch's DistributedDataParallel."""

    _models: list[Any]
    _optimizers: list[Any]
    _schedulers: list[Any]

    def __init__(self, *args: Any, strategy: str | None = None, **options: Any) -> None:
        if strategy is not None and not PartialState._shared_state:
            use(strategy)
        self._strategy = strategy or _strategy()
        super().__init__(*args, **options)
        if self._strategy is not None:
            _serve_trainer()
            self._check_kind(self._strategy)

    def _check_kind(self, strategy: str) -> None:
        kind = self.distributed_type.value  # type: ignore[attr-defined]
        if kind == "NO" and "RANK" not in os.environ:
            prepared.say_once(
                f"strategy {strategy} has this one process to train in. Fix: start ranks, as guozhuang run -np N does"
            )
        elif kind not in (*_SERVED, "NO"):
            what = f"Accelerate was told to distribute the training itself, and strategy {strategy} would do so too"
            fix = "leave out GUOZHUANG_STRATEGY, or the plugin or the configuration of Accelerate"
            raise UsageError(explain(what, value=kind, fix=fix))

    @property
    def _acts(self) -> bool:
        this: Any = self
        return self._strategy is not None and this.distributed_type.value in _SERVED and this.use_distributed

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models with their optimizers by ``gz.prepare``, and everything else as Accelerate does."""
        given = list(args)
        if self._acts:
            places: Sequence[bool | None] = device_placement or (None,) * len(given)
            for i, model in enumerate(given):
                if isinstance(model, nn.Module):
                    own = {id(parameter) for parameter in model.parameters()}
                    of_model = [k for k, each in enumerate(given) if isinstance(each, Optimizer) and own & _held(each)]
                    given[i], made = self._wrap(model, [given[k] for k in of_model], places[i])
                    for k, optimizer in zip(of_model, made, strict=True):
                        given[k] = optimizer
        return super().prepare(*given, device_placement=device_placement)  # type: ignore[misc]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model without its optimizer; a model that ``gz.prepare`` has returned is taken over as it is."""
        if (
            getattr(model, "_is_accelerate_prepared", False)
            or not (self._acts or is_prepared(model))
            or evaluation_mode
        ):
            evaluation_mode = evaluation_mode or is_prepared(model)
            return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[misc,no-any-return]
        return self._wrap(model, [], device_placement)[0]

    def _wrap(
        self, model: nn.Module, optimizers: list[Optimizer], device_placement: bool | None
    ) -> tuple[nn.Module, list[Optimizer]]:
        is_ready = is_prepared(model, optimizers)
        # What is set on a model that ``gz.prepare`` returned is set on the script's module too, which may come back alone.
        if is_ready and getattr(model, "_is_accelerate_prepared", False):
            return model, optimizers
        theirs: Any = super()
        placed = theirs.prepare_model(model, device_placement, evaluation_mode=True)  # all but the wrapping
        if is_ready or not any(parameter.requires_grad for parameter in placed.parameters()):
            return placed, optimizers
        this: Any = self
        assert self._strategy is not None
        handler, call = this.ddp_handler, "accelerator.prepare(model, optimizer)"
        options = {} if handler is None else handler.to_kwargs()
        wrapped, optimizers = prepared.wrap(
            placed, optimizers, self._strategy, options, "Accelerate", call, is_seen=True
        )
        if handler is not None and isinstance(wrapped, DistributedDataParallel):
            handler.register_comm_hook(wrapped)
        wrapped._is_accelerate_prepared = True
        self._models[self._models.index(placed)] = wrapped
        return wrapped, optimizers

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer as Accelerate does; its ``state_dict`` is whole on all ranks, whatever the strategy divides."""
        theirs: Any = super()
        made = theirs.prepare_optimizer(optimizer, device_placement)
        if self._acts and type(made) is AcceleratedOptimizer:
            made.__class__ = _Optimizer
            made.begin()
        return made

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip by the norm of the whole gradient under every strategy. Every rank must call it."""
        if not self._acts:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[misc]
        self.unscale_gradients()  # type: ignore[attr-defined]
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> Any:
        """Clip each element of the averaged gradients. Every rank must call it."""
        if not self._acts:
            return super().clip_grad_value_(parameters, clip_value)  # type: ignore[misc]
        self.unscale_gradients()  # type: ignore[attr-defined]
        prepared.clip_grad_value_(parameters, clip_value, [each.optimizer for each in self._optimizers])
        return None

    def wait_for_everyone(self) -> None:
        """Wait for all ranks, and make weights equal where ranks train alone, because scripts save or evaluate next."""
        for model in self._models if self._acts else ():
            prepared.agree(model)
        super().wait_for_everyone()  # type: ignore[misc]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return whole weights under every strategy. Every rank must call it."""
        if not self._acts:
            return super().get_state_dict(model, unwrap)  # type: ignore[misc]
        prepared.agree(model)
        return prepared.whole_state(self.unwrap_model(model) if unwrap else model)  # type: ignore[attr-defined]

    def save_state(self, output_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """Save what Accelerate saves, and what differs between ranks. Every rank must call. See [Note: states of ranks]."""
        where = super().save_state(output_dir, *args, **options)  # type: ignore[misc]
        if self._acts and where is not None:
            save_own(where, self._models)
        return where

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """Load what :meth:`save_state` saved. Every rank must call it."""
        theirs: Any = super()
        if not self._acts:
            return theirs.load_state(input_dir, *args, **options)
        seen: list[str] = []
        handle = self.register_load_state_pre_hook(lambda models, folder: seen.append(folder))  # type: ignore[attr-defined]
        try:
            with prepared.taking_whole_states(self._models):
                found = theirs.load_state(input_dir, *args, **options)
        finally:
            handle.remove()
        load_own(seen[0], self._models)
        return found


# Kinds of Accelerate's distributed training in which it would wrap models in PyTorch's DistributedDataParallel.
_SERVED = ("MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA")


class _Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's optimizer around one of ours."""

    _gathered: dict[str, Any] | None

    def begin(self) -> None:
        """Complete an object of Accelerate's own class, which has become one of this class."""
        self._gathered = None
        if self.scaler is not None:
            # GradScaler hands itself to optimizers whose step() takes it, which it reads in the signature.
            functools.update_wrapper(self._optimizer_patched_step_method, self.optimizer.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state. Every rank must call it, but inside ``gathered`` one rank may do so alone."""
        return prepared.whole_state(self.optimizer) if self._gathered is None else self._gathered

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state. Every rank must call it."""
        prepared.load_whole_state(self.optimizer, state_dict)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the state once, for code that asks for it on one rank alone. Every rank must enter."""
        self._gathered = self.state_dict()
        try:
            yield
        finally:
            self._gathered = None


def save_own(folder: str | Path, models: list[Any]) -> None:
    """Write what this rank alone has beside a checkpoint. Every rank must call. See [Note: states of ranks]."""
    state = prepared.own_state(models)
    if any(state):
        torch.save(state, Path(folder, _OWN_STATE.format(PartialState().process_index)))


def load_own(folder: str | Path, models: list[Any]) -> None:
    """Load what :func:`save_own` wrote, if this run has as many ranks as that one. Every rank must call."""
    path = Path(folder, _OWN_STATE.format(PartialState().process_index))
    state = torch.load(path, weights_only=True) if path.exists() else None
    prepared.load_own_state(state, models)


# ---- the Trainer, which saves on one rank alone


def _serve_trainer() -> None:
    """Let all ranks take part where the Trainer of transformers saves or evaluates, if the script has imported it."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is None or hasattr(trainer, "_guozhuang_serves"):
        return
    trainer._guozhuang_serves = True
    for name in ("save_model", "evaluation_loop"):
        _around(trainer, name, _agreeing)
    _around(trainer, "_save_optimizer_and_scheduler", _saving)
    _around(trainer, "_load_optimizer_and_scheduler", _loading)


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    theirs = getattr(owner, name)

    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        if getattr(self.accelerator, "_acts", False):
            return wrapper(self, theirs, *args, **options)
        return theirs(self, *args, **options)

    setattr(owner, name, method)


def _agreeing(trainer: Any, theirs: Callable[..., Any], *args: Any, **options: Any) -> Any:
    for model in trainer.accelerator._models:
        prepared.agree(model)
    return theirs(trainer, *args, **options)


def _saving(trainer: Any, theirs: Callable[..., Any], output_dir: str, *args: Any, **options: Any) -> Any:
    with trainer.optimizer.gathered():
        found = theirs(trainer, output_dir, *args, **options)
    trainer.accelerator.wait_for_everyone()  # the folder is there
    save_own(output_dir, trainer.accelerator._models)
    return found


def _loading(trainer: Any, theirs: Callable[..., Any], checkpoint: str | None, *args: Any, **options: Any) -> Any:
    found = theirs(trainer, checkpoint, *args, **options)
    if checkpoint is not None:
        load_own(checkpoint, trainer.accelerator._models)
    return found


def _held(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
