"""Hide the differences between versions of PyTorch: raise if it is too old, and give each renamed function one name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from guozhuang.errors import explain

_F = TypeVar("_F", bound=Callable[..., Any])

# The oldest version of PyTorch that works: it has stores on a given socket, process groups written in Python, and their names.
OLDEST = (2, 11)
# The newest version with which the tests of `make test-torch` passed.
NEWEST_TRIED = (2, 15)

#: The renamed methods of a process group, each with its name in older versions. PyTorch's own backends have the older names
#: in all versions, so we call their methods by the older names.
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "all_gather_single": "_allgather_base",
        "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
        "reduce_scatter_single": "_reduce_scatter_base",
        "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
        "all_to_all_single": "alltoall_base",
    }
)


def require(part: str, oldest: tuple[int, int] = OLDEST, version: str = torch.__version__) -> None:
    """Raise if PyTorch is too old for the module ``part``, which calls this when it is imported.

    Args:
        part: the module that needs PyTorch, for the error's text.
        oldest: the first version, major and minor, with which it works.
        version: the version of PyTorch, as in ``torch.__version__`` ("2.13.0+cpu").

    Raises:
        ImportError: this PyTorch is older, or was built without ``torch.distributed``.
    """
    if _numbers(version) < oldest:
        wanted = ".".join(map(str, oldest))
        fix = f"pip install --upgrade 'torch>={wanted}', or an older release of guozhuang"
        raise ImportError(explain(f"{part} needs PyTorch {wanted} or later", value=version, fix=fix))
    if not dist.is_available():
        what = f"{part} needs torch.distributed, which this build of PyTorch {version} was made without"
        raise ImportError(explain(what, fix="install a build from pytorch.org or PyPI"))


def newer_than_tried(version: str = torch.__version__) -> str:
    """Return a sentence that says so if PyTorch is newer than any version that guozhuang was tried with; else ""."""
    if _numbers(version) <= NEWEST_TRIED:
        return ""
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST_TRIED))
    return f"guozhuang was tried with PyTorch {oldest} to {newest}; this is {version}, which may differ"


def _numbers(version: str) -> tuple[int, int]:
    match = re.match(r"([0-9]+)\.([0-9]+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


require("guozhuang.world")  # raise here, before the lines below look up functions that older versions lack

# These two functions are looked up by getattr, because older versions of PyTorch lack them.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def default_store() -> dist.Store:
    """Return the store of the default process group, however the group was made. PyTorch has no public name for it."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def answer_older_names(group: type) -> None:
    """Add the older names of the renamed methods to a class of process groups, so that every PyTorch version can call it."""
    for name, older in RENAMED.items():
        if name in vars(group) and older not in vars(group):
            setattr(group, older, vars(group)[name])


def attach_no_flight_recorder(kind: type) -> None:
    """Let ``torch.distributed`` attach no flight recorder to process groups of a class that is written in Python.

    From 2.15 on ``init_process_group`` and ``new_group`` attach one to every group. For a group without a backend of PyTorch's
    that raises, with Python 3.13 it ends the process, and nothing would be recorded.
    """
    attach = field(dist.distributed_c10d, "_maybe_attach_flight_recorder")
    if attach is not None:

        @functools.wraps(attach)
        def attach_to_others(group: object, *args: Any, **kwargs: Any) -> None:
            if not isinstance(group, kind):
                attach(group, *args, **kwargs)

        dist.distributed_c10d._maybe_attach_flight_recorder = attach_to_others  # type: ignore[attr-defined]


def name_of(method: str) -> str:
    """Return the name that a renamed method of process groups has in this version of PyTorch."""
    return method if hasattr(dist.ProcessGroup, method) else RENAMED.get(method, method)


def field(part: object, name: str) -> Any:
    """Return the attribute ``name`` of a module, class or configuration of PyTorch; None in versions that lack it."""
    return getattr(part, name, None)


def bound_to_numa(command: list[str], local_rank: int, options: Any) -> list[str]:
    """Return the command that starts a rank on the CPUs near its GPU (``--numa-binding``), by a private function of PyTorch.

    Args:
        command: the command of the rank.
        local_rank: the index of its GPU.
        options: the ``numa_options`` of torch's launch configuration; None: the command is returned unchanged.
    """
    if options is None:
        return command
    from torch.numa import binding

    wrapped = binding._maybe_wrap_command_args_with_numa_binding(
        tuple(command), gpu_index=local_rank, numa_options=options
    )
    return list(wrapped)


def never_compiled(function: _F, recursive: bool = True) -> _F:
    """Mark a function so that ``torch.compile`` leaves it as it is, and if ``recursive`` what it calls; no cost per call.

    For functions that PyTorch calls back (hooks, collectives of a group written in Python). While a compiled training step
    runs backward, ``torch.compile`` would otherwise compile each of them.
    """
    from torch._C._dynamo import eval_frame

    skip, inside = (
        eval_frame._FrameAction.SKIP,
        eval_frame._FrameAction.SKIP if recursive else eval_frame._FrameAction.DEFAULT,
    )
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, inside))
    return function
