"""``guozhuang run``: start the ranks of a training script, on this node or on several hosts; ``agent`` is its entry point.

The package itself can be called: ``guozhuang.launch(function, nproc=2)`` is :func:`guozhuang.launch.functions.launch`.
"""

import importlib
import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **options: Any) -> list[Any]:
        from guozhuang.launch.functions import launch

        return launch(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle sends the modules of a package that a function mentions, and knows plain modules only
        return importlib.import_module, (self.__name__,)


launch = sys.modules[__name__]
launch.__class__ = _Callable
