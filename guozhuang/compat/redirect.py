"""Make ``import horovod.X`` return the module ``guozhuang.compat.horovod.X``, and so for each system in ``SYSTEMS``.

[Note: one module, two names] A module that is imported by two names must be one object; otherwise each copy would have classes
and state of its own. So the finder below stands before those that search folders, and its loader runs no code: it returns the
module of the other name. The import system sets ``__spec__`` of a module that a loader returns, here to ``horovod.X``; the
loader restores the former one. ``horovod`` itself is treated alike: ``on_path/horovod/__init__.py`` calls ``install``, which
puts ``guozhuang.compat.horovod`` into ``sys.modules`` in its place. Pickles therefore name ``guozhuang.compat.horovod``; old
ones that name ``horovod`` can be read wherever ``horovod`` can be imported.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

#: Relative to this package. It holds one package for each of ``SYSTEMS``; where the real one is installed, that one is loaded.
ON_PATH_FOLDER = "compat/on_path"


@dataclasses.dataclass(frozen=True)
class OtherSystem:
    """Another system that scripts import.

    Attributes:
        root: the name of its package.
        target: the package that takes its place.
        missing: parts of it that Guozhuang does not have, as they stand after ``<root>.``; scripts try to import them to see
            what is installed.
        why: what the error says whoever imports one of them, after "<root>.X is not there: ".
    """

    root: str
    target: str
    missing: tuple[str, ...]
    why: str


SYSTEMS = {
    each.root: each
    for each in (
        OtherSystem(
            "bagua",
            "guozhuang.compat.bagua",
            ("bagua_define", "service"),
            "Guozhuang stands in for Bagua, and does not search for the size of buckets: BAGUA_DEFAULT_BUCKET_SIZE is taken",
        ),
        OtherSystem(
            "byteps",
            "guozhuang.compat.byteps",
            ("_keras", "keras", "misc", "mxnet", "tensorflow"),
            "Guozhuang stands in for BytePS, and has its PyTorch part only (byteps.torch)",
        ),
        OtherSystem(
            "horovod",
            "guozhuang.compat.horovod",
            ("_keras", "keras", "mxnet", "ray", "spark", "tensorflow"),
            "Guozhuang stands in for Horovod, and has its PyTorch part only (horovod.torch)",
        ),
    )
}


def install(root: str) -> None:
    """Make ``<root>`` and ``<root>.*`` mean the modules of its target, in this process. Repeated calls are harmless."""
    system = SYSTEMS[root]
    if not any(isinstance(finder, _Finder) and finder.system is system for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(system))
    sys.modules[root] = importlib.import_module(system.target)
    _take_older_calls()


def _take_older_calls() -> None:
    """Let PyTorch take what it took when these systems were made: ``profile(enabled, use_cuda, record_shapes)``."""
    from torch.autograd import profiler

    present = profiler.profile.__init__
    if hasattr(present, "__wrapped__"):
        return

    @functools.wraps(present)
    def init(self: profiler.profile, enabled: bool = True, *older: bool, **named: Any) -> None:
        given: dict[str, Any] = dict(zip(("use_cuda", "record_shapes"), older, strict=False))
        if twice := given.keys() & named.keys():
            raise TypeError(f"profile() got several values for {', '.join(sorted(twice))}")
        present(self, enabled, *older[len(given) :], **given, **named)

    profiler.profile.__init__ = init  # type: ignore[method-assign]


class _Finder(importlib.abc.MetaPathFinder):
    """The import system's finder for names ``horovod.X``, which it resolves to ``guozhuang.compat.horovod.X``."""

    def __init__(self, system: OtherSystem) -> None:
        self.system = system

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec that loads Guozhuang's module of that name; None if it is not this system's, or there is none.

        Raises:
            ModuleNotFoundError: the system has this module and Guozhuang does not; the text says so.
        """
        system = self.system
        if not fullname.startswith(f"{system.root}."):
            return None
        rest = fullname.removeprefix(f"{system.root}.")
        if any(rest == part or rest.startswith(f"{part}.") for part in system.missing):
            raise ModuleNotFoundError(f"{fullname} is not there: {system.why}", name=fullname)
        ours = importlib.util.find_spec(f"{system.target}.{rest}")
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
        if hasattr(module, "imported_as_theirs"):  # of a module of theirs that acts when it is imported
            module.imported_as_theirs()

    def is_package(self, fullname: str) -> bool:
        return self._ours.submodule_search_locations is not None

    def get_source(self, fullname: str) -> str | None:
        loader = self._ours.loader
        return loader.get_source(self._ours.name) if isinstance(loader, importlib.abc.InspectLoader) else None

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module, which ``python -m horovod.X`` runs."""
        loader = self._ours.loader
        return loader.get_code(self._ours.name) if isinstance(loader, importlib.abc.InspectLoader) else None
