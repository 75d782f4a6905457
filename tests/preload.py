"""What the fork server imports once for all processes that are forked from it; nobody else imports this module.

The package whole, and the modules of tests whose functions run in ranks. What lives then is left out of all garbage collections
of the forked processes: collecting it took each of them up to a second and copied every page that it shares with the server.
What torch would take down at their end stays too, for the same reason. And the memory is put on huge pages: a fork copies one
entry of the page table for each instead of 512.
"""

import ctypes
import gc
import importlib
import pkgutil
import sys
import weakref

import pytest

_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25


def _import() -> None:
    for library in ("hypothesis", "transformers.models.bert.modeling_bert"):
        importlib.import_module(library)
    for name in ("guozhuang", "tests.processes", "tests.hosts", "tests.threads"):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                try:
                    importlib.import_module(module.name)
                except (Exception, pytest.skip.Exception):  # the latter, which is no Exception: a library is missing
                    continue  # the rank that needs it will say why, or the test that it belongs to


def _put_on_huge_pages() -> None:
    """Collapse the memory of this process, where the kernel can: Linux 6.1 or later, with a huge page that is free."""
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps") as file:
        mappings = [line.split() for line in file]
    for limits, access, _, _, _, *name in mappings:
        if access == "rw-p" and name in ([], ["[heap]"]):
            first, end = (int(limit, 16) for limit in limits.split("-"))
            for page in range(-(-first // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE):
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)


gc.disable()  # until all is imported, for it finds nothing
_import()
for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
    if not finalizer.peek()[1].__module__.startswith("guozhuang."):
        finalizer.atexit = False
gc.collect()
gc.freeze()
gc.enable()
if sys.platform == "linux":
    _put_on_huge_pages()
