"""Make ``import horovod.X`` return the module ``guozhuang.compat.horovod.X``: one object under both names.

[Note: one module, two names] A module that is imported by two names must be one object; otherwise each copy would have classes
and state of its own. So the finder below stands before those that search folders, and its loader runs no code: it returns the
module of the other name. The import system sets ``__spec__`` of a module that a loader returns, here to ``horovod.X``; the
loader restores the former one. ``horovod`` itself is treated alike: ``on_path/horovod/__init__.py`` calls ``install``, which
puts ``guozhuang.compat.horovod`` into ``sys.modules`` in its place. Pickles therefore name ``guozhuang.compat.horovod``; old
ones that name ``horovod`` can be read wherever ``horovod`` can be imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

_THEIRS, _OURS = "horovod", "guozhuang.compat.horovod"
# Parts of Horovod for other frameworks, which Guozhuang does not have; scripts try to import them to see what is installed.
MISSING = ("_keras", "keras", "mxnet", "ray", "spark", "tensorflow")


def install() -> None:
    """Make ``horovod`` and ``horovod.*`` mean the modules of this package, in this process. Repeated calls are harmless."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    sys.modules[_THEIRS] = importlib.import_module(_OURS)


class _Finder(importlib.abc.MetaPathFinder):
    """The import system's finder for names ``horovod.X``, which it resolves to ``guozhuang.compat.horovod.X``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec that loads Guozhuang's module of that name; None if the name is not Horovod's or no such module exists.

        Raises:
            ModuleNotFoundError: Horovod has this module and Guozhuang does not; the text says so.
        """
        if not fullname.startswith(f"{_THEIRS}."):
            return None
        rest = fullname.removeprefix(f"{_THEIRS}.")
        if rest.split(".")[0] in MISSING:
            what = f"{fullname} is not there: Guozhuang stands in for Horovod, and has its PyTorch part only (horovod.torch)"
            raise ModuleNotFoundError(what, name=fullname)
        ours = importlib.util.find_spec(f"{_OURS}.{rest}")
        if ours is None:
            return None
        found = importlib.machinery.ModuleSpec(
            fullname,
            _Loader(ours),
            origin=ours.origin,
            is_package=ours.submodule_search_locations is not None,
        )
        found.has_location = ours.has_location
        found.cached = ours.cached
        if ours.submodule_search_locations is not None:
            found.submodule_search_locations = list(ours.submodule_search_locations)
        return found


class _Loader(importlib.abc.InspectLoader):
    """The import system's loader for names ``horovod.X``; returns Guozhuang's module. See [Note: one module, two names]."""

    def __init__(self, ours: importlib.machinery.ModuleSpec) -> None:
        self._ours = ours
        self._real: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours.name)
        self._real = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._real

    def is_package(self, fullname: str) -> bool:
        return self._ours.submodule_search_locations is not None

    def get_source(self, fullname: str) -> str | None:
        loader = self._ours.loader
        return loader.get_source(self._ours.name) if isinstance(loader, importlib.abc.InspectLoader) else None

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module, which ``python -m horovod.X`` runs."""
        loader = self._ours.loader
        return loader.get_code(self._ours.name) if isinstance(loader, importlib.abc.InspectLoader) else None
