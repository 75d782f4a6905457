"""What differs between the versions of PyTorch: checked, and called by one name, here and nowhere else."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from guozhuang.errors import explain

# The first with everything that is used: stores over a socket of ours, process groups written in Python, their names.
OLDEST = (2, 11)


def require(part: str, oldest: tuple[int, int] = OLDEST, version: str = torch.__version__) -> None:
    """To be called when ``part`` is imported.

    Args:
        part: what needs it, for the error's text.
        oldest: the first version, major and minor, with which it works.
        version: of PyTorch, as it calls itself ("2.13.0+cpu").

    Raises:
        ImportError: this PyTorch is older, or is none that can be loaded with ``torch.distributed``.
    """
    wanted = ".".join(map(str, oldest))
    match = re.match(r"([0-9]+)\.([0-9]+)", version)
    if match is None or (int(match[1]), int(match[2])) < oldest:
        fix = f"pip install --upgrade 'torch>={wanted}', or an older release of guozhuang"
        raise ImportError(explain(f"{part} needs PyTorch {wanted} or later", value=version, fix=fix))
    if not dist.is_available():
        what = f"{part} needs torch.distributed, which this build of PyTorch {version} was made without"
        raise ImportError(explain(what, fix="install a build from pytorch.org or PyPI"))


def default_store() -> dist.Store:
    """The store of the default process group, however it was made. PyTorch has no public name for it."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


require("guozhuang.world")
