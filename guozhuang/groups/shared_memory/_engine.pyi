"""The C engine as a module. Its classes are declared as what making one returns; engine.py describes their methods."""

from typing import Final

import torch

from . import engine
from .program import Program

LAYOUT: Final[tuple[int, ...]]

def Engine(
    rank: int, size: int, controls: list[int], pidfds: list[int], pids: list[int], busy_us: float
) -> engine.Engine: ...
def Mail(
    rank: int,
    areas: list[int],
    sockets: list[int],
    message_bytes: int,
    payload_bytes: int,
    pids: list[int],
    busy_us: float,
) -> engine.Mail: ...
def Repeats(tensor_type: type, strided: torch.layout, rank: int, size: int) -> engine.Repeats: ...
def read_process(pid: int, dst: int, src: int, num_bytes: int, /) -> bool: ...
def copy(dst: int, src: int, num_bytes: int, /) -> None: ...
def work(program: Program, /) -> None: ...
