"""Small helpers that scripts and tests written for Horovod import from this path."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion

from guozhuang.compat.environment import env
from guozhuang.errors import explain

from .basics import HorovodBasics

__all__ = [
    "ccl_built",
    "check_extension",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]

_Item = TypeVar("_Item")
_basics = HorovodBasics()
# Horovod has an extension for each framework; Guozhuang supports only that for PyTorch.
_EXTENSIONS = ("torch",)
_cache = functools.cache


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework ("torch", "tensorflow", "mxnet") is supported: only "torch" is."""
    found = ext_base_name in _EXTENSIONS
    if verbose:
        print(f"{ext_base_name}: {'served' if found else 'not served; only torch is'}")
    return found


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError if a framework's Horovod extension is not available: only ``horovod.torch`` is.

    Args:
        ext_name: the name of the extension, such as "horovod.torch".
        ext_env_var: the variable that enables it when Horovod is built; shown in the error's text.
        pkg_path: ignored: there is no compiled file to look for.
        *args: ignored.

    Raises:
        ImportError: the extension is of another framework.
    """
    if not extension_available(ext_name.rpartition(".")[2]):
        what = f"extension {ext_name} is not there ({ext_env_var}): PyTorch alone is served"
        raise ImportError(explain(what, fix="use horovod.torch"))


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework is supported and sees a GPU."""
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def _shown(name: str, ask: Callable[[], bool | int]) -> Callable[..., Any]:
    """Return a function that calls ``ask``, a method of ``HorovodBasics``, and prints the result if called with ``verbose``."""

    def built(verbose: bool = False) -> bool | int:
        found = ask()
        if verbose:
            print(f"{name}: {found or 'not there'}")
        return found

    built.__doc__ = ask.__doc__
    return built


mpi_built = _shown("MPI", _basics.mpi_built)
gloo_built = _shown("Gloo", _basics.gloo_built)
nccl_built = _shown("NCCL", _basics.nccl_built)
ddl_built = _shown("DDL", _basics.ddl_built)
ccl_built = _shown("CCL", _basics.ccl_built)
cuda_built = _shown("CUDA", _basics.cuda_built)
rocm_built = _shown("ROCm", _basics.rocm_built)


def split_list(items: Sequence[_Item], num_parts: int) -> list[Sequence[_Item]]:
    """Cut a sequence into consecutive parts whose lengths differ by one at most, the longer ones first."""
    each, longer = divmod(len(items), num_parts)
    starts = [i * each + min(i, longer) for i in range(num_parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(starts)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is a power of two: 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: object) -> bool:
    """Return whether an object can be iterated over."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether version ``ver`` is at least ``target``.

    Args:
        ver: any version.
        target: a version of the form "major.minor.patch".

    Raises:
        ValueError: ``ver`` or ``target`` is no string, or ``target`` has another form.
    """
    if not (isinstance(ver, str) and isinstance(target, str)):
        raise ValueError(explain("versions are compared as texts", value=(ver, target)))
    if not re.fullmatch(r"\d+\.\d+\.\d+", target):
        raise ValueError(explain("the version to compare with has the form major.minor.patch", value=target))
    return bool(TorchVersion(ver) >= TorchVersion(target))


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Return a function that chooses the reduction from ``(op, average)``; ``average`` is the deprecated form of ``op``.

    Args:
        reduce_ops: an object with the attributes ``Average`` and ``Sum``.
    """

    def chosen(op: int | None, average: bool | None) -> int:
        if average is None:
            if op is not None and not isinstance(op, int):
                fix = "use hvd.Average, hvd.Sum and the like"
                raise ValueError(explain("op is none of the reductions", value=op, fix=fix))
            return int(reduce_ops.Average if op is None else op)
        if op is not None:
            what = "op takes the place of average, and both were given"
            raise ValueError(explain(what, value=f"op={op}, average={average}", fix="leave average out"))
        text = "the argument average is deprecated. Fix: op=hvd.Average in place of True, op=hvd.Sum in place of False."
        # stacklevel=3: the warning points at the script's line, which called the collective that called this function.
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        return int(reduce_ops.Average if average else reduce_ops.Sum)

    return chosen
