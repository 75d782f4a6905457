"""What ranks that hold one copy of a model together tell each other in each call that all of them make: which call it is.

[Note: words of a call] A forward compares its inputs, and a norm of gradients is summed over the ranks. A rank that makes one
of these alone would wait for the others, which have gone on to their next call. So both begin with an all-gather of equally
many words in one group, whose last word says which call it is: whoever is in another one is told so at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from ..errors import MismatchError, explain, rank_table
from ..weights.points import points_of
from ..world.versions import all_gather_single

#: Of a forward: by whether the model is in training, and whether gradients are enabled.
MODES: Final = {
    (True, True): "training",
    (False, False): "evaluation",
    (True, False): "training without gradients",
    (False, True): "evaluation with gradients",
}
#: Of 8 bytes: what the call tells, and as the last one the number of its kind.
NUM_WORDS: Final = 17
#: The call that sums a norm.
NORM: Final = "clip_grad_norm_()"
_KINDS = [*MODES.values(), NORM]


def number_of(kind: str) -> int:
    """Return the last word of a call: one of the modes of a forward, or :data:`NORM`."""
    return _KINDS.index(kind)


def compare_calls(rows: Sequence[Sequence[int]], group: dist.ProcessGroup) -> None:
    """Raise, on every rank, unless all ranks of a group make the same call.

    Args:
        rows: the words of each rank.
        group: the ranks.

    Raises:
        MismatchError: with a table of ranks and calls.
    """
    kinds = [_KINDS[row[-1]] for row in rows]
    if len(set(kinds)) == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    if NORM in kinds:
        what = f"some of the ranks that hold one copy of the model together call {NORM}, and others have gone on"
        fix = f"call {NORM} on every rank, with model.parameters() or the same part of them, also where they have no gradients"
        where = [kind if kind == NORM else f"a forward of the model ({kind})" for kind in kinds]
        heading = "is in"
    else:
        what = "ranks that hold one copy of the model together call it in different modes, so some call it alone"
        fix = "call the model on every rank, in evaluation too: not inside `if rank == 0:`"
        where, heading = [f"in {kind}" for kind in kinds], "calls the model"
    table = rank_table(("rank", heading), list(zip(ranks, where, strict=True)))
    raise MismatchError(f"{explain(what, rank=dist.get_rank(), fix=fix)}\n{table}")


def tell_of_norm(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Tell all ranks of a group that this one sums a norm, and some numbers; return those of each rank. Each must call it.

    Raises:
        MismatchError: others are in another call.
    """
    words = [*numbers, *[0] * (NUM_WORDS - 1 - len(numbers)), number_of(NORM)]
    mine = torch.tensor(words, device=device)
    found = mine.new_empty(group.size() * NUM_WORDS)
    with points_of(group).inside(NORM):
        all_gather_single(found, mine, group=group)
        rows: list[list[int]] = found.view(group.size(), NUM_WORDS).tolist()
        compare_calls(rows, group)
    return [row[: len(numbers)] for row in rows]
