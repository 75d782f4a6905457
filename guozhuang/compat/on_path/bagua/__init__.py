"""The package that ``import`` of this name finds: it becomes Guozhuang's stand-in, or the real one if that is installed.

The folder ``on_path`` holds one such package, of this one text, for each system of ``guozhuang.compat.redirect``, and nothing
else; so putting it on the path affects no import but theirs.
"""

import importlib.machinery
import importlib.util
import os
import sys

_OURS = "from guozhuang.compat"  # copies of this file are recognized by this text in their source


def _is_ours(spec: importlib.machinery.ModuleSpec) -> bool:
    """Return whether an import spec belongs to this file or a copy of it; False if its source cannot be read."""
    if os.path.basename(os.path.dirname(os.path.dirname(spec.origin or ""))) in ("on_path", f"guozhuang_{__name__}"):
        return True
    try:
        return _OURS in (spec.loader.get_source(__name__) or "")  # type: ignore[union-attr]
    except Exception:
        return False


def _real() -> importlib.machinery.ModuleSpec | None:
    """Search the rest of ``sys.path`` and other finders for the real package; return its import spec, or None."""
    here = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))
    for entry in sys.path:
        if os.path.realpath(entry or os.curdir) == here:
            continue
        spec = importlib.machinery.PathFinder.find_spec(__name__, [entry])
        # A spec without a loader belongs to a folder of that name that holds no package.
        if spec is not None and spec.loader is not None and not _is_ours(spec):
            return spec
    for finder in sys.meta_path:  # such as those of packages installed in editable mode
        if finder is not importlib.machinery.PathFinder and hasattr(finder, "find_spec"):
            spec = finder.find_spec(__name__, None)
            if spec is not None and spec.loader is not None and not _is_ours(spec):
                return spec
    return None


_found = _real()
if _found is None:
    try:
        from guozhuang.compat import redirect
    except ModuleNotFoundError as error:
        if error.name != "guozhuang":
            raise
        raise ModuleNotFoundError(
            f"`import {__name__}` is to find Guozhuang (package guozhuang-{__name__}), which is not installed. "
            f"Fix: install Guozhuang, or pip uninstall guozhuang-{__name__}.",
            name=__name__,
        ) from error

    redirect.install(__name__)
else:
    print(
        f"guozhuang: {__name__} itself is installed ({_found.origin}), so `import {__name__}` is that one. To run on Guozhuang "
        f"instead, uninstall it: pip uninstall {__name__}",
        file=sys.stderr,
    )
    _module = importlib.util.module_from_spec(_found)
    sys.modules[__name__] = _module
    assert _found.loader is not None
    _found.loader.exec_module(_module)
