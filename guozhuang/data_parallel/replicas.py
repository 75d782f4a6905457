"""Makes replicas (twins) of one module for several devices, and runs them in parallel threads.

[Note: replicas on one device share the parameters]
A replica on the device of the original uses the original's parameter tensors themselves: nothing is copied, and
autograd adds the gradients of all replicas into the original's `.grad`. That needs no lock. For CPU tensors autograd
runs the whole backward in the thread that called `backward`; for an accelerator in one thread per device. In both cases
a parameter that several replicas used has one accumulation node, and the engine sums all gradients for it before it runs.
On another device there is one differentiable copy, used by all replicas there.

[Note: replica 0 owns the buffers]
Replica 0 uses the original's buffers, so its in-place changes (running statistics of a BatchNorm, the vectors of
spectral normalization) stay. Every other replica has copies, made before any replica starts; its changes are lost.

[Note: random numbers]
CPU replicas draw from the one CPU generator of the process, in an order that depends on thread timing. So dropout
differs from run to run, and activation checkpointing inside a CPU replica that draws random numbers cannot repeat the
random numbers of its forward. Replicas on different accelerators have a generator each and neither problem.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import _functions as torch_functions

from guozhuang.errors import UsageError, explain

__all__ = ["Workers", "apply", "replicate"]

_T = TypeVar("_T", bound=Module)


def replicate(module: _T, devices: Sequence[torch.device]) -> list[_T]:
    """Make one replica of ``module`` per device; gradients of all replicas are added to the module's own parameters.

    A replica has the module's class, attributes, hooks and training flags, and its own submodules. Attributes that its
    forward assigns are lost with it. Plain attributes that hold modules or tensors (in a list, for example)
    refer to the original. See [Note: replicas on one device share the parameters] and
    [Note: replica 0 owns the buffers].

    Args:
        module: its parameters and buffers are on ``devices[0]``.
        devices: one per replica; entries may repeat.

    Raises:
        UsageError: the module contains a compiled module, which would call the original, not the replica; a lazy module
            that has not yet seen its first batch; or a ScriptModule with children written in Python.
    """
    originals = list(module.modules())
    _refuse_unreplicable(originals)
    parameters, buffers = list(module.parameters()), list(module.buffers())
    parameters_on = _copies(parameters, devices)
    buffers_on = _copies(buffers, devices)
    buffers_taken: set[torch.device] = set()
    twins: list[_T] = []
    for device in devices:
        owned = buffers_on[device]
        if device in buffers_taken:
            owned = [b.clone() if b.requires_grad else b.detach().clone() for b in owned]
        buffers_taken.add(device)
        tensors = {
            **{id(old): new for old, new in zip(parameters, parameters_on[device], strict=True)},
            **{id(old): new for old, new in zip(buffers, owned, strict=True)},
        }
        twins.append(_twin(module, originals, tensors))
    return twins


def _refuse_unreplicable(modules: Sequence[Module]) -> None:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # None if it was not imported: then no module was compiled
    for module in modules:
        is_compiled = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
        if is_compiled or getattr(module, "_compiled_call_impl", None) is not None:
            what = "A compiled module cannot be replicated: the compiled code is bound to the original"
            fix = "wrap the module that is not compiled, and compile functions inside its forward"
        elif isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            what = "A lazy module whose parameters have no shape yet cannot be replicated"
            fix = "call the module itself with one batch first"
        elif isinstance(module, torch.jit.ScriptModule) and not all(
            isinstance(child, torch.jit.ScriptModule) for child in module.children()
        ):
            what = "A ScriptModule with children written in Python cannot be replicated"
            fix = "script the children too, or leave the parent in Python"
        else:
            continue
        raise UsageError(explain(what, value=type(module).__qualname__, fix=fix))


def _copies(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> dict[torch.device, list[Tensor]]:
    """Return, for each device, the tensors on it: copies, but on ``devices[0]`` the tensors or aliases of their memory."""
    here = devices[0]
    others = [d for d in dict.fromkeys(devices) if d != here]
    if not others or not tensors:
        return {d: list(tensors) for d in (here, *others)}
    if here.type != "cpu" and all(d.type == here.type for d in others):
        # torch's own Broadcast packs small tensors together, in forward and backward. Its outputs for `here` alias the
        # inputs; we use them, because its backward sums over all outputs and would fill in zeros for unused ones.
        flat = torch_functions.Broadcast.apply([here.index, *(d.index for d in others)], *tensors)
        n = len(tensors)
        return {d: list(flat[i * n : (i + 1) * n]) for i, d in enumerate((here, *others))}
    return {here: list(tensors)} | {d: [t.to(d) for t in tensors] for d in others}


def _twin(root: _T, originals: Sequence[Module], tensors: dict[int, Tensor]) -> _T:
    twin_of = {id(m): m._replicate_for_data_parallel() for m in originals}
    for module in originals:
        twin = twin_of[id(module)]
        scripted = isinstance(module, torch.jit.ScriptModule)
        if not scripted:
            twin._parameters = {}  # empty it, because `_replicate_for_data_parallel` fills it for a graph module
        # `setattr` must be called, because some modules override it: recurrent ones update their flat list of weights there.
        for name, child in module._modules.items():
            if child is not None:
                setattr(twin, name, twin_of[id(child)])
        for name, parameter in module._parameters.items():
            if parameter is None:
                if not scripted:
                    twin._parameters[name] = None
                continue
            value = tensors[id(parameter)]
            setattr(twin, name, value)
            if not scripted:
                # A copy is not a leaf, so `setattr` made it a plain attribute. It is moved to the parameters, so that
                # `twin.parameters()` has it: code that reads dtype or device of its first parameter works in a replica.
                twin.__dict__.pop(name, None)
                twin._parameters[name] = value
        for name, buffer in module._buffers.items():
            if buffer is not None:
                setattr(twin, name, tensors[id(buffer)])
        for name, value in list(twin.__dict__.items()):
            # A method set as an attribute (`self.forward = self.other_forward`) is bound to the original: bind it to `twin`.
            if isinstance(value, types.MethodType) and id(value.__self__) in twin_of:
                twin.__dict__[name] = types.MethodType(value.__func__, twin_of[id(value.__self__)])
    root_twin: _T = twin_of[id(root)]
    return root_twin


class Workers:
    """A pool of threads, one per replica, which are kept from one forward to the next.

    A thread starts when its replica first runs, always runs the same replica number (so that an accelerator keeps one
    set of library handles per thread), and ends when the object is collected or the interpreter exits. A copy
    (``copy``, ``pickle``) starts with no threads.

    Threads are kept, because every new thread would have to start its own team of OpenMP threads at each step.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._threads: list[ThreadPoolExecutor] = []
        self._idents: set[int] = set()
        # The lock is held while all calls of a forward are queued. All threads then run two simultaneous forwards in the same
        # order, so replicas of one forward that wait for each other cannot block those of the other forward.
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Workers], tuple[()]]:
        return (Workers, ())

    def submit(self, calls: Sequence[Callable[[], Any]]) -> list[Future[Any]]:
        """Start the calls, call i in thread i; return a future for each."""
        if self._pid != os.getpid():  # the process was forked, and the threads exist only in its parent
            self._reset()
        if threading.get_ident() in self._idents:
            # A replica called its own wrapper: its thread would wait for itself, so this call gets new threads, which end
            # with it. They share `_idents`, so that a further nested call is recognized too.
            others = Workers()
            others._idents = self._idents
            return others._start(calls)
        return self._start(calls)

    def _start(self, calls: Sequence[Callable[[], Any]]) -> list[Future[Any]]:
        with self._lock:
            while len(self._threads) < len(calls):
                name = f"guozhuang-replica-{len(self._threads)}"
                thread = ThreadPoolExecutor(1, name, initializer=_enrol, initargs=(self._idents,))
                self._threads.append(thread)
            return [thread.submit(call) for thread, call in zip(self._threads, calls, strict=False)]


def _enrol(idents: set[int]) -> None:
    idents.add(threading.get_ident())


@dataclass(frozen=True, slots=True)
class _CallerState:
    """The settings that torch keeps per thread, copied from the thread that called forward to the replicas' threads."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> _CallerState:
        kinds = dict.fromkeys(("cpu", *(d.type for d in devices)))
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.default_device.type != "cpu":
                stack.enter_context(self.default_device)
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            yield


def apply(
    replicas: Sequence[Module],
    inputs: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    devices: Sequence[torch.device],
    workers: Workers,
) -> tuple[list[Any], list[float]]:
    """Call each replica with its share, in parallel, and wait for all of them.

    The threads get the caller's gradient and inference mode, autocast, default device, context variables and,
    on accelerators, current streams. CPU replicas divide the caller's intra-operation threads among themselves.

    Returns:
        The outputs, and the seconds of host time each replica took; devices are not synchronized.

    Raises:
        Exception: the exception object of the first failing replica, with its own traceback and a note that names the
            replica and its device; raised after all replicas have ended.
    """
    assert len(replicas) == len(inputs) == len(kwargs) == len(devices) > 0
    state = _CallerState.capture(devices)
    streams = [None if d.type == "cpu" else torch.accelerator.current_stream(d) for d in devices]

    def call(index: int) -> tuple[Any, float]:
        device, stream = devices[index], streams[index]
        on_device = contextlib.nullcontext() if stream is None else torch.accelerator.device_index(device.index)
        try:
            with state.restored(), on_device, stream or contextlib.nullcontext():
                start_s = time.perf_counter()
                output = replicas[index](*inputs[index], **kwargs[index])
                return output, time.perf_counter() - start_s
        except Exception as error:
            error.add_note(f"Raised in replica {index} (of {len(replicas)}) on device {device}.")
            raise

    if len(replicas) == 1:
        results = [call(0)]
    else:
        num_threads = torch.get_num_threads()
        num_sharing = sum(d.type == "cpu" for d in devices)

        def in_thread(index: int) -> tuple[tuple[Any, float], bool]:
            wanted = num_threads
            if devices[index].type == "cpu":
                rank = sum(d.type == "cpu" for d in devices[:index])
                wanted = max(1, num_threads // num_sharing + (rank < num_threads % num_sharing))
            changed = torch.get_num_threads() != wanted
            if changed:
                torch.set_num_threads(wanted)
            return call(index), changed

        contexts = [contextvars.copy_context() for _ in replicas]
        calls = [lambda i=i, context=context: context.run(in_thread, i) for i, context in enumerate(contexts)]
        futures = workers.submit(calls)
        wait(futures)
        results = _results(futures, num_threads)
    return [output for output, _ in results], [busy_s for _, busy_s in results]


def _results(futures: list[Future[Any]], num_threads: int) -> list[tuple[Any, float]]:
    try:
        errors = [(i, e) for i, f in enumerate(futures) if (e := f.exception()) is not None]
        if errors or any(changed for _, changed in (f.result() for f in futures)):
            # `set_num_threads` acts on the calling thread, but also sets the number that *new* threads start with.
            # Setting the caller's number again restores the latter.
            torch.set_num_threads(num_threads)
        if errors:
            (_, first), *others = errors
            for index, other in others:
                first.add_note(f"Replica {index} failed too: {type(other).__name__}: {other}")
            raise first
        return [f.result()[0] for f in futures]
    finally:
        # The exception's traceback refers to this frame. If the frame also referred to the exception, this cycle would
        # keep the replicas and all their tensors alive until the next garbage collection.
        futures = []
        errors = others = []
        first = other = None  # type: ignore[assignment]
