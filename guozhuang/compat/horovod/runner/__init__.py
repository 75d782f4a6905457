"""Starting processes: ``horovod.run`` for a function, ``horovodrun`` (launch.py) for a program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from guozhuang.errors import UsageError, explain

__all__ = ["run"]


class _Unsaid(int):
    """A number that the caller did not give."""


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
    """Call a function in new processes, which may use ``hvd.init()`` and all else, and wait for its results.

    Called by one process, which is none of them. The function, its arguments and what it returns go through cloudpickle.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its arguments by name.
        num_proc: how many processes; in an elastic run those that must be there at the begin, and if it is left out
            ``min_num_proc``.
        min_num_proc: makes the run elastic: how many processes must be left for it to go on.
        max_num_proc: elastic: how many there may be; None: as many as there are slots.
        slots: elastic: of each host, where nobody else says.
        reset_limit: elastic: how often the processes may change; None: any number of times.
        cooldown_range: elastic: least and most seconds for which a host that failed gets no further processes.
        hosts: "host1:2,host2:2", hosts and how many processes each can take; None: this one takes all.
        hostfile: the same in a file, a line "host1 slots=2" each.
        host_discovery_script: makes the run elastic: a program that prints a host a line.
        start_timeout: seconds for the hosts to be reached, and again to be ready; elastic: for a process to call ``hvd.init``.
        ssh_port: of the hosts.
        ssh_identity_file: private key for ssh.
        disable_cache: nothing is cached anyway.
        output_filename: a folder that gets rank.<rank>/stdout and stderr of each process too, on its host.
        verbose: say what is done.
        use_gloo: as it is anyway.
        use_mpi: changes nothing, and is said to.
        mpi_args: mean nothing here, and are said to.
        network_interface: deprecated: as ``network_interfaces``.
        network_interfaces: names of the network interfaces to use, in a list or with commas between; the first is used.
        executable: the Python of the processes; None: this one.
        np: deprecated: ``num_proc``.
        min_np: deprecated: ``min_num_proc``.
        max_np: deprecated: ``max_num_proc``.

    Returns:
        What the function returned in each process, in the order of ranks; in an elastic run of the first ``min_num_proc``.

    Raises:
        ValueError: arguments that exclude each other, or a number that makes no sense; nothing was started.
        RuntimeError: a process ended with anything but 0 (an exception of the function, for one). The others were ended.
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

    from guozhuang.compat.horovod.runner import function_run  # the launcher, which few scripts need

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
