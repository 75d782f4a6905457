"""DataParallel: one process, several devices. A forward cuts the batch, runs one replica per device and joins the outputs."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch.nn import Module

from guozhuang.data_parallel import replicas as _replicas
from guozhuang.data_parallel import scatter_gather as _scatter_gather
from guozhuang.errors import UsageError, explain

__all__ = ["DataParallel", "Imbalance", "MisplacedModuleError", "data_parallel"]

_T = TypeVar("_T", bound=Module)
_log = logging.getLogger(__name__)


class MisplacedModuleError(UsageError, RuntimeError):
    """A parameter or buffer of the module is not on ``device_ids[0]``.

    Also a ``RuntimeError``, because that is what ``torch.nn.DataParallel`` raises here.
    """


@dataclass(frozen=True)
class Imbalance:
    """The time that the forwards of a ``DataParallel`` spent in phases on all devices and in phases on one device alone.

    All times are seconds of host time, summed over ``num_forwards``. Accelerators are not synchronized for the measurement,
    so for them a time is how long it took to launch the work. The backward is not included.

    Attributes:
        num_forwards: how many forwards ended without an error since the start or the last reset.
        scatter_s: cutting and sending the inputs; on the main device (``device_ids[0]``) alone.
        replicate_s: making the replicas and sending the weights; on the main device alone.
        apply_s: from the start of the first replica to the end of the last; on all devices.
        gather_s: joining the outputs; on ``output_device`` alone.
        busy_s: for each entry of ``device_ids``, the time its replica was running.
    """

    num_forwards: int
    scatter_s: float
    replicate_s: float
    apply_s: float
    gather_s: float
    busy_s: tuple[float, ...]

    @property
    def main_only_s(self) -> float:
        """The seconds in which one device worked and the others waited for it."""
        return self.scatter_s + self.replicate_s + self.gather_s

    @property
    def main_share(self) -> float:
        """The share of the forwards' time, between 0 and 1, in which one device worked and the others waited for it."""
        total_s = self.main_only_s + self.apply_s
        return self.main_only_s / total_s if total_s > 0 else 0.0


class _Record:
    """The running sums for ``Imbalance``; a copy starts at zero. Locked, because replicas of a nested wrapper share it."""

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._num_forwards = 0
        self._phases_s = [0.0, 0.0, 0.0, 0.0]
        self._busy_s = [0.0] * self._num_devices

    def __reduce__(self) -> tuple[type[_Record], tuple[int]]:
        return (_Record, (self._num_devices,))

    def add_phases(self, marks_s: Sequence[float]) -> None:
        with self._lock:
            self._num_forwards += 1
            for phase in range(4):
                self._phases_s[phase] += marks_s[phase + 1] - marks_s[phase]

    def add_busy(self, busy_s: Sequence[float]) -> None:
        with self._lock:
            for index, seconds in enumerate(busy_s):
                self._busy_s[index] += seconds

    def read(self, reset: bool) -> Imbalance:
        with self._lock:
            scatter_s, replicate_s, apply_s, gather_s = self._phases_s
            busy_s = tuple(self._busy_s)
            result = Imbalance(self._num_forwards, scatter_s, replicate_s, apply_s, gather_s, busy_s)
            if reset:
                self._reset()
            return result


class DataParallel(Module, Generic[_T]):
    """Train one module on several devices of one process: the signature and meaning of ``torch.nn.DataParallel``.

    Each forward cuts its inputs along ``dim`` into a share per device, runs one replica of the module per share in a
    thread of its own, and joins the outputs on ``output_device``. The backward adds the gradients of all replicas into
    the parameters of ``module``. There are no ranks; nothing here communicates with another process.

    Additions to torch's class: devices may be CPUs (``device_ids=["cpu", "cpu"]``) and may repeat; replicas on one device
    share the weights instead of copying them; inputs and outputs may hold mappings, dataclasses and Python values; gradient
    and inference mode, autocast for CPU and the default device apply in the replicas; ``parameters()`` of a replica is not
    empty; inputs that give different numbers of shares raise, where torch's class silently drops rows; ``imbalance()``.

    The same as in torch's class: the running statistics of replica 0 are kept, those of the other replicas are lost; attributes
    that a forward assigns are lost; hooks run once per replica, in its thread; a scalar output becomes a vector with an
    entry per replica; a forward without any input runs on the first device only; with a single device the module
    itself is called. See the notes in ``replicas.py`` on shared weights, buffers and random numbers.

    Args:
        module: its parameters and buffers must be on ``device_ids[0]`` at each forward. With a single device it is
            moved there.
        device_ids: devices (``torch.device`` or their names) or indices of the current accelerator's devices, one per
            replica. Default: all devices of the accelerator. With no accelerator (and on ``mps``, which has one
            device) the module is just called, ``device_ids`` is empty, and a line in the log says so.
        output_device: the device on which outputs are joined. Default: ``device_ids[0]``. ``-1`` is the CPU.
        dim: the dimension along which tensors are cut and joined.

    Attributes:
        module: the module as it was given.
        device_ids: indices for accelerator devices, ``torch.device("cpu")`` for CPUs.
        output_device: in the same form; None if ``device_ids`` is empty.
        dim: as given.

    Raises:
        UsageError: a device does not exist, or ``device_ids`` is an empty list.
    """

    def __init__(
        self,
        module: _T,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.module = module
        self.dim = dim
        devices = _devices(device_ids)
        if not devices:
            _log.warning(
                "DataParallel found no accelerator with several devices and calls the module as it is; "
                'device_ids=["cpu", "cpu"] runs replicas in threads.'
            )
        output = _device(output_device) if output_device is not None else (devices[0] if devices else None)
        if not devices and output is not None and output.type != "cpu":
            raise UsageError(explain("An output device without device_ids cannot work", value=output_device))
        _warn_of_unequal(devices)
        self.device_ids: list[int | torch.device] = [_as_id(d) for d in devices]
        self.output_device = None if output is None or not devices else _as_id(output)
        self.src_device_obj = devices[0] if devices else None
        self._workers = _replicas.Workers()
        self._record = _Record(len(devices))
        if len(devices) == 1:
            self.module.to(devices[0])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module on all devices; the class describes how inputs are cut and outputs are joined.

        Raises:
            MisplacedModuleError: a parameter or buffer is not on ``device_ids[0]``.
            UsageError: inputs cannot be cut, or outputs cannot be joined.
            Exception: the exception of the first failing replica, with a note that names the replica and its device.
        """
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            assert self.src_device_obj is not None and self.output_device is not None
            _require_on(self.module, self.src_device_obj)
            marks_s = [time.perf_counter()]
            shares, kwargs_shares = self.scatter(inputs, kwargs, self.device_ids)
            if not shares and not kwargs_shares:
                shares, kwargs_shares = ((),), ({},)
            marks_s.append(time.perf_counter())
            if len(self.device_ids) == 1:
                marks_s.append(marks_s[-1])
                output = self.module(*shares[0], **kwargs_shares[0])
                marks_s.append(time.perf_counter())
                self._record.add_busy([marks_s[-1] - marks_s[-2]])
                if self.output_device != self.device_ids[0]:
                    output = _scatter_gather.scatter(output, [_device(self.output_device)], self.dim)[0]
            else:
                twins = self.replicate(self.module, self.device_ids[: len(shares)])
                marks_s.append(time.perf_counter())
                outputs = self.parallel_apply(twins, shares, kwargs_shares)
                marks_s.append(time.perf_counter())
                output = self.gather(outputs, self.output_device)
            self._record.add_phases([*marks_s, time.perf_counter()])
            return output

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Sequence[int | str | torch.device],
    ) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
        """Cut positional and keyword inputs; return two tuples with an entry per share, both empty without inputs."""
        if not inputs and not kwargs:
            return (), ()
        return _scatter_kwargs(inputs, kwargs, [_device(d) for d in device_ids], self.dim)

    def replicate(self, module: _T, device_ids: Sequence[int | str | torch.device]) -> list[_T]:
        """Make one replica of ``module`` per device; see ``replicas.replicate``."""
        return _replicas.replicate(module, [_device(d) for d in device_ids])

    def parallel_apply(
        self, replicas: Sequence[Module], inputs: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """Run each replica with its share in a thread, replica i on device i; see ``replicas.apply``."""
        devices = [_device(d) for d in self.device_ids[: len(replicas)]]
        outputs, busy_s = _replicas.apply(replicas, inputs, kwargs, devices, self._workers)
        self._record.add_busy(busy_s)
        return outputs

    def gather(self, outputs: Sequence[Any], output_device: int | str | torch.device) -> Any:
        """Join the replicas' outputs on one device; see ``scatter_gather.gather``."""
        return _scatter_gather.gather(outputs, _device(output_device), self.dim)

    def imbalance(self, *, reset: bool = False) -> Imbalance:
        """Return how much time all forwards so far spent on all devices, and how much on one device alone.

        Args:
            reset: set all sums to zero afterwards.
        """
        return self._record.read(reset)


def data_parallel(
    module: Module,
    inputs: Any,
    device_ids: Sequence[int | str | torch.device] | None = None,
    output_device: int | str | torch.device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call ``module`` once in parallel, as ``DataParallel`` does, without keeping threads or times between calls.

    Args:
        module: its parameters and buffers must be on ``device_ids[0]``.
        inputs: a tuple of positional inputs, a single input that is no tuple, or None for no input.
        device_ids: as for ``DataParallel``.
        output_device: as for ``DataParallel``.
        dim: as for ``DataParallel``.
        module_kwargs: the keyword inputs.

    Returns:
        The module's output, joined on ``output_device``.

    Raises:
        MisplacedModuleError: a parameter or buffer is not on ``device_ids[0]``.
        UsageError: a device does not exist, inputs cannot be cut, or outputs cannot be joined.
        Exception: the exception of the first failing replica, with a note that names the replica and its device.
    """
    arguments = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    devices = _devices(device_ids)
    if devices:
        _require_on(module, devices[0])
    wrapper = DataParallel(module, device_ids, output_device, dim)
    return wrapper(*arguments, **(module_kwargs or {}))


def _scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, devices: Sequence[torch.device], dim: int
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    # Positional and keyword inputs are cut in one call, so that both have the same number of shares.
    shares = _scatter_gather.scatter((inputs, dict(kwargs or {})), devices, dim)
    return tuple(share[0] for share in shares), tuple(share[1] for share in shares)


def _device(device_id: int | str | torch.device | None) -> torch.device:
    """Return the device for a user's name or index; an accelerator device always has its index, the CPU has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device_id, int):
        if device_id == -1:
            return torch.device("cpu")
        if accelerator is None:
            raise UsageError(
                explain(
                    "A device index needs an accelerator, and there is none",
                    value=device_id,
                    fix='use device_ids=["cpu", "cpu"] to run replicas on the CPU',
                )
            )
        kind, index = accelerator.type, device_id
    else:
        try:
            device = torch.device(device_id)  # type: ignore[arg-type]
        except (RuntimeError, TypeError) as error:
            raise UsageError(explain(f"Not a device: {error}", value=device_id)) from error
        if device.type == "cpu":
            return torch.device("cpu")
        if accelerator is None or device.type != accelerator.type:
            found = "none" if accelerator is None else accelerator.type
            raise UsageError(explain(f"There is no such device; the accelerator here is: {found}", value=device_id))
        kind, index = device.type, torch.accelerator.current_device_index() if device.index is None else device.index
    if not 0 <= index < (count := torch.accelerator.device_count()):
        raise UsageError(explain(f"There is no such device; there are {count} of {kind}", value=device_id))
    return torch.device(kind, index)


def _devices(device_ids: Sequence[int | str | torch.device] | None) -> list[torch.device]:
    """Return the devices for ``device_ids``; by default all of the accelerator, and [] without an accelerator or on mps."""
    if device_ids is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type == "mps":
            return []
        return [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]
    if isinstance(device_ids, str) or len(device_ids) == 0:
        raise UsageError(explain("device_ids must be a list of at least one device", value=device_ids))
    return [_device(d) for d in device_ids]


def _as_id(device: torch.device) -> int | torch.device:
    return device if device.type == "cpu" else device.index


def _require_on(module: Module, device: torch.device) -> None:
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device != device:
            raise MisplacedModuleError(
                explain(
                    f"The module must have its parameters and buffers on device {device} (device_ids[0]), "
                    f"but {name!r} is on {tensor.device}",
                    fix=f'move the module there: module.to("{device}")',
                )
            )


def _warn_of_unequal(devices: Sequence[torch.device]) -> None:
    """Warn where one CUDA device has less than three quarters of the memory or processors of another."""
    cuda = [d for d in dict.fromkeys(devices) if d.type == "cuda"]
    properties = [torch.cuda.get_device_properties(d) for d in cuda]
    for name, values in (
        ("memory", [p.total_memory for p in properties]),
        ("processors", [p.multi_processor_count for p in properties]),
    ):
        if values and min(values) < 0.75 * max(values):
            least, most = cuda[values.index(min(values))], cuda[values.index(max(values))]
            warnings.warn(
                f"{least} has less than 75 % of the {name} of {most}, and every device gets an equal share of the "
                f"batch; leave {least} out of device_ids.",
                stacklevel=3,
            )
            return
