"""Check torchrun's options for mistakes that torch elastic would report late, with a traceback, or not at all."""

from __future__ import annotations

import argparse
import math
import shutil
import signal
from collections.abc import Mapping

from guozhuang.errors import UsageError, explain
from guozhuang.launch.options.unimported import definition

_NUM_PORTS = 65536
# Accepted settings of `--rdzv-conf`: for nodes that join and leave (_ELASTIC), and for a fixed number of nodes (_FIXED).
_SECONDS = ("timeout", "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout")
_COUNTS = ("keep_alive_interval", "keep_alive_max_attempt")
_ELASTIC = (*_SECONDS, *_COUNTS, "is_host", "store_type")
_FIXED = ("timeout", *_COUNTS)
_WORDS = {"is_host": "write true or false", "store_type": "write tcp or file"}
_CANNOT_BE_HANDLED = (signal.SIGKILL, signal.SIGSTOP)
# Torchrun's defaults of the rendezvous options, without PET_ variables: those are in the parser's own defaults, but count here
# as set by the user.
RENDEZVOUS_DEFAULTS = {
    "nnodes": "1:1", "node_rank": 0, "master_addr": None, "master_port": None, "rdzv_backend": "static",
    "rdzv_endpoint": "", "rdzv_id": "none", "rdzv_conf": "", "standalone": False,
}  # fmt: skip


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return torchrun's own parser, which takes its defaults from PET_ variables; torch is not imported for it.

    Raises:
        UsageError: a PET_ variable has a value that its option does not accept.
    """
    try:
        make = definition("torch.distributed.run", "get_args_parser")
    except (LookupError, SyntaxError):  # this version of torch has it elsewhere: import it, which takes a second
        from torch.distributed.run import get_args_parser as make

    try:
        made: argparse.ArgumentParser = make()
    except ValueError as error:
        wrong = [
            f"{name}={value!r}" for name, value in environ.items() if name[:4] == "PET_" and repr(value) in str(error)
        ]
        what = f"an option that is on or off is neither in the environment: {', '.join(wrong) or error}"
        raise UsageError(explain(what, fix="set the variable to 1 or 0, or unset it")) from error
    # Torch 2.11 has a number as the default port, by which two runs of one machine would collide; PET_MASTER_PORT gives a text.
    if isinstance(made.get_default("master_port"), int):
        made.set_defaults(master_port=RENDEZVOUS_DEFAULTS["master_port"])
    if not any(action.dest == "shutdown_timeout" for action in made._actions):  # since torch 2.12
        made.add_argument("--shutdown-timeout", "--shutdown_timeout", type=int, help="Seconds from SIGTERM to SIGKILL.")
    return made


def settle_nodes(found: argparse.Namespace) -> tuple[int, int]:
    """Return the least and the greatest number of nodes, and write both to ``found.nnodes``, as in "1:4".

    Raises:
        UsageError: ``--nnodes`` cannot be read, or does not fit the rendezvous backend.
    """
    fix = "give a number of nodes, or a least and a most one as in --nnodes 1:4"
    try:
        numbers = [int(text) for text in found.nnodes.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not 0 < numbers[0] <= numbers[-1]:
        raise UsageError(explain("--nnodes makes no sense", value=found.nnodes, fix=fix))
    least, most = numbers[0], numbers[-1]
    if found.standalone:
        if least > 1:
            what = "--standalone means this node alone, but --nnodes asks for more"
            raise UsageError(explain(what, value=found.nnodes, fix="leave one of them out"))
        most = 1
    if least != most and found.rdzv_backend == "static":
        what = "a number of nodes that may change needs a meeting point where nodes can come and go"
        fix = f"add --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or write --nnodes {most}"
        raise UsageError(explain(what, value=f"--nnodes {found.nnodes}", fix=fix))
    found.nnodes = f"{least}:{most}"
    return least, most


def is_torchruns(found: argparse.Namespace, most_nodes: int) -> bool:
    """Return whether the options need torchrun's own rendezvous, and so torch elastic's agents in place of ours."""
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    if found.rdzv_backend not in ("static", "c10d"):
        return True
    settings = _parse_rendezvous_config(found.rdzv_conf)
    return settings.get("store_type", "tcp") != "tcp" or (found.rdzv_backend == "c10d" and most_nodes > 1)


def keeps_torchs_logs(found: argparse.Namespace) -> bool:
    """Return whether options ask for torchrun's own logs (``--redirects``, ``--tee``, ``--logs-specs`` or filters)."""
    filters = found.duplicate_stdout_filters or found.duplicate_stderr_filters
    return bool(found.redirects != "0" or found.tee != "0" or found.logs_specs or filters)


def check(found: argparse.Namespace, environ: Mapping[str, str], num_local_ranks: int, most_nodes: int) -> None:
    """Check the options that `guozhuang run` shares with torchrun.

    Args:
        found: the options.
        environ: the environment that the ranks would get.
        num_local_ranks: number of ranks of this node.
        most_nodes: the greatest number of nodes.

    Raises:
        UsageError: an option cannot work, or would be ignored; the text names it.
    """
    signals_of(found.signals_to_handle)
    _check_port(found.master_port, most_nodes)
    _check_conf(found, most_nodes)
    _check_filter(found, num_local_ranks)
    _check_event_log_handler(found.event_log_handler)
    if found.local_addr is not None and most_nodes > 1 and found.rdzv_backend == "static":
        what = "--local-addr is of no use between a fixed number of nodes: all of them come to --master-addr"
        raise UsageError(explain(what, value=found.local_addr, fix="leave it out; --interface chooses the network"))
    _check_alone(found, environ, most_nodes)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if found.virtual_local_rank and visible is not None and len(visible.split(",")) < num_local_ranks:
        what = (
            f"--virtual-local-rank gives each of {num_local_ranks} ranks a device, but CUDA_VISIBLE_DEVICES names fewer"
        )
        raise UsageError(explain(what, value=visible, fix="start fewer ranks"))
    if found.numa_binding is not None:
        _check_numa(found.numa_binding, num_local_ranks)


def signals_of(names: str) -> list[signal.Signals]:
    """Return the signals that ``--signals-to-handle`` names, separated by commas.

    Raises:
        UsageError: a name is no signal, or one that no process can handle.
    """
    found = []
    for name in names.split(","):
        number = getattr(signal, name.strip(), None)
        if not isinstance(number, signal.Signals) or number in _CANNOT_BE_HANDLED:
            what = "--signals-to-handle names what is no signal, or one that nobody can handle"
            raise UsageError(explain(what, value=name.strip(), fix="write names like SIGTERM,SIGINT,SIGUSR1"))
        found.append(number)
    return found


def _check_alone(found: argparse.Namespace, environ: Mapping[str, str], most_nodes: int) -> None:
    """Check that no option says where the nodes of a run meet that has one; a PET_ variable may be there for other runs."""
    if most_nodes > 1:
        return
    alone = {"node_rank": "--node-rank tells several nodes apart"}
    if found.standalone:
        # The addresses and the id that take their place are new in each run.
        alone |= dict.fromkeys(("rdzv_endpoint", "master_port"), "says where nodes meet")
        alone |= {"rdzv_id": "tells several runs of one meeting point apart"}
    for name, about in alone.items():
        value, option = getattr(found, name), f"--{name.replace('_', '-')}"
        if value != RENDEZVOUS_DEFAULTS[name] and str(value) != environ.get(f"PET_{name.upper()}"):
            what = f"{about if about.startswith('--') else f'{option} {about}'}, and this run has one node"
            raise UsageError(explain(what, value=f"{option} {value}", fix="leave it out, or give --nnodes"))


def _check_port(port: int | None, most_nodes: int) -> None:
    least = 0 if most_nodes == 1 else 1  # 0 means any free port, which other nodes could not know
    if port is not None and not least <= port < _NUM_PORTS:
        fix = f"give {least or 1} to {_NUM_PORTS - 1}, or leave it out"
        raise UsageError(explain("--master-port is no TCP port that could be used", value=port, fix=fix))


def _check_conf(found: argparse.Namespace, most_nodes: int) -> None:
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    try:
        settings = _parse_rendezvous_config(found.rdzv_conf)
    except ValueError as error:
        raise UsageError(explain(f"--rdzv-conf: {error}", value=found.rdzv_conf, fix="write timeout=900")) from error
    if found.rdzv_backend not in ("static", "c10d"):
        return  # the backend is a third party's, whose settings are not known here
    known = _FIXED if found.rdzv_backend == "static" and most_nodes > 1 else _ELASTIC
    for name, value in settings.items():
        if name not in known:
            what = f"--rdzv-conf: {name!r} is no setting of --rdzv-backend {found.rdzv_backend}"
            raise UsageError(explain(what, value=f"{name}={value}", fix=f"choose from {', '.join(known)}"))
        if not _fits(name, value):
            fix = _WORDS.get(name, "give a whole number above 0, of seconds or of attempts")
            raise UsageError(explain(f"--rdzv-conf: {name} cannot be {value!r}", fix=fix))


def _fits(name: str, value: str) -> bool:
    if name == "is_host":
        return value.lower() in ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n")
    if name == "store_type":
        return value.lower() in ("tcp", "file")
    try:
        number = float(value) if name == "timeout" else int(value)
    except ValueError:
        return False
    return 0 < number < math.inf


def _check_filter(found: argparse.Namespace, num_local_ranks: int) -> None:
    text = found.local_ranks_filter
    if not text:
        return
    fix = f"name ranks of this node, from 0 to {num_local_ranks - 1}, as in --local-ranks-filter 0"
    try:
        ranks = [int(rank) for rank in text.split(",")]
    except ValueError as error:
        raise UsageError(explain("--local-ranks-filter cannot be read", value=text, fix=fix)) from error
    if not all(0 <= rank < num_local_ranks for rank in ranks):
        what = f"--local-ranks-filter names a rank that this node does not have: it has {num_local_ranks}"
        raise UsageError(explain(what, value=text, fix=fix))
    if found.log_dir is not None and not keeps_torchs_logs(found):
        what = "--local-ranks-filter says whose output is shown, but with --log-dir all of it goes into files"
        raise UsageError(explain(what, fix="leave one out; with --tee 3 torchrun's way of doing both is taken"))


def _check_event_log_handler(name: str) -> None:
    from torch.distributed.elastic.events import get_logging_handler

    try:
        get_logging_handler(name)
    except KeyError as error:
        what = "--event-log-handler names none that torch elastic knows"
        raise UsageError(explain(what, value=name, fix="choose null or console, or leave it out")) from error


def _check_numa(mode: str, num_local_ranks: int) -> None:
    import torch

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_local_ranks > num_devices:
        what = (
            f"--numa-binding puts each rank near its GPU, but {num_local_ranks} ranks have {num_devices} CUDA devices"
        )
        raise UsageError(explain(what, value=mode, fix="leave it out"))
    if shutil.which("numactl") is None:
        what = "--numa-binding needs the program numactl, which is not installed here"
        raise UsageError(explain(what, value=mode, fix="install the package numactl, or leave the option out"))
