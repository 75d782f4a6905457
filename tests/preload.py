"""What the fork server imports once for all processes that are forked from it; nobody else imports this module.

The package whole, and the modules of tests whose functions run in ranks. What lives then is left out of all garbage collections
of the forked processes: collecting it took each of them up to a second and copied every page that it shares with the server.
And its memory is put on huge pages: a fork copies one entry of the page table for each instead of 512, a third of what it costs.
"""

import ctypes
import gc
import importlib
import pkgutil
import sys

import hypothesis  # noqa: F401
import pytest
import transformers.models.bert.modeling_bert  # noqa: F401

import guozhuang
import tests.hosts
import tests.processes
import tests.threads

for package in (guozhuang, tests.processes, tests.hosts, tests.threads):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except (Exception, pytest.skip.Exception):  # the latter, which is no Exception, where a library is missing
                continue  # the rank that needs it will say why, or the test that it belongs to
gc.collect()
gc.freeze()


_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25


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


if sys.platform == "linux":
    _put_on_huge_pages()
