"""Start processes: ``horovod.run`` for a function, ``horovodrun`` (launch.py) for a program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from guozhuang.errors import UsageError, explain

__all__ = ["run"]


class _Unsaid(int):
    """The type of a default argument, to distinguish it from the same number passed by the caller."""


_ONE = _Unsaid(1)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = _ONE,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Iterable[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call a function in new processes, which may call ``hvd.init()``, and wait for its results.

    The calling process is not one of the ranks. The function, its arguments and its results are pickled with cloudpickle.

    Args:
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: the number of processes; in an elastic run the number needed to begin, by default ``min_num_proc``.
        min_num_proc: makes the run elastic: the smallest number of processes with which it continues.
        max_num_proc: elastic: the largest number of processes; None: one for each slot.
        slots: elastic: the slots of a host for which ``hosts``, the file or the script gives no number.
        reset_limit: elastic: how many times the set of processes may change; None: any number of times.
        cooldown_range: elastic: least and most seconds for which a host that failed gets no further processes.
        hosts: hosts and the number of processes that each can take, as "host1:2,host2:2"; None: all run on this host.
        hostfile: a file with the same, one host per line as "host1 slots=2".
        host_discovery_script: makes the run elastic: a program that prints one host per line.
        start_timeout: seconds for the hosts to be reached, and again to be ready; elastic: for a process to call ``hvd.init``.
        ssh_port: the port of ssh on the hosts.
        ssh_identity_file: a private key for ssh.
        disable_cache: has no effect: nothing is cached.
        output_filename: a folder that also gets the output of each process, in rank.<rank>/stdout and stderr, on its host.
        verbose: log each step of the launcher.
        use_gloo: has no effect: processes are always started without MPI.
        use_mpi: has no effect but a message that says so.
        mpi_args: has no effect but a message that says so.
        network_interface: deprecated name of ``network_interfaces``.
        network_interfaces: names of network interfaces, as a list or separated by commas; only the first is used.
        executable: the Python that runs the processes; None: the one of this process.
        np: deprecated name of ``num_proc``.
        min_np: deprecated name of ``min_num_proc``.
        max_np: deprecated name of ``max_num_proc``.

    Returns:
        The result of the function in each process, in rank order; in an elastic run those of the first ``min_num_proc`` ranks.

    Raises:
        ValueError: arguments that exclude each other, or a number that makes no sense; nothing was started.
        RuntimeError: a process ended with anything but 0, as after an exception of the function. The others were ended.
    """
    for name, value, new in (
        ("np", np, "num_proc"),
        ("min_np", min_np, "min_num_proc"),
        ("max_np", max_np, "max_num_proc"),
    ):
        if value is not None:
            warnings.warn(f"{name} is deprecated, use {new}", DeprecationWarning, stacklevel=2)
    if np is not None:
        if num_proc is not _ONE:
            raise UsageError(explain("np is the former name of num_proc, and both were given", value=(np, num_proc)))
        num_proc = np
    min_num_proc = min_np if min_num_proc is None else min_num_proc
    max_num_proc = max_np if max_num_proc is None else max_num_proc
    if not callable(func):
        raise UsageError(explain("horovod.run starts a function", value=func, fix="give what can be called"))
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, (dict, type(None))):
        what = "args is a tuple, and kwargs a dict or None"
        raise UsageError(explain(what, value=(args, kwargs), fix="write args=(x,) for one argument"))
    if hosts is not None and hostfile is not None:
        raise UsageError(explain("hosts and hostfile exclude each other", fix="leave one out"))
    if use_gloo and use_mpi:
        raise UsageError(explain("use_gloo and use_mpi exclude each other", fix="leave both out"))
    if min_num_proc is not None and num_proc is _ONE:
        num_proc = min_num_proc
    named = network_interface if network_interfaces is None else network_interfaces
    nics = named.split(",") if isinstance(named, str) else list(named or ())

    from guozhuang.compat.horovod.runner import function_run  # imported late: few scripts need the launcher

    return function_run.call(
        lambda: func(*args, **(kwargs or {})),
        executable,
        num_proc=num_proc,
        min_num_proc=min_num_proc,
        max_num_proc=max_num_proc,
        slots=slots,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        hosts=hosts,
        hostfile=hostfile,
        host_discovery_script=host_discovery_script,
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        disable_cache=bool(disable_cache),
        output_filename=output_filename,
        verbose=bool(verbose),
        use_gloo=bool(use_gloo),
        use_mpi=bool(use_mpi),
        mpi_args=mpi_args,
        nics=[name.strip() for name in nics if name.strip()] or None,
    )
