"""Send parameters, the state of an optimizer, and objects from one rank to all, under BytePS's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from guozhuang.compat.horovod.torch import functions as sending
from guozhuang.errors import explain

from .session import here


def broadcast_parameters(
    params: Mapping[str, Tensor | None] | list[Tensor] | list[tuple[str | None, Tensor]],
    root_rank: int,
    prefix: str = "Parameter.",
) -> None:
    """Overwrite tensors with those of ``root_rank``. Every rank must call this with the same names, shapes and dtypes.

    Args:
        params: a dictionary (``model.state_dict()``), or a list of tensors or of (name, tensor). Tensors without a name are
            matched by their order.
        root_rank: the rank whose values all ranks get.
        prefix: what the names begin with.

    Raises:
        ValueError: not initialised; ``params`` is of another type, as the generator ``model.named_parameters()``; a name comes
            twice; a tensor cannot be sent; there is no such rank.
        HorovodInternalError: (a RuntimeError) ranks differ, or one is lost.
    """
    here()
    named: Any
    if isinstance(params, Mapping):
        named = {f"{prefix}{name}": each for name, each in params.items()}
    elif isinstance(params, list):
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
        named = [(f"{prefix}{i}" if name is None else f"{prefix}{name}", each) for i, (name, each) in enumerate(pairs)]
    else:
        fix = "give model.state_dict(), or list(model.named_parameters())"
        raise ValueError(explain(f"invalid params of type: {type(params)}", fix=fix))
    sending.broadcast_parameters(named, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, prefix: str = "Parameter.") -> None:
    """Replace state and options of an optimizer by those of root. Every rank must call this.

    State that a rank lacks is made there, without a step: weights stay as they are. State that root lacks is dropped. All ranks
    have the same parameters, in the same groups. Names of messages begin with ``prefix``.

    Raises:
        ValueError: not initialised; no optimizer, or LBFGS; the parameters of the ranks differ.
        HorovodInternalError: (a RuntimeError) a rank is lost.
    """
    here()
    sending.send_optimizer_state(optimizer, root_rank, f"{prefix}optimizer")


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return root's object, which cloudpickle must take, on every rank; root gets its own back. Every rank must call this.

    Without a name its messages are numbered, by the order of such calls.

    Raises:
        UsageError: the object cannot be pickled (on root; the other ranks get a ValueError).
        ValueError: not initialised.
        HorovodInternalError: (a RuntimeError) ranks differ, or one is lost.
    """
    here()
    return sending.broadcast_object(obj, root_rank, None if name is None else f"Parameter.{name}")
