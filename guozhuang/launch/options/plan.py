"""Check the options of ``guozhuang run``, which are torchrun's options and our own; fill in defaults."""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from guozhuang.errors import UsageError, explain
from guozhuang.launch.job import Policy
from guozhuang.launch.options import effects, nodes, plan_file, script
from guozhuang.launch.options import torchrun as torchrun_options
from guozhuang.launch.options.torchrun import RENDEZVOUS_DEFAULTS
from guozhuang.net import interfaces
from guozhuang.world.identity import LaunchedNode
from guozhuang.world.requests import (
    CHECKPOINT_EVERY,
    CHECKPOINT_KEEP,
    checkpoint_interval,
    hang_timeout,
    requested_secret,
)
from guozhuang.world.threads.settle import available_cores


@dataclass(frozen=True)
class Plan:
    """The checked options of a run on one node.

    Attributes:
        elastic: torchrun's options, as parsed.
        num_local_ranks: how many ranks this node gets.
        variables: environment variables of all ranks, in addition to those that give a rank its place in the world.
        timeline: file for the timeline of all ranks; None without one.
        log_folder: folder where each rank writes a log file; None: the output is shown.
        pass_local_rank: the option that passes the local rank to the script ("--local-rank"); None: it is not passed.
        secret: the secret that joining the store needs (GUOZHUANG_SECRET, as bytes); None without one.
        notes: messages to print before the ranks start.
        node: this node, if srun or mpirun started an agent per node and no rendezvous options are given; else None.
        num_servers: number of parameter servers to start beside the ranks of this node.
        copy_folder: folder for copies of the output of each rank; None: no copies.
        timestamps: whether to put the time before each line that is shown.
        policy: whether a failure restarts all ranks or only the failed one.
        is_warm: whether ranks that are started again may be forked from a warm parent.
        is_torchruns: whether the rendezvous is one of torchrun's own, so that torch elastic's agent starts the ranks.
        chosen: defaults that were chosen, with their reasons, for the log.
    """

    elastic: argparse.Namespace
    num_local_ranks: int
    variables: Mapping[str, str]
    timeline: str | None
    chosen: Sequence[str]
    log_folder: str | None = None
    pass_local_rank: str | None = None
    secret: bytes | None = None
    notes: Sequence[str] = ()
    node: LaunchedNode | None = None
    num_servers: int = 0
    copy_folder: str | None = None
    timestamps: bool = False
    policy: Policy = Policy.RESTART_ALL
    is_warm: bool = True
    is_torchruns: bool = False


def plan(found: argparse.Namespace, environ: Mapping[str, str]) -> Plan:
    """Check the options of this node as far as possible before any process is started, and fill in defaults.

    Args:
        found: the parsed command line, which is changed.
        environ: the environment that the ranks would get.

    Raises:
        UsageError: the script does not exist, a strategy or backend is unknown, a strategy cannot run on so many ranks or
            groups, a number of ranks or groups makes no sense, or an option of torchrun cannot work.
        WorldError: no network leads to the address of the other nodes.
    """
    chosen: list[str] = []
    effects.take_variables(found, environ)
    script.check(found, environ)
    if found.training_script.startswith("-") and not (found.module or found.no_python):
        # Python would take a script whose name begins with "-" for an option.
        found.training_script = os.path.join(os.curdir, found.training_script)
    found.nproc_per_node = found.nproc_per_node if found.num_ranks is None else found.num_ranks
    if found.nproc_per_node is None:
        found.nproc_per_node, why = _default_ranks()
        chosen.append(f"{found.nproc_per_node} ranks per node ({why})")
    num_local_ranks = _num_local_ranks(found.nproc_per_node)
    found.nproc_per_node = str(num_local_ranks)
    names_nodes = _names_nodes(found)
    node = None if names_nodes else nodes.of_this_agent(environ)
    if node is not None:
        found.nnodes, found.node_rank, found.rdzv_id = str(node.num_nodes), node.node_rank, "step"
        chosen.append(f"node {node.node_rank} of {node.num_nodes}, as the launcher of this agent says")
    found.master_addr = found.master_addr or "127.0.0.1"
    least_nodes, most_nodes = torchrun_options.settle_nodes(found)
    plan_file.check_nodes(found, least_nodes, most_nodes)
    torchrun_options.check(found, environ, num_local_ranks, most_nodes)
    is_torchruns = torchrun_options.is_torchruns(found, most_nodes)
    effects.check(found, num_local_ranks, most_nodes, is_torchruns)
    _check_servers(found.servers, least_nodes, most_nodes, found.rdzv_backend if is_torchruns else "")
    if found.standalone or (not names_nodes and most_nodes == 1):
        found.standalone, found.rdzv_backend, found.rdzv_endpoint, found.master_port = True, "static", "", None
        found.rdzv_id = secrets.token_hex(8)
        # Torch's default is the host name, which need not resolve; no other node has to reach this one.
        found.local_addr = found.local_addr or "localhost"
    variables: dict[str, str] = {}
    num_cores = available_cores(environ)
    if found.threads_per_rank is not None:
        if found.threads_per_rank < 1:
            what = "--threads-per-rank is a count of threads, at least 1"
            raise UsageError(explain(what, value=found.threads_per_rank, fix="give 1 or more"))
        variables["OMP_NUM_THREADS"] = str(found.threads_per_rank)
        chosen.append(f"OMP_NUM_THREADS={found.threads_per_rank} (--threads-per-rank)")
    elif "OMP_NUM_THREADS" not in environ:
        num_threads = max(1, num_cores // num_local_ranks)
        variables["OMP_NUM_THREADS"] = str(num_threads)
        chosen.append(f"OMP_NUM_THREADS={num_threads} ({num_cores} cores / {num_local_ranks} ranks)")
    if found.bind is not None:
        variables["GUOZHUANG_BIND"] = found.bind
    if found.strategy is not None:
        _check_strategy(found.strategy, num_local_ranks, most_nodes)
        variables["GUOZHUANG_STRATEGY"] = found.strategy
    variables |= _layout(found, num_local_ranks, least_nodes, most_nodes)
    if found.replace_ddp:
        _check_replacement(found.strategy, environ)
        variables["GUOZHUANG_REPLACE_DDP"] = "1"
    if found.backend is not None:
        _check_backend(found.backend)
        variables["GUOZHUANG_BACKEND"] = found.backend
    if found.batch_by is not None:
        variables["GUOZHUANG_BATCH_BY"] = found.batch_by
    if found.groups is not None:
        _check_groups(found.groups, found.strategy)
        variables["GUOZHUANG_GROUPS"] = str(found.groups)
    if found.bucket_cap_mb is not None:
        _check_bucket_cap(found.bucket_cap_mb, found.strategy, found.replace_ddp)
        variables["GUOZHUANG_BUCKET_CAP_MB"] = f"{found.bucket_cap_mb:g}"
    timeline = None
    if found.timeline is not None:
        timeline = os.path.abspath(found.timeline)
        if not os.path.isdir(os.path.dirname(timeline)) or os.path.isdir(timeline):
            what = "the timeline cannot be written: its folder does not exist, or the name is a folder"
            raise UsageError(explain(what, value=found.timeline, fix="give --timeline the path of a file"))
        variables["GUOZHUANG_TIMELINE"] = timeline
    variables |= _checkpoint(found)
    if found.hang_timeout is not None:
        seconds = hang_timeout(found.hang_timeout)
        variables["GUOZHUANG_HANG_TIMEOUT"] = seconds if seconds == "off" else f"{seconds:g}"
    if found.slow_rank is not None:
        variables["GUOZHUANG_SLOW_RANK"] = found.slow_rank
    if found.stop_on_nan:
        variables["GUOZHUANG_STOP_ON_NAN"] = "1"
    if found.by_variables and found.pass_local_rank is not None:
        what = "--use-env and --pass-local-rank exclude each other"
        raise UsageError(explain(what, fix="leave out --use-env if the script reads an option"))
    option = None if found.pass_local_rank is None else f"--{found.pass_local_rank}"
    notes = _warming_up(found.strategy) if found.strategy is not None and found.node_rank == 0 else []
    if num_local_ranks > num_cores:
        notes.append(f"{num_local_ranks} ranks share {num_cores} cores of this node")
    log_folder = _log_folder(found)
    if log_folder is not None:
        notes.append(f"the output of each rank goes to {os.path.join(log_folder, 'rank0.log')} and so on")
    if most_nodes > 1:
        variables |= _interface(found, environ, node)
    elif found.interface is not None:
        variables |= interfaces.variables_towards("", environ, found.interface)
    else:
        variables |= interfaces.variables_of_ranks(None, environ)  # loopback, so that no other machine can connect
    policy = Policy(found.on_failure)
    if policy is Policy.KEEP_SURVIVORS and found.max_restarts == 0:
        what = "--on-failure keep-survivors says what is restarted, and no restart is allowed"
        raise UsageError(explain(what, fix="give --max-restarts N, at least 1"))
    if is_torchruns and policy is not Policy.RESTART_ALL:
        what = "--on-failure keep-survivors is for nodes whose number is fixed: torch elastic restarts all ranks"
        raise UsageError(explain(what, value=found.rdzv_backend, fix="leave it out, or --rdzv-backend"))
    return Plan(
        elastic=found,
        num_local_ranks=num_local_ranks,
        variables=variables,
        timeline=timeline,
        chosen=chosen,
        log_folder=log_folder,
        pass_local_rank=option,
        secret=requested_secret(environ) or None,
        notes=notes,
        node=node,
        num_servers=found.servers or 0,
        copy_folder=_copy_folder(found),
        timestamps=found.timestamps,
        policy=policy,
        is_warm=not found.no_warm,
        is_torchruns=is_torchruns,
    )


def _interface(found: argparse.Namespace, environ: Mapping[str, str], node: LaunchedNode | None) -> dict[str, str]:
    """Return the variables that give gloo and NCCL the network interface to the other nodes."""
    if node is not None and node.meeting_point is not None:
        own = interfaces.own_address(node.meeting_point.hosts, node.meeting_point.others)
        ours = interfaces.holding(own)
        asked = found.interface
        if asked is not None:
            ours = interfaces.named(asked)
        return {} if ours is None else interfaces.variables(ours, environ, override=asked is not None)

    endpoint = found.rdzv_endpoint.rpartition(":")[0] or found.rdzv_endpoint
    asked = found.interface
    host = endpoint.strip("[]") or found.master_addr.strip("[]")
    # Nodes that meet on loopback are on one machine or use a tunnel: then only the user can know the interface.
    if asked is None and host in ("localhost", "127.0.0.1", "::1"):
        return {}
    return interfaces.variables_towards(host, environ, asked)


def _checkpoint(found: argparse.Namespace) -> dict[str, str]:
    """Check the options of checkpoints, and return the variables that tell the ranks of them."""
    if found.checkpoint is None:
        given = [option for option, value in (("--every", found.every), ("--keep", found.keep)) if value is not None]
        if given:
            what = f"{given[0]} is about checkpoints, and none are asked for"
            raise UsageError(explain(what, fix="give --checkpoint DIR too"))
        return {}
    if found.keep is not None and found.keep < 1:
        raise UsageError(
            explain("--keep is a count of checkpoints, at least 1", value=found.keep, fix="give 1 or more")
        )
    every = found.every or CHECKPOINT_EVERY
    checkpoint_interval(every)
    return {
        "GUOZHUANG_CHECKPOINT": os.path.abspath(found.checkpoint),
        "GUOZHUANG_CHECKPOINT_EVERY": every,
        "GUOZHUANG_CHECKPOINT_KEEP": str(found.keep or CHECKPOINT_KEEP),
    }


def _log_folder(found: argparse.Namespace) -> str | None:
    """Return the folder for a log file per rank; None without one, or if options ask for torchrun's own logs."""
    if found.log_dir is None or torchrun_options.keeps_torchs_logs(found):
        return None
    return _folder("--log-dir", found.log_dir, "logs")


def _copy_folder(found: argparse.Namespace) -> str | None:
    """Return the folder for copies of the output of ranks; None without one."""
    if found.timestamps and (found.log_dir is not None or torchrun_options.keeps_torchs_logs(found)):
        what = "--timestamps stand before lines that are shown, and here the output goes into files"
        raise UsageError(explain(what, fix="leave out --timestamps, or --log-dir, --redirects and --tee"))
    if found.copy_output is None:
        return None
    if found.log_dir is not None or torchrun_options.keeps_torchs_logs(found):
        what = "--copy-output copies what is shown; with --log-dir, --redirects or --tee it goes into files"
        raise UsageError(explain(what, fix="leave one of them out"))
    return _folder("--copy-output", found.copy_output, "copies")


def _folder(option: str, name: str, what: str) -> str:
    """Create the folder that an option names, if necessary, and return its absolute path."""
    folder = os.path.abspath(name)
    fix = f"give {option} another folder"
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        what = f"the folder for {what} cannot be made: {error.strerror}"
        raise UsageError(explain(what, value=name, fix=fix)) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(explain(f"the folder for {what} cannot be written to", value=name, fix=fix))
    return folder


def num_ranks(asked: object, environ: Mapping[str, str]) -> int:
    """Return how many ranks a run of this node alone has.

    Args:
        asked: a count, or "cpu", "gpu" or "auto"; None: that of PET_NPROC_PER_NODE, else the default.
        environ: the environment.

    Raises:
        UsageError: it is no such word and no count.
    """
    if asked is None:
        asked = environ.get("PET_NPROC_PER_NODE") or _default_ranks()[0]
    return _num_local_ranks(str(asked))


def _default_ranks() -> tuple[str, str]:
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.device_count()), "one per CUDA device"
    return "1", "no CUDA device; -np N starts more"


def _num_local_ranks(text: str) -> int:
    from torch.distributed.run import determine_local_world_size

    fix = "give a number of ranks, or one of cpu, gpu, auto"
    try:
        number = int(determine_local_world_size(text))
    except ValueError as error:
        raise UsageError(explain(f"--nproc-per-node cannot be used: {error}", value=text, fix=fix)) from error
    if number < 1:
        raise UsageError(explain("--nproc-per-node must be at least 1", value=text, fix=fix))
    return number


def _names_nodes(found: argparse.Namespace) -> bool:
    """Return whether any option on the number of nodes or their rendezvous is set."""
    return any(getattr(found, name) != default for name, default in RENDEZVOUS_DEFAULTS.items())


def _check_strategy(name: str, num_local_ranks: int, most_nodes: int) -> None:
    from guozhuang import strategies

    strategy = strategies.get(name)
    if strategy.one_process and num_local_ranks * most_nodes > 1:
        what = f"strategy {name!r} runs in one process, but more than one rank was asked for"
        raise UsageError(explain(what, value=f"{num_local_ranks} per node, {most_nodes} nodes", fix="give -np 1"))


def _layout(found: argparse.Namespace, num_local_ranks: int, least_nodes: int, most_nodes: int) -> dict[str, str]:
    """Check the options on how a model is divided, and return the variables that tell the ranks of them."""
    from guozhuang.parallel.prepare import ATTENTION, SCHEDULES
    from guozhuang.world.layout import OWN_AXIS, Layout

    if found.microbatches is not None and found.microbatches < 1:
        what = "--microbatches is a count of parts of a batch, at least 1"
        raise UsageError(explain(what, value=found.microbatches, fix="give 1 or more"))
    if found.schedule is not None and found.schedule not in SCHEDULES:
        what = "--schedule is the order in which a pipeline works"
        raise UsageError(explain(what, value=found.schedule, fix=f"choose one of {', '.join(SCHEDULES)}"))
    if found.attention is not None and found.attention not in ATTENTION:
        what = "--attention is the way in which attention is divided with the sequences"
        raise UsageError(explain(what, value=found.attention, fix=f"choose one of {', '.join(ATTENTION)}"))
    divides = found.layout is not None or found.strategy in OWN_AXIS  # a script may give hybrid its layout
    if divides and least_nodes == most_nodes:
        Layout.parse(found.layout, found.strategy or "", num_local_ranks * most_nodes)
    given = {"LAYOUT": found.layout, "MICROBATCHES": found.microbatches, "SCHEDULE": found.schedule}
    given["ATTENTION"] = found.attention
    given |= {"PROOF": 0 if found.no_proof else None, "AUDIT": found.audit}
    return {f"GUOZHUANG_{name}": str(value) for name, value in given.items() if value is not None}


def _warming_up(name: str) -> list[str]:
    from guozhuang import strategies

    num_steps = strategies.get(name).warmup_steps
    if not num_steps:
        return []
    return [f"{name} sends whole gradients in its first {num_steps} steps, so what it saves shows only after them"]


def _check_replacement(strategy: str | None, environ: Mapping[str, str]) -> None:
    """Check that ``--replace-ddp`` will have its effect: PyTorch must call us when a script imports it."""
    if strategy not in (None, "ddp"):
        what = (
            "--replace-ddp puts the strategy ddp into a script's DistributedDataParallel; others need the optimizer too"
        )
        raise UsageError(explain(what, value=strategy, fix="leave --strategy out, or call gz.prepare in the script"))
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        what = "--replace-ddp acts when torch is imported, and TORCH_DEVICE_BACKEND_AUTOLOAD switches that off"
        raise UsageError(explain(what, value=environ["TORCH_DEVICE_BACKEND_AUTOLOAD"], fix="unset that variable"))
    if not importlib.metadata.entry_points(group="torch.backends", name="guozhuang"):
        what = "--replace-ddp acts by an entry point, which this installation of guozhuang does not have"
        raise UsageError(explain(what, fix="install guozhuang anew with pip"))


def _check_backend(name: str) -> None:
    from guozhuang.world.devices import served_types

    served_types(name)


def _check_groups(number: int, strategy: str | None) -> None:
    from guozhuang import strategies

    if number < 1:
        raise UsageError(
            explain("--groups is a count of process groups, at least 1", value=number, fix="give 1 or more")
        )
    strategies.check_groups(strategies.get(strategy or strategies.DEFAULT), number)


def _check_bucket_cap(cap_mb: float, strategy: str | None, replaces_ddp: bool) -> None:
    from guozhuang import strategies

    if not 0 < cap_mb < math.inf:
        raise UsageError(explain("--bucket-cap-mb is a number of MiB above 0", value=cap_mb, fix="leave it out for 25"))
    if replaces_ddp:
        what = "--bucket-cap-mb is for gz.prepare, and under --replace-ddp the script wraps its model itself"
        raise UsageError(
            explain(what, value=cap_mb, fix="give bucket_cap_mb= to DistributedDataParallel in the script")
        )
    strategies.check_bucket_cap(strategies.get(strategy or strategies.DEFAULT), cap_mb)


def _check_servers(number: int | None, least_nodes: int, most_nodes: int, torchruns_way: str) -> None:
    if number and least_nodes != most_nodes:
        what = "--servers needs a fixed number of nodes: each starts its own, and the exchange counts on their number"
        fix = "give one number of nodes, or leave --servers out: the ranks then serve each other, each a share"
        raise UsageError(explain(what, value=f"--nnodes {least_nodes}:{most_nodes}", fix=fix))
    if number and torchruns_way:
        what = "--servers needs agents of ours, and nodes that meet this way have torch elastic's"
        fix = "leave --rdzv-backend out and give --node-rank and --master-addr, or -H"
        raise UsageError(explain(what, value=f"--rdzv-backend {torchruns_way}", fix=fix))
