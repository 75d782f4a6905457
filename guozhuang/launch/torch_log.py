"""What the C++ part of torch says by itself on standard error."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

_ERROR = 2
_ASKED_FOR = {"TORCH_CPP_LOG_LEVEL", "LOGLEVEL", "TORCH_LOGS"}


@contextlib.contextmanager
def errors_only(environ: Mapping[str, str]) -> Iterator[None]:
    """Meanwhile this process prints no warnings of torch's C++, unless the environment asks for a level of its own.

    A store that is gone is twenty lines of frames there, and one line of ours. ``TORCH_CPP_LOG_LEVEL`` is read when torch
    is imported, and would be handed on to the ranks; so the variable behind it is set, where it is found.
    """
    level = None
    if not _ASKED_FOR & environ.keys():
        with contextlib.suppress(OSError, ValueError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    before = None if level is None else level.value
    if level is not None:
        level.value = max(level.value, _ERROR)
    try:
        yield
    finally:
        if level is not None and before is not None:
            level.value = before
