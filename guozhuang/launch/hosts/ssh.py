"""Reach a host: build its ssh command, test whether it is this machine, select the environment variables to send to it."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from guozhuang.errors import UsageError, explain
from guozhuang.launch.request import NO_EXTENSION, Extension
from guozhuang.net import interfaces
from guozhuang.watch import processes

# The ssh client probes the host every ALIVE_S seconds, and drops the connection after ALIVE_COUNT unanswered probes.
ALIVE_S, ALIVE_COUNT = 4, 3
_RESOLVE_S = 10.0
_SSH_PORT = "22"

# Variables that are sent to every host by default (docs/hosts.md has the same list). Variables that name devices or addresses
# of this machine are not sent, nor those that a scheduler set for this process.
CARRIED = (
    "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LANG", "LANGUAGE", "TZ", "NO_COLOR",
    "CUDA_HOME", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
CARRIED_BEGINNINGS = (
    "PYTHON", "PYTORCH_", "TORCH", "PET_", "GUOZHUANG_", "GLOO_", "NCCL_", "OMP_", "MKL_", "KMP_", "GOMP_",
    "OPENBLAS_", "NUMEXPR_", "LC_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_",
)  # fmt: skip
LEFT = (
    "GUOZHUANG_SECRET", "GUOZHUANG_RUN", "PYTHONHOME", "TORCHELASTIC_",
)  # fmt: skip
# Variables that ``of_the_job`` leaves out: those that a login sets, and those that a launcher sets for one process.
_OF_A_LOGIN = {
    "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "TERM", "HOSTNAME", "MAIL", "DISPLAY", "TMPDIR",
    "COLUMNS", "LINES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
    "KRB5CCNAME",
}  # fmt: skip
_OF_ONE = (*LEFT, "SSH_", "XDG_", "DBUS_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "LSB_", "PBS_")
# Variables that hold lists of folders: on a host, its own folders are kept, after those of this machine.
LISTS = ("PATH", "LD_LIBRARY_PATH")

# Program that reads the supervisor's source from stdin up to a zero byte, and runs it; one line, which every shell can pass on.
_BOOTSTRAP = r'import os;exec(b"".join(iter(lambda:os.read(0,1)or os._exit(1),b"\0")))'


@dataclass(frozen=True)
class SshOptions:
    """The user's options for ssh: port, file of the key, configuration file; None: ssh's default."""

    port: int | None = None
    identity: str | None = None
    config: str | None = None

    def arguments(self) -> list[str]:
        """Return the options as arguments of the ssh client."""
        found = []
        for flag, value in (("-p", self.port), ("-i", self.identity), ("-F", self.config)):
            found += [] if value is None else [flag, str(value)]
        return found


def supervisor_source() -> bytes:
    """Return the supervisor's source, as it is sent to a host, with the zero byte that ends it."""
    program = Path(__file__).with_name("supervisor.py").read_bytes()
    return processes.preload(Path(processes.__file__).read_bytes(), program) + b"\0"


def local_command(token: str) -> list[str]:
    """Return the command that runs the supervisor on this machine, without ssh."""
    return [sys.executable, "-c", _BOOTSTRAP, token]


def command(host: str, options: SshOptions, timeout_s: float, token: str) -> list[str]:
    """Return the command that runs the supervisor on ``host`` over ssh.

    It contains no data of the run except the path of the interpreter: the rest is sent through stdin.

    Args:
        host: the host as the user wrote it, possibly with "user@".
        options: options of ssh.
        timeout_s: ssh's own limit for the connection, in seconds.
        token: the first line that the supervisor writes.
    """
    return client(host, options, timeout_s, " ".join(["exec", *map(shlex.quote, local_command(token))]))


def client(host: str, options: SshOptions, timeout_s: float, remote: str) -> list[str]:
    """Return the ssh command that runs the shell command ``remote`` on a host; for the other arguments see ``command``."""
    settings = {
        "BatchMode": "yes",  # ssh must fail rather than ask for a password
        "ConnectTimeout": str(max(1, round(timeout_s))),
        "ServerAliveInterval": str(ALIVE_S),
        "ServerAliveCountMax": str(ALIVE_COUNT),
        "RequestTTY": "no",
        "RemoteCommand": "none",
        "PermitLocalCommand": "no",
        "ForwardX11": "no",
        "ForwardAgent": "no",
        # An existing master connection is used, but none is opened: it would hold the client's stderr open after the run.
        "ControlMaster": "no",
        "ClearAllForwardings": "yes",  # the first host's client would occupy a forwarded port of ssh's config
    }
    chosen = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    return ["ssh", *chosen, *options.arguments(), "--", host, remote]


def check_installed() -> None:
    """Check that this machine has an ssh client.

    Raises:
        UsageError: the command ``ssh`` is not installed.
    """
    if shutil.which("ssh") is None:
        fix = "install it (Debian: apt install openssh-client), or leave -H out to run on this machine alone"
        raise UsageError(explain("-H starts hosts over ssh, and there is no command ssh on this machine", fix=fix))


def is_this_machine(host: str, options: SshOptions) -> bool:
    """Return whether ``host`` is this machine, so that no ssh is needed.

    It is not if ssh would use another port than 22, because that may lead to a container or a forwarded host.
    """
    user, _, name = host.rpartition("@")
    if user:
        return False
    target, port = _as_ssh_sees(name, options)
    if port != _SSH_PORT:
        return False
    own = socket.gethostname()
    if target in ("localhost", own):
        return True
    try:
        found = socket.getaddrinfo(target, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(interfaces.is_own(str(address[0])) for _, _, _, _, address in found)


def is_here(host: str) -> bool:
    """Return whether ``host`` is this machine, without regard to options of ssh: "localhost" always is."""
    return host == "localhost" or is_this_machine(host, SshOptions())


def _as_ssh_sees(name: str, options: SshOptions) -> tuple[str, str]:
    """Return (host name, port) to which ssh, by its configuration, would connect; the name unchanged if there is no ssh."""
    plain = str(options.port or _SSH_PORT)
    if shutil.which("ssh") is None:
        return name, plain
    asked = ["ssh", "-G", *options.arguments(), "--", name]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_RESOLVE_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return name, plain
    words = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    if words.get("proxyjump", "none") != "none" or words.get("proxycommand", "none") != "none":
        return words.get("hostname", name), "by a proxy"
    return words.get("hostname", name), words.get("port", plain)


def carried(environ: Mapping[str, str], extension: Extension = NO_EXTENSION) -> dict[str, str]:
    """Return the variables of this environment that are sent to every host."""
    beginnings = (*CARRIED_BEGINNINGS, *extension.carried)
    return {
        name: value
        for name, value in environ.items()
        if (name in CARRIED or name.startswith(beginnings))
        and not (name.startswith(LEFT) or name in extension.of_a_process)
    }


def asked_for(entries: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ``-x NAME`` and ``-x NAME=VALUE`` name.

    Raises:
        UsageError: a variable is not set here, or is no valid name.
    """
    found = {}
    for entry in entries:
        name, is_given, value = entry.partition("=")
        if not name or "\0" in entry:
            raise UsageError(explain("-x takes NAME or NAME=VALUE", value=entry, fix="give the name of a variable"))
        if not is_given and name not in environ:
            fix = f"export it, or give -x {name}=VALUE"
            raise UsageError(explain("-x names an environment variable that is not set here", value=name, fix=fix))
        found[name] = value if is_given else environ[name]
    return found


def of_the_job(environ: Mapping[str, str], extension: Extension = NO_EXTENSION) -> dict[str, str]:
    """Return the variables that a script may read besides those of ``carried``, for launchers that send a whole environment.

    Variables that ``carried`` selects, or that belong to a login or to one process, are left out.
    """
    taken = carried(environ, extension)
    own = _OF_A_LOGIN | set(extension.of_a_process)
    return {
        name: value
        for name, value in environ.items()
        if name.isidentifier() and name not in taken and name not in own and not name.startswith(_OF_ONE)
    }


def folder() -> str:
    """Return the working directory as $PWD names it: its symbolic links stay, which may lead elsewhere on another host."""
    here = os.getcwd()
    known = os.environ.get("PWD", "")
    return known if os.path.isabs(known) and os.path.isdir(known) and os.path.samefile(known, here) else here
