"""Lightning's Trainer and Fabric train by Guozhuang's strategies: ``strategy="guozhuang"``, or an object of a class here::

    from guozhuang.compat.lightning import GuozhuangStrategy            # Trainer(strategy=GuozhuangStrategy("sharded"))
    from guozhuang.compat.lightning import GuozhuangFabricStrategy      # Fabric(strategy=GuozhuangFabricStrategy("sharded"))

Both packages are served, ``lightning`` and ``pytorch_lightning`` with ``lightning_fabric``: the classes above are of the one
that the script has imported. ``strategy="guozhuang"`` takes the name from GUOZHUANG_STRATEGY, else "ddp".
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from guozhuang.compat import prepared
from guozhuang.compat.environment import env
from guozhuang.distributed import DistributedDataParallel
from guozhuang.sharding import clip_grad_norm_
from guozhuang.strategies import is_prepared, unwrap
from guozhuang.world import init

_OWN_STATES = "guozhuang"  # the key of a checkpoint under which the states are that differ between ranks
_PACKAGES = {"GuozhuangStrategy": ("lightning.pytorch", "pytorch_lightning"),
             "GuozhuangFabricStrategy": ("lightning.fabric", "lightning_fabric")}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    first, second = _PACKAGES[name]
    if first not in sys.modules and (
        second in sys.modules or importlib.util.find_spec(first.partition(".")[0]) is None
    ):
        return strategy_class(second)
    return strategy_class(first)


@functools.cache
def strategy_class(package: str) -> type:
    """Return the strategy class for a package: lightning.pytorch, lightning.fabric, pytorch_lightning or lightning_fabric."""
    theirs = importlib.import_module(f"{package}.strategies").DDPStrategy
    is_fabric = package.endswith("fabric")
    name, part = ("GuozhuangFabricStrategy", _ForFabric) if is_fabric else ("GuozhuangStrategy", _ForTrainer)
    return type(name, (part, theirs), {"__module__": __name__})


class _Strategy:
    """What both strategies have in common: the world of ``gz.init``, and models prepared by ``gz.prepare``.

    Args:
        strategy: a name that ``gz.prepare`` knows; None: the one of GUOZHUANG_STRATEGY, else "ddp".
        **options: arguments of Lightning's DDPStrategy, of which those that it does not know are DistributedDataParallel's.
    """

    _ddp_kwargs: dict[str, Any]
    _process_group_backend: str | None
    _timeout: timedelta | None
    cluster_environment: Any
    root_device: Any
    num_processes: int

    def __init__(self, strategy: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.name = strategy or os.environ.get("GUOZHUANG_STRATEGY") or "ddp"
        self._trained: list[nn.Module] = []

    def _enter(self) -> None:
        """Meet the other ranks by ``gz.init``, with what Lightning's own environment knows about them."""
        where = self.cluster_environment
        if dist.is_initialized():
            init(device=self.root_device)  # a script's own group, or the world of an earlier fit
            return
        rank, size, local_rank = where.global_rank(), where.world_size(), where.local_rank()
        told = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": self.num_processes}
        told |= {"MASTER_ADDR": where.main_address, "MASTER_PORT": where.main_port}
        limit = {} if self._timeout is None else {"timeout_s": self._timeout.total_seconds()}
        with env(**{name: str(value) for name, value in told.items()}):
            init(self._process_group_backend, self.root_device, **limit)
        self._process_group_backend = dist.get_backend()

    def _prepare(self, model: nn.Module, optimizers: list[Any], call: str) -> tuple[nn.Module, list[Any]]:
        """Prepare a model with its optimizers. Every rank must call it."""
        options = {name: value for name, value in self._ddp_kwargs.items() if name != "device_ids"}
        if is_prepared(model, optimizers):
            self._trained.append(model)
            return model, optimizers
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model, optimizers
        model, optimizers = prepared.wrap(model, optimizers, self.name, options, "Lightning", call, is_seen=False)
        self._trained.append(model)
        return model, optimizers

    def _reduced(self, call: Callable[..., Any], tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce a tensor by Lightning's method ``call``; the mean of whole numbers as over gloo, of which it takes the sum."""
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if not (is_mean and isinstance(tensor, Tensor) and not tensor.is_floating_point()):
            return call(tensor, group, reduce_op)
        return tensor.copy_(call(tensor, group, "sum") / dist.get_world_size(group))

    def _with_own_states(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Add to a checkpoint, which rank 0 writes, what differs between ranks. Every rank must call it."""
        own: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        state = prepared.own_state(self._trained)
        dist.gather_object(state if any(state) else None, own)
        return checkpoint if own is None or not any(own) else {**checkpoint, _OWN_STATES: own}

    def _load_own_states(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint.get(_OWN_STATES)
        fits = states is not None and len(states) == dist.get_world_size()
        prepared.load_own_state(states[dist.get_rank()] if states and fits else None, self._trained)

    def teardown(self) -> None:
        """End the training: the model is the script's own again, and weights of ranks that trained alone are equal."""
        for model in self._trained:
            prepared.agree(model)
        self._trained = []
        super().teardown()  # type: ignore[misc]


class _ForTrainer(_Strategy):
    """Trains a LightningModule: the model is prepared when its optimizers are there."""

    model: Any
    optimizers: list[Any]
    lightning_module: Any
    precision_plugin: Any
    lr_scheduler_configs: list[Any]
    is_global_zero: bool
    _forward_redirection: Any

    def setup_distributed(self) -> None:
        """Meet the other ranks."""
        self.set_world_ranks()  # type: ignore[attr-defined]
        self._enter()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; return anything else as it is. Every rank must call it."""
        return self._reduced(super().reduce, tensor, group, reduce_op)  # type: ignore[misc]

    def setup(self, trainer: Any) -> None:
        """Let Lightning set up a training, or a test. Every rank must call it."""
        is_training = trainer.state.fn == "fit"
        with nullcontext() if is_training else prepared.as_equal(self.model):
            super().setup(trainer)  # type: ignore[misc]

    def configure_ddp(self) -> None:
        """Do nothing: the model is wrapped in :meth:`setup_optimizers`, which Lightning calls next."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Let the module make its optimizers and schedulers, and prepare it with them. Every rank must call it."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        own = [each for each in self.optimizers if each.param_groups and each.param_groups[0]["params"]]
        self.model, made = self._prepare(self.model, own, "configure_optimizers()")
        replaced = dict(zip(map(id, own), made, strict=True))
        self.optimizers = [replaced.get(id(each), each) for each in self.optimizers]
        if isinstance(self.model, DistributedDataParallel):
            self._register_ddp_hooks()  # type: ignore[attr-defined]
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm
        self.precision_plugin.clip_grad_by_value = self._clip_grad_by_value

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_grad_norm_(self.precision_plugin.main_params(optimizer), clip_val)

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        prepared.clip_grad_value_(self.precision_plugin.main_params(optimizer), clip_val, [optimizer])

    def training_step(self, *args: Any, **options: Any) -> Any:
        """Call the module's method of this name by way of the model, also where that is divided and not wrapped."""
        return self._by_model("training_step", "train_step_context", args, options)

    def validation_step(self, *args: Any, **options: Any) -> Any:
        """Call the module's method of this name, as :meth:`training_step` does."""
        return self._by_model("validation_step", "val_step_context", args, options)

    def test_step(self, *args: Any, **options: Any) -> Any:
        """Call the module's method of this name, as :meth:`training_step` does."""
        return self._by_model("test_step", "test_step_context", args, options)

    def predict_step(self, *args: Any, **options: Any) -> Any:
        """Call the module's method of this name, as :meth:`training_step` does."""
        return self._by_model("predict_step", "predict_step_context", args, options)

    def _by_model(self, name: str, context: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self.model is not self.lightning_module or not self._trained:
            return getattr(super(), name)(*args, **options)
        with getattr(self.precision_plugin, context)():
            return self._forward_redirection(self.model, self.lightning_module, name, *args, **options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return whole weights under every strategy. Every rank must call it."""
        return prepared.whole_state(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of an optimizer. Every rank must call it."""
        return prepared.whole_state(getattr(optimizer, "_optimizer", optimizer))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights. Every rank must call it."""
        prepared.load_whole_state(self.lightning_module, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole states of optimizers, and what differs between ranks. Every rank must call it."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            prepared.load_whole_state(optimizer, state)
        self._load_own_states(checkpoint)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Let rank 0 write a checkpoint. Every rank must call it."""
        checkpoint = self._with_own_states(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def teardown(self) -> None:
        """End the training; see the base class."""
        was_wrapped = self.model is not self.lightning_module
        super().teardown()
        if was_wrapped:
            self.model = self.lightning_module


class _ForFabric(_Strategy):
    """Trains what a script hands to ``Fabric.setup``."""

    is_global_zero: bool
    precision: Any

    def __init__(self, strategy: str | None = None, **options: Any) -> None:
        super().__init__(strategy, **options)
        self._backward_sync_control = _NoSync()

    def _setup_distributed(self) -> None:
        self._set_world_ranks()  # type: ignore[attr-defined]
        self._enter()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; return anything else as it is. Every rank must call it."""
        return self._reduced(super().all_reduce, tensor, group, reduce_op)  # type: ignore[misc]

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Prepare a model with its optimizers. Every rank must call it."""
        module, optimizers = self._prepare(module, optimizers, "fabric.setup(model, optimizer)")
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepare a model whose optimizer is set up elsewhere. Every rank must call it."""
        return self._prepare(module, [], "fabric.setup(model, optimizer)")[0]

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        """Clip by the norm of the whole gradient under every strategy. Every rank must call it."""
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm_(self.precision.main_params(optimizer), max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of the averaged gradients. Every rank must call it."""
        self.precision.unscale_gradients(optimizer)
        prepared.clip_grad_value_(self.precision.main_params(optimizer), clip_val, [optimizer])

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return whole weights under the names of the script's module. Every rank must call it."""
        prepared.agree(module)
        return prepared.whole_state(unwrap(module))

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights. Every rank must call it."""
        prepared.load_whole_state(unwrap(module), state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of an optimizer. Every rank must call it."""
        return prepared.whole_state(optimizer)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **options: Any) -> None:
        """Let rank 0 write a checkpoint. Every rank must call it."""
        super().save_checkpoint(path, self._with_own_states(state), *args, **options)  # type: ignore[misc]

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **options: Any) -> dict[str, Any]:
        """Load a checkpoint; return what of it was not restored. Every rank must call it."""
        with prepared.taking_whole_states(state.values() if isinstance(state, dict) else [state]):
            rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **options)  # type: ignore[misc]
        if state and self._trained:
            self._load_own_states(rest)
            rest.pop(_OWN_STATES, None)
        return rest


class _NoSync:
    """Leaves out the averaging of gradients inside a context, where a strategy averages them in each backward."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return the context, of which ``enabled`` False makes one that does nothing."""
        is_wrapped = enabled and isinstance(module, nn.parallel.DistributedDataParallel)
        return module.no_sync() if is_wrapped else nullcontext()  # type: ignore[operator]
