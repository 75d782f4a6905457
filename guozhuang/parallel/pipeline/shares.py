"""Which share the loss of a microbatch has in the loss of the batch, so that losses per microbatch train as one of the batch.

[Note: the share of a microbatch] The mean over a batch is not the mean of its microbatches' means where these count different
numbers of samples: labels that are ignored, masks, class weights. And a microbatch's backward begins before the outputs of the
later ones exist. What a loss counts is a matter of the targets, however, which are there from the start. So before the first
backward the loss is computed on made-up outputs for the whole batch, and on the same outputs cut into microbatches. They repeat
the outputs of the first microbatch, so that they are what the loss expects. If the gradient of the whole is, in the rows of
each microbatch, a number times the gradient of that microbatch alone, the number is its share. Shares that add up to 1 are
those of a mean, and shares that are all 1 those of a sum. In any other loss the samples of a batch depend on each other (as in
a contrastive loss), or the share depends on the outputs (a root of a mean; weights by confidence, which a second set of made-up
outputs shows in the first step): such a loss cannot be computed by microbatches, and is refused.

A loss that returns a sum and a count spares this: the counts are asked for with the same made-up outputs, one microbatch at a
time, and the gradient of each sum is divided by their total.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from ...errors import UsageError, explain

_MEANS_OF_ROWS: Final = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_FUNCTIONS_OF_ROWS: Final = (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)
_FIX: Final = "let the loss return its sum and its count, as two tensors; or use the schedule gpipe with your own loop"

#: Returns the loss from the model's outputs and the targets: a tensor of one element, or a sum and a count.
PartLoss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Shares:
    """The factors of the microbatches' losses.

    Attributes:
        factors: by microbatch; the loss of the batch is the sum of the microbatches' losses (or sums) times these.
        counts: by microbatch what the loss said that it counted; None for a loss that returns one tensor.
    """

    factors: tuple[float, ...]
    counts: tuple[float, ...] | None = None


def cut_rows(tree: Any, rows: slice, num_rows: int, what: str) -> Any:
    """Return some rows of all tensors of a tree; a tensor may have several elements of its first dimension for each row.

    Args:
        tree: tensors, or tuples, lists or dicts of them; tensors without dimensions stay whole.
        rows: which.
        num_rows: of the batch.
        what: the tree's name in errors.

    Raises:
        UsageError: the first dimension of a tensor is no multiple of the rows.
    """

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        each, rest = divmod(leaf.shape[0], num_rows)
        if rest or not each:
            text = f"a tensor of {what} has the shape {tuple(leaf.shape)}, and the batch {num_rows} rows"
            fix = f"give {what} with the samples along the first dimension, or use the schedule gpipe"
            raise UsageError(explain(text, value=leaf.shape[0], fix=fix))
        return leaf[rows.start * each : rows.stop * each]

    return pytree.tree_map(cut, tree)


def value_of(found: Any) -> tuple[Tensor, Tensor | None]:
    """Return what a loss function returned: a loss, or a sum and a count.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(found, Tensor) and found.numel() == 1:
        return found, None
    if isinstance(found, tuple | list) and len(found) == 2:
        total, count = found
        if isinstance(total, Tensor) and total.numel() == 1:
            return total, torch.as_tensor(count).detach()
    what = "the loss function must return a tensor of one element, or a sum and a count"
    raise UsageError(explain(what, value=type(found).__name__, fix="return the mean loss"))


def find_shares(
    loss: PartLoss, output: Any, targets: Any, rows: Sequence[slice], num_rows: int, *, twice: bool = False
) -> Shares:
    """Return the shares of a batch's microbatches. See [Note: the share of a microbatch].

    Args:
        loss: see :data:`PartLoss`.
        output: of the first microbatch.
        targets: of the whole batch.
        rows: the rows of each microbatch.
        num_rows: of the batch.
        twice: make sure, with other made-up outputs, that the shares do not depend on outputs.

    Raises:
        UsageError: the loss is not a sum or a mean over what it counts.
    """
    if len(rows) == 1:
        return Shares((1.0,))
    parts = [cut_rows(targets, each, num_rows, "the targets") for each in rows]
    if (counted := _known_counts(loss, parts, rows)) is not None:
        return Shares(tuple(count / sum(counted) for count in counted))
    leaves, spec = pytree.tree_flatten(output)
    length = rows[0].stop - rows[0].start
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        found = value_of(loss(_made_up(leaves, spec, length, rows[0])[0], parts[0]))
        if found[1] is not None:
            counts = [found[1]]
            for each, part in zip(rows[1:], parts[1:], strict=True):
                count = value_of(loss(_made_up(leaves, spec, length, each)[0], part))[1]
                assert count is not None, "the loss returned a count for another microbatch"
                counts.append(count)
            told = tuple(float(count) for count in counts)
            return Shares((1 / max(sum(told), torch.finfo(torch.float32).tiny),) * len(rows), told)
        shares = _shares_by_gradients(loss, leaves, spec, length, targets, parts, rows, num_rows)
        if twice:
            smaller = [x * 0.75 if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]
            others = [x.roll(1, 0) if isinstance(x, Tensor) and x.dim() else x for x in smaller]
            found_again = _shares_by_gradients(loss, others, spec, length, targets, parts, rows, num_rows)
            if any(abs(a - b) > 1e-2 * abs(a) + 1e-5 for a, b in zip(shares.factors, found_again.factors, strict=True)):
                what = "the share of a microbatch in the loss depends on the model's outputs"
                shown = f"{_listed(shares.factors)}, then {_listed(found_again.factors)}"
                raise UsageError(explain(what, value=shown, fix=_FIX))
        return shares


def _known_counts(loss: PartLoss, parts: Sequence[Any], rows: Sequence[slice]) -> list[float] | None:
    """Return what each microbatch counts for some of PyTorch's losses, which need not be asked; None for any other."""
    if loss in _FUNCTIONS_OF_ROWS or (type(loss) in _MEANS_OF_ROWS and getattr(loss, "reduction", "") == "mean"):
        return [float(each.stop - each.start) for each in rows]
    is_module = type(loss) is nn.CrossEntropyLoss and loss.reduction == "mean" and loss.weight is None
    if is_module or loss is functional.cross_entropy:
        ignored = loss.ignore_index if isinstance(loss, nn.CrossEntropyLoss) else -100
        if all(isinstance(part, Tensor) and not part.is_floating_point() for part in parts):
            counts = [float((part != ignored).sum()) for part in parts]
            return counts if sum(counts) else None
    return None


def _made_up(leaves: Sequence[Any], spec: Any, length: int, rows: slice) -> tuple[Any, list[Tensor]]:
    """Return outputs for some rows of the batch, made of those of the first microbatch, and their tensors with gradients."""
    found, watched = [], []
    for leaf in leaves:
        made = leaf
        if isinstance(leaf, Tensor):
            made = leaf.detach()
            each, rest = divmod(leaf.shape[0], length) if leaf.dim() else (0, 0)
            if each and not rest:
                places = torch.arange(rows.start, rows.stop, device=leaf.device) % length
                made = made.unflatten(0, (length, each))[places].flatten(0, 1)
            if leaf.requires_grad:
                watched.append(made.requires_grad_())
        found.append(made)
    return pytree.tree_unflatten(found, spec), watched


def _gradients(loss: PartLoss, outputs: Any, watched: Sequence[Tensor], targets: Any) -> tuple[float, list[Tensor]]:
    value, count = value_of(loss(outputs, targets))
    assert count is None, "the loss returned a count for some microbatches only"
    if not watched or not value.requires_grad:
        what = "the loss does not depend on tensors of the model's output that require a gradient"
        raise UsageError(explain(what, value=type(outputs).__name__, fix="return tensors, or tuples or dicts of them"))
    found = torch.autograd.grad(value, watched, allow_unused=True)
    return float(value.detach()), [torch.zeros_like(t) if g is None else g for t, g in zip(watched, found, strict=True)]


def _shares_by_gradients(
    loss: PartLoss,
    leaves: Sequence[Any],
    spec: Any,
    length: int,
    targets: Any,
    parts: Sequence[Any],
    rows: Sequence[slice],
    num_rows: int,
) -> Shares:
    value, whole = _gradients(loss, *_made_up(leaves, spec, length, slice(0, num_rows)), targets)
    if not all(bool(g.isfinite().all()) for g in whole):  # as one process would have it
        return Shares(tuple((each.stop - each.start) / num_rows for each in rows))
    tolerance = max(torch.finfo(g.dtype).eps ** 0.5 for g in whole)
    shares: list[float | None] = []
    sum_of_values = error = 0.0
    for each, part in zip(rows, parts, strict=True):
        its_value, own = _gradients(loss, *_made_up(leaves, spec, length, each), part)
        inside = [cut_rows(g, each, num_rows, "the output") if g.dim() else g for g in whole]
        share, its_error = _ratio(inside, own)
        shares.append(share)
        sum_of_values += share * its_value if share else 0.0
        error += its_error
    norm = sum(float(g.double().square().sum()) for g in whole)
    factors = _completed(shares, rows)
    is_mean, is_sum = abs(sum(factors) - 1) <= tolerance, all(abs(share - 1) <= tolerance for share in factors)
    differs = abs(value - sum_of_values) > tolerance * max(abs(value), abs(sum_of_values), 1e-30)
    if error > tolerance**2 * norm or not (is_mean or is_sum) or differs:
        what = "the loss of a batch is not a mean or a sum over its samples, so it cannot be computed by microbatches"
        shown = ", ".join(f"{share:.4g}" for share in factors)
        raise UsageError(
            explain(what, value=f"shares {shown} of a loss of {value:.6g}, off by {error**0.5:.2g}", fix=_FIX)
        )
    return Shares(factors)


def _listed(factors: Sequence[float]) -> str:
    return ", ".join(f"{factor:.4g}" for factor in factors)


def _ratio(inside: Sequence[Tensor], own: Sequence[Tensor]) -> tuple[float | None, float]:
    """Return by which number ``own`` has to be multiplied to give ``inside``, and the squared error; None if both are zero."""
    is_finite = all(bool(g.isfinite().all()) for g in own)
    if not any(bool(g.any()) for g in inside) and (not is_finite or not any(bool(g.any()) for g in own)):
        return (None if is_finite else 0.0), 0.0  # nothing here counts: the loss of these rows alone may be 0 / 0
    product = sum(float((a.double() * b.double()).sum()) for a, b in zip(inside, own, strict=True))
    square = sum(float(b.double().square().sum()) for b in own)
    share = product / square if square else 0.0
    return share, sum(float((a.double() - share * b.double()).square().sum()) for a, b in zip(inside, own, strict=True))


def _completed(shares: Sequence[float | None], rows: Sequence[slice]) -> tuple[float, ...]:
    """Give microbatches whose share does not show, because their gradients are zero, what is left of 1, by rows."""
    known = [share for share in shares if share is not None]
    if len(known) == len(shares):
        return tuple(known)
    if known and all(abs(share - 1) < 1e-6 for share in known) and len(known) > 1:
        return tuple(1.0 if share is None else share for share in shares)
    left = 1 - sum(known) if sum(known) < 1 - 1e-5 else 0.0
    unknown = sum(r.stop - r.start for r, share in zip(rows, shares, strict=True) if share is None)
    return tuple(left * (r.stop - r.start) / unknown if s is None else s for r, s in zip(rows, shares, strict=True))
