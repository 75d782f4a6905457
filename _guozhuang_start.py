"""Where scripts that never import Guozhuang meet it: torch calls ``attach`` at the end of ``import torch``.

The entry point stands in the group "torch.backends", which torch loads unless TORCH_DEVICE_BACKEND_AUTOLOAD=0. This module lies
outside of the package, because importing a part of the package would import all of it into every program that uses torch.

[Note: stand-ins] What is replaced is a class of another library, which scripts may have imported by name already. So its name
is left alone and ``__new__`` makes an object of our subclass: ``isinstance`` holds, and Python then calls our ``__init__``.
Our subclass is looked up when the first object is made; by then all parts of the other library are there.

[Note: own stores] A launcher that keeps the store of its ranks sets TORCHELASTIC_USE_AGENT_STORE, and torch then takes every
store that a rank names by an address for that one: all ranks connect, none listens. Scripts for torch RPC choose an address of
their own (MASTER_ADDR and MASTER_PORT, or ``init_method="tcp://..."``), where they wait for each other for half an hour, which
is torch's time-out. ``guozhuang run`` notes the address of its own store in GUOZHUANG_RUN_STORE (``launch/rank.py``), and at
every other one rank 0 listens, as without a launcher. Between hosts MASTER_ADDR may be loopback, where a passage leads to the
launcher's store and to nothing else. A script that names MASTER_ADDR with a port of its own means rank 0's host, whose address
then stands in GUOZHUANG_FIRST_HOST. What a rank starts inherits these variables; the ranks of a launcher among it have an error
file of their own, which shows that the note is not about their store.

[Note: an import never fails here] This module runs in every program that imports torch, most of which have nothing to do with
Guozhuang. So a step that fails is said in the log, and the import goes on. Only a replacement of DDP, which the environment
asked for, raises.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from typing import Any

_REPLACE = "GUOZHUANG_REPLACE_DDP"
_HERE = {"localhost", "127.0.0.1", "::1"}
_ACCELERATE, _LIGHTNING, _SCRIPTS = (
    "guozhuang.compat.accelerate",
    "guozhuang.compat.lightning",
    "guozhuang.compat.drop_in",
)


def attach() -> None:
    """Look out for trainers that can be served, and name the backend "shm"; GUOZHUANG_REPLACE_DDP: serve plain DDP scripts."""
    if not any(isinstance(finder, _Lookout) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Lookout())
    import torch

    if not torch.distributed.is_available():
        return
    _attempt('name the backend "shm"', _register_backend, torch)
    _attempt("tell a script's own stores from the launcher's", _know_own_stores, "torch.distributed.rendezvous")
    if os.environ.get(_REPLACE, "0") not in ("", "0"):
        stand_in(torch.nn.parallel.DistributedDataParallel, f"{_SCRIPTS}:wrapper_for")
        _replace_function(torch.distributed.distributed_c10d, "init_process_group", f"{_SCRIPTS}:init_process_group")
        importlib.import_module("torch.optim.optimizer").register_optimizer_step_pre_hook(_look_at_first_step())


def _look_at_first_step() -> Callable[..., None]:
    """Return a hook of all optimizers, which looks at the first step of any of them whether ranks train together."""
    steps = iter((1,))

    def look(optimizer: Any, *_: object) -> None:
        if next(steps, None):
            _named(f"{_SCRIPTS}:at_first_step")(optimizer)

    return look


def _attempt(what: str, function: Callable[[Any], None], argument: Any) -> None:
    """Call a function; say in the log what could not be done if it raises. See [Note: an import never fails here]."""
    try:
        function(argument)
    except Exception as error:
        logging.getLogger("guozhuang").warning("guozhuang could not %s: %s: %s", what, type(error).__name__, error)


def _register_backend(torch: Any) -> None:
    backend = torch.distributed.Backend
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    finds_it_itself = version is not None and (int(version[1]), int(version[2])) >= (2, 14)  # by another entry point
    if "shm" not in backend.backend_list and not finds_it_itself:
        backend.register_backend("shm", _create_group, extended_api=True, devices=["cpu"])


def _create_group(told: Any, options: Any) -> Any:
    return _named("guozhuang.groups.backend:create")(told, options)


def _know_own_stores(module: str) -> None:
    """Let rank 0 keep each store that the launcher does not keep. See [Note: own stores]."""
    rendezvous: Any = importlib.import_module(module)
    create, uses_launchers = rendezvous._create_c10d_store, rendezvous._torchelastic_use_agent_store
    if hasattr(create, "__wrapped__"):
        return
    making = threading.local()

    @functools.wraps(create)
    def make(hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any) -> Any:
        making.is_own = is_own_store(hostname, port, os.environ)
        if making.is_own and rank != 0:
            hostname = host_of_own_store(hostname, port, world_size, os.environ)
        try:
            return create(hostname, port, rank, world_size, *args, **kwargs)
        finally:
            making.is_own = False

    rendezvous._create_c10d_store = make
    rendezvous._torchelastic_use_agent_store = lambda: not getattr(making, "is_own", False) and uses_launchers()


def is_own_store(host: str, port: int, environ: Mapping[str, str]) -> bool:
    """Return whether this is the address of a store of the script's, in a rank whose launcher keeps another one."""
    address, _, error_file = environ.get("GUOZHUANG_RUN_STORE", "").partition(" ")
    if not address or error_file != environ.get("TORCHELASTIC_ERROR_FILE", ""):
        return False
    kept_host, _, kept_port = address.rpartition(":")
    is_same_host = host.lower() == kept_host.lower() or {host.lower(), kept_host.lower()} <= _HERE
    return not (is_same_host and port == int(kept_port))


def host_of_own_store(host: str, port: int, size: int, environ: Mapping[str, str]) -> str:
    """Return the host on which a rank finds a store of the script's; for MASTER_ADDR of a run on several hosts the first host.

    Args:
        host, port: the address that the script gives.
        size: the number of ranks that meet there; if they fit on this host, loopback may be meant.
        environ: the environment of this rank.
    """
    kept_host = environ["GUOZHUANG_RUN_STORE"].partition(" ")[0].rpartition(":")[0]
    first, local_size = environ.get("GUOZHUANG_FIRST_HOST", kept_host), environ.get("LOCAL_WORLD_SIZE", "")
    if host.lower() not in _HERE or first in _HERE or not (local_size.isdecimal() and int(local_size) < size):
        return host
    if host == kept_host:
        return first
    logging.getLogger("guozhuang").warning(
        "guozhuang: rank %s looks for a store of %d ranks on its own host, which has %s ranks, at %s:%d. If the script's "
        "rank 0 is on the first host, give the script %s in place of %s",
        *(environ.get("RANK", "?"), size, local_size, host, port, first, host),
    )
    return host


def is_wanted() -> bool:
    """Return whether this program has anything to do with Guozhuang: it imports it, or the environment asks for it."""
    return "guozhuang" in sys.modules or bool(
        os.environ.get("GUOZHUANG_STRATEGY") or os.environ.get(_REPLACE, "0") not in ("", "0")
    )


def stand_in(theirs: type, ours: str) -> None:
    """Let a class make objects of the class that ``module:function`` returns for it. See [Note: stand-ins]."""
    if "__new__" in vars(theirs):
        return

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(_named(ours)(cls) if is_wanted() or kwargs.get("backend") == "shm" else cls)

    make.__wrapped__ = theirs.__init__  # type: ignore[attr-defined, misc]  # read by inspect.signature
    theirs.__new__ = make  # type: ignore[method-assign,assignment]


def _replace_function(module: Any, name: str, ours: str) -> None:
    """Let a function of a library, in all modules of it that know the function, be ``ours(theirs, ...)``."""
    theirs = getattr(module, name)

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _named(ours)(theirs, *args, **kwargs) if is_wanted() else theirs(*args, **kwargs)

    library = module.__name__.partition(".")[0] + "."
    for each in list(sys.modules.values()):
        if getattr(each, "__name__", "").startswith(library) and vars(each).get(name) is theirs:
            setattr(each, name, call)


def _named(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _register(registry: Any, package: str) -> None:
    """Make "guozhuang" a name in a registry of Lightning's strategies."""
    if "guozhuang" not in registry:
        make = functools.partial(_made, package)
        registry.register("guozhuang", make, description="Guozhuang, by the strategy of GUOZHUANG_STRATEGY or ddp")


def _made(package: str, **options: Any) -> Any:
    return _named(f"{_LIGHTNING}:strategy_class")(package)(**options)


def _allow_name(arguments: Any) -> None:
    """Let the command lines of scripts that take transformers' TrainingArguments have ``--ddp_backend shm``.

    Where a strategy is asked for they may go on saying ``ccl``, which transformers has dropped: the group is one of "shm" then.
    """
    choices = arguments.__dataclass_fields__["ddp_backend"].metadata.get("choices")
    if isinstance(choices, list):
        names = ("shm", "ccl") if os.environ.get("GUOZHUANG_STRATEGY") else ("shm",)
        choices += [name for name in names if name not in choices]


def _serve_launcher(found: Any) -> None:
    _replace_function(sys.modules[found.__module__], found.__name__, f"{_ACCELERATE}:launched")


# Modules of other libraries, an attribute that shows that the module has run, and what is done with its value then.
_WAITING: dict[tuple[str, str], Callable[[Any], None]] = {
    ("accelerate.state", "PartialState"): lambda found: stand_in(found, f"{_ACCELERATE}:state_class"),
    ("accelerate.utils.launch", "prepare_simple_launcher_cmd_env"): _serve_launcher,
    ("transformers.training_args", "TrainingArguments"): _allow_name,
    ("accelerate.accelerator", "Accelerator"): lambda found: stand_in(found, f"{_ACCELERATE}:accelerator_class"),
}
for _package in ("lightning.pytorch", "pytorch_lightning"):
    _WAITING[f"{_package}.strategies", "StrategyRegistry"] = functools.partial(_register, package=_package)
for _package in ("lightning.fabric", "lightning_fabric"):
    _WAITING[f"{_package}.strategies", "STRATEGY_REGISTRY"] = functools.partial(_register, package=_package)
_LIBRARIES = tuple({module.partition(".")[0] + "." for module, _ in _WAITING})


class _Lookout(MetaPathFinder):
    """Finds no module: whenever one of a known library is imported, it looks which of the awaited ones have run by now.

    Torch may be imported by the very module that is awaited, too late to be told of its end by a loader.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Return None, always."""
        if fullname.startswith(_LIBRARIES):
            for name, attribute in list(_WAITING):
                found = getattr(sys.modules.get(name), attribute, None)
                # Another thread that imports may have taken the function by now.
                if found is not None and (serve := _WAITING.pop((name, attribute), None)) is not None:
                    _attempt(f"serve {name}.{attribute}", serve, found)
