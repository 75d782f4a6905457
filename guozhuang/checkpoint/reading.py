"""Reads a checkpoint for one rank: all of it, or why it cannot be used, before anything of the training is touched."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from guozhuang.checkpoint.files import broken
from guozhuang.checkpoint.folder import manifest_of, parts_of, read_part
from guozhuang.checkpoint.schema import state_fault
from guozhuang.checkpoint.state import Flat, place
from guozhuang.errors import CheckpointError
from guozhuang.generators import check_states


class Read(NamedTuple):
    """What a rank restores.

    Attributes:
        shared: what all ranks share.
        own: what is this rank's own.
        first: what is rank 0's own.
        manifest: about the saved run.
    """

    shared: Any
    own: Any
    first: Any
    manifest: dict[str, Any]


def read(checkpoint: Path) -> tuple[Read | None, str]:
    """Read and verify what this rank restores, and on rank 0 all of the checkpoint; return it, or why it is not whole."""
    rank, _ = place()
    try:
        manifest = manifest_of(checkpoint)
        names = dict.fromkeys(("shared", "rank-0", f"rank-{rank % manifest['ranks']}"))
        parts = {name: read_part(checkpoint, manifest, name) for name in names}
        shared = Flat(parts["shared"][0]["tree"], parts["shared"][1]).state
        of_first = parts["rank-0"][1]
        states = {name: own_state(*part, of_first) for name, part in parts.items() if name != "shared"}
        others = [name for name in parts_of(manifest) if rank == 0 and name not in parts]
        looked_at = ((name, own_state(*read_part(checkpoint, manifest, name), of_first)) for name in others)
        for name, own in itertools.chain(states.items(), looked_at):  # one of the others at a time
            if found := state_fault(shared, own):
                return None, str(broken(checkpoint, f"in {name}, {found}"))
            check_states(own["generators"])
        if len(manifest["strategies"]) != len(shared["trained"]):
            return None, str(broken(checkpoint, "its manifest names strategies of another number of models"))
        return Read(shared, states[f"rank-{rank % manifest['ranks']}"], states["rank-0"], manifest), ""
    except CheckpointError as error:
        return None, str(error)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        return None, str(broken(checkpoint, f"its contents are not those of a checkpoint: {error!r}"))


def own_state(body: Any, tensors: dict[str, Tensor], of_first: dict[str, Tensor]) -> Any:
    """Return what is one rank's own, of which tensors that equal rank 0's are saved with that one."""
    return Flat(body["tree"], tensors | {key: of_first[theirs] for key, theirs in body["as_rank_0"].items()}).state
