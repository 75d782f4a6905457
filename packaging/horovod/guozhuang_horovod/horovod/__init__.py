"""The package that ``import horovod`` finds: it is guozhuang.compat.horovod, or the real Horovod where that is installed.

Nothing else lies in this folder, so that having it on the path changes nothing but what ``horovod`` is.
"""

import importlib.machinery
import importlib.util
import os
import sys

_OURS = "guozhuang.compat.horovod"  # this file has these words, by which its other copies are known


def _is_ours(spec: importlib.machinery.ModuleSpec) -> bool:
    """Whether it is this file, or another copy of it. What has no source, or cannot be read, is not ours."""
    if os.path.basename(os.path.dirname(os.path.dirname(spec.origin or ""))) in ("on_path", "guozhuang_horovod"):
        return True
    try:
        return _OURS in (spec.loader.get_source(__name__) or "")  # type: ignore[union-attr]
    except Exception:
        return False


def _real() -> importlib.machinery.ModuleSpec | None:
    """Where the real Horovod lies, on the rest of the path or wherever else Python looks; None if it is not installed."""
    here = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))
    for entry in sys.path:
        if os.path.realpath(entry or os.curdir) == here:
            continue
        spec = importlib.machinery.PathFinder.find_spec(__name__, [entry])
        # Without a loader it is a folder of that name, and no package.
        if spec is not None and spec.loader is not None and not _is_ours(spec):
            return spec
    for finder in sys.meta_path:  # of packages that were installed to be edited, among others
        if finder is not importlib.machinery.PathFinder and hasattr(finder, "find_spec"):
            spec = finder.find_spec(__name__, None)
            if spec is not None and spec.loader is not None and not _is_ours(spec):
                return spec
    return None


_found = _real()
if _found is None:
    try:
        from guozhuang.compat.horovod import redirect
    except ModuleNotFoundError as error:
        if error.name != "guozhuang":
            raise
        raise ModuleNotFoundError(
            f"`import {__name__}` is to find Guozhuang (package guozhuang-horovod), which is not installed. "
            "Fix: install Guozhuang, or pip uninstall guozhuang-horovod.",
            name=__name__,
        ) from error

    redirect.install()
else:
    print(
        f"guozhuang: Horovod itself is installed ({_found.origin}), so `import {__name__}` is that one. To run on Guozhuang "
        "instead, uninstall it: pip uninstall horovod",
        file=sys.stderr,
    )
    _module = importlib.util.module_from_spec(_found)
    sys.modules[__name__] = _module
    assert _found.loader is not None
    _found.loader.exec_module(_module)
