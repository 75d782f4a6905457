"""DiLoCo: each rank makes inner steps alone; every H steps an outer step of Nesterov SGD applies the mean of their changes.

Formula, with n ranks, global weights g (equal on all), local weights w_r, momentum b = 0 at first, outer learning rate l and
momentum m: after steps H, 2 H, ...
    d = mean over r of (g - w_r);  b <- m b + d;  g <- g - l (d + m b);  w_r <- g.
With F fragments of the parameters, each makes an outer step every H steps, one fragment every H / F steps. With an overlap of T
steps, d is exchanged during T more inner steps, and then w_r <- a w_r + (1 - a) g, with a = ``mixing``; or, with
``keep_progress``, w_r <- w_r + (g - s_r), where s_r is w_r at the time d was sent, which keeps the changes of the T steps.
Error: with l = 1 and m = 0 it is local SGD. Otherwise it is another optimizer, whose outer step equals torch's
SGD(nesterov=True), bit for bit. A codec adds its error to d (twice, see ``compressed.py``). Sums, and g, are in float32 (in
float64 for float64 weights).
Memory: two copies of the weights, g and b (one if m = 0), and one of the fragment that is exchanged (two with
``keep_progress``); with a codec two more.
Traffic: an all-reduce of all weights in float32, or its code, every H steps; F fragments divide the bytes of a burst by F.
Source: DiLoCo, Douillard et al. 2023, arXiv:2311.08105; Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..errors import UsageError, explain
from ..gradients.buckets import Bucket
from ..groups.subgroups import end_together, twin
from ..watch.waits import waits
from ..weights.flat import FlatWeights, Named, as_real
from .allreduce import AllReduce
from .average import wide
from .base import GradientExchange, Work, check_saved
from .codecs.base import Codec
from .compressed import Compressed
from .fragments import FragmentPiece, cut
from .weight_lane import NotFinite, naming_peers, others
from .weights import WeightExchange


class _FlatPart:
    """The weights of a fragment that share a device and a dtype, as flat tensors.

    Attributes:
        bucket: holds the difference d during its exchange; its memory is released afterwards.
        weights: the pieces of this rank's weights.
        globals: the global weights g.
        momentum: the momentum b of the outer steps; None if there is none.
        own: this rank's own difference, kept during its exchange with ``keep_progress``; else None.
    """

    own: Tensor | None = None

    def __init__(self, index: int, pieces: list[FragmentPiece], with_momentum: bool) -> None:
        first = pieces[0].weights
        self._pieces, self._dtype = pieces, first.dtype
        like = torch.empty((), dtype=wide(first.dtype), device=first.device)
        names, shapes = [p.name for p in pieces], [like.expand(p.weights.shape) for p in pieces]
        self.bucket = Bucket(index, False, names, shapes)
        self.weights = FlatWeights([(p.name, p.weights) for p in pieces], like.dtype)
        [self.globals] = self.weights.copy()
        self.momentum = torch.zeros_like(self.globals) if with_momentum else None
        self.not_finite = NotFinite()

    def release(self) -> None:
        """Release the bucket's memory."""
        self.own = None
        if not self.bucket.can_be_freed:  # a codec has looked at it through numpy
            self.bucket.renew()
        self.bucket.free()

    def start(self) -> Tensor:
        """Return the weights from which inner steps start: the global weights, rounded to the dtype of this rank's weights."""
        same = self._dtype == self.globals.dtype
        return self.globals if same else self.globals.to(self._dtype).to(self.globals.dtype)

    def saved(self, flat: Tensor, into: dict[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
        """Copy a flat tensor of this part into ``into``, tensors of whole parameters by name; allocate missing ones there."""
        [views] = self.weights.views([flat])
        for piece, view in zip(self._pieces, views, strict=True):
            if piece.parameter not in into:
                into[piece.parameter] = flat.new_empty(shapes[piece.parameter])
            piece.of(into[piece.parameter]).copy_(view)

    def load(self, flat: Tensor, values: Mapping[str, Tensor]) -> None:
        """Fill a flat tensor with this part of ``values``, tensors of whole parameters by name."""
        [views] = self.weights.views([flat])
        for piece, view in zip(self._pieces, views, strict=True):
            view.copy_(piece.of(values[piece.parameter]))


@dataclass
class _Fragment:
    """A fragment of the model: the weights that are exchanged together in one turn.

    Attributes:
        parts: the weights by device and dtype.
        sent_step: the step after which the fragment was last sent.
        works: the works of the running exchange, one per part; empty if none is running.
        settled: the number of inner steps after which all ranks last held equal weights.
    """

    parts: list[_FlatPart]
    sent_step: int = 0
    works: list[Work] = field(default_factory=list)
    settled: int = 0


@dataclass
class DiLoCoState:
    """The state of :class:`DiLoCo`.

    Attributes:
        group: the ranks.
        made: groups of the same ranks that were made for the exchange of differences.
        exchange: the exchange that averages differences.
        exchange_state: the state of that exchange.
        fragments: the fragments in the order of their turns.
        shapes: the shapes of all parameters, as real numbers.
        num_steps: how many inner steps were made.
        num_exchanges: how many differences of parts were sent; seeds the random bits of a codec.
    """

    group: dist.ProcessGroup
    made: list[dist.ProcessGroup]
    exchange: GradientExchange[Any]
    exchange_state: Any
    fragments: list[_Fragment]
    shapes: dict[str, torch.Size]
    num_steps: int = 0
    num_exchanges: int = 0


@dataclass(frozen=True)
class DiLoCo(WeightExchange[DiLoCoState]):
    """Exchanges weights rarely, optionally overlapped with training and coded; the inner optimizer is the one of the user.

    Args:
        every: inner steps from one outer step of a fragment to the next (H).
        outer_lr: learning rate of the outer steps.
        outer_momentum: momentum of the outer steps, from 0 to below 1.
        num_fragments: how many parts of the model take turns; at most ``every``.
        overlap_steps: inner steps that run during the exchange of a fragment; below ``every``. 0 waits for the exchange.
        codec: the code of differences, e.g. ``MinMax8()`` or ``Dithering(4)``; None sends float32.
        error_feedback: whether to add the error of the codec to the next difference.
        mixing: the share of a rank's own weights that stays when global ones arrive; None: 0.5 with overlap, else 0.
        keep_progress: whether to add the changes that a rank made during the exchange to the global weights, instead of mixing;
            needs an overlap.
        agree_by: how ranks get equal weights before evaluation and checkpoints, if inner steps were made since the last time:
            "mean" takes the mean of the weights and leaves the outer steps unchanged; "outer" makes the next outer step early.

    Raises:
        UsageError: a value is out of its range, or options contradict each other.
    """

    every: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    num_fragments: int = 1
    overlap_steps: int = 0
    codec: Codec | None = None
    error_feedback: bool = False
    mixing: float | None = None
    keep_progress: bool = False
    agree_by: Literal["mean", "outer"] = "mean"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(explain("every is a number of inner steps, at least 1", value=self.every))
        if not self.outer_lr > 0:
            raise UsageError(explain("outer_lr must be above 0", value=self.outer_lr, fix="the paper's is 0.7"))
        if not 0 <= self.outer_momentum < 1:
            raise UsageError(explain("outer_momentum lies from 0 to below 1", value=self.outer_momentum))
        if not 1 <= self.num_fragments <= self.every:
            what = f"num_fragments lies from 1 to every, {self.every}: at most one takes its turn in a step"
            raise UsageError(explain(what, value=self.num_fragments))
        if not 0 <= self.overlap_steps < self.every:
            what = f"overlap_steps lies from 0 to below every, {self.every}: a fragment arrives before it is sent again"
            raise UsageError(explain(what, value=self.overlap_steps))
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise UsageError(explain("codec is a Codec", value=self.codec, fix="e.g. MinMax8(), or None"))
        if self.error_feedback and self.codec is None:
            raise UsageError(explain("error_feedback is for a codec, and there is none", fix="give a codec"))
        if self.mixing is not None and not 0 <= self.mixing < 1:
            raise UsageError(explain("mixing lies from 0 to below 1", value=self.mixing))
        if self.keep_progress and (self.mixing is not None or self.overlap_steps == 0):
            what = "keep_progress needs steps in which a fragment travels, and takes the place of mixing"
            value = f"mixing={self.mixing}, overlap_steps={self.overlap_steps}"
            raise UsageError(
                explain(what, value=value, fix="set overlap_steps and leave mixing out, or leave keep_progress out")
            )
        if self.agree_by not in ("outer", "mean"):
            raise UsageError(explain("agree_by is 'outer' or 'mean'", value=self.agree_by))

    @property
    def _kept(self) -> float:
        return self.mixing if self.mixing is not None else 0.5 if self.overlap_steps else 0.0

    @property
    def _exchange(self) -> GradientExchange[Any]:
        return AllReduce() if self.codec is None else Compressed(self.codec, self.error_feedback)

    def prepare(self, parameters: Named, group: dist.ProcessGroup) -> DiLoCoState:
        """Copy the weights as the first global weights. Every rank must call, with equal weights."""
        real = [(name, p) for name, p in as_real(parameters) if p.numel()]
        fragments: list[_Fragment] = []
        buckets: list[Bucket] = []
        for pieces in cut(real, self.num_fragments):
            kinds = dict.fromkeys((p.weights.device, p.weights.dtype) for p in pieces)
            parts = []
            for kind in kinds:
                own = [p for p in pieces if (p.weights.device, p.weights.dtype) == kind]
                parts.append(_FlatPart(len(buckets), own, self.outer_momentum > 0))
                buckets.append(parts[-1].bucket)
            fragments.append(_Fragment(parts))
        exchange = self._exchange
        # In a group of their own, collectives that run during inner steps need no common order with those of the program.
        own_group = twin(group) if self.codec is None and group.size() > 1 else group
        exchange_state = exchange.prepare(buckets, own_group)
        for fragment in fragments:
            for part in fragment.parts:
                part.release()
        made = [] if own_group is group else [own_group]
        made += [lane.group for lane in getattr(exchange_state, "lanes", ())]
        return DiLoCoState(group, made, exchange, exchange_state, fragments, {name: p.shape for name, p in real})

    def after_step(self, state: DiLoCoState, step: int) -> None:
        """Finish exchanges that have run for ``overlap_steps`` steps; start the exchange of the fragment whose turn it is."""
        state.num_steps += 1
        for fragment in state.fragments:
            if fragment.works and step - fragment.sent_step >= self.overlap_steps:
                self._take_over(state, fragment, self._kept)
        for i, fragment in enumerate(state.fragments):
            turn = (i + 1) * self.every // self.num_fragments
            if (step + 1 - turn) % self.every == 0:
                self._send(state, fragment, step)
                if self.overlap_steps == 0:
                    self._take_over(state, fragment, self._kept)
                    if self._kept == 0:
                        fragment.settled = state.num_steps

    @torch.no_grad()
    def _send(self, state: DiLoCoState, fragment: _Fragment, step: int) -> None:
        fragment.sent_step = step
        for part in fragment.parts:
            part.bucket.hold()
            difference = part.bucket.flat
            part.weights.subtract_from([part.start()], out=[difference])
            part.not_finite.look(part.weights, [difference], step)
            part.own = difference.clone() if self.keep_progress else None
            exchange, size = state.exchange, state.group.size()
            work = exchange.scale_and_start(part.bucket, state.exchange_state, state.num_exchanges, size)
            fragment.works.append(work)
            state.num_exchanges += 1

    def _wait(self, state: DiLoCoState, fragment: _Fragment) -> None:
        works, fragment.works = fragment.works, []
        what = f"the outer step with the other ranks ({others(state.group)}) failed"
        with naming_peers(lambda: what, state.group):
            for work in works:
                waits.for_work(work)

    @torch.no_grad()
    def _take_over(self, state: DiLoCoState, fragment: _Fragment, kept: float) -> None:
        """Wait for the exchange of a fragment, make its outer step, and update this rank's weights from the result."""
        self._wait(state, fragment)
        for part in fragment.parts:
            change = part.bucket.flat
            if part.momentum is not None:
                part.momentum.mul_(self.outer_momentum).add_(change)
                change.add_(part.momentum, alpha=self.outer_momentum)
            own = part.own
            if own is not None and kept != 0:
                own -= part.start()  # ``own`` is now the negative of this rank's weights at the time of sending
            part.globals.add_(change, alpha=-self.outer_lr)
            if kept == 0:
                part.weights.write([part.globals])
            elif own is not None:
                part.weights.add([own.add_(part.globals)])
            else:
                part.weights.mix([part.globals], kept)
            part.release()

    @torch.no_grad()
    def _take_mean(self, state: DiLoCoState, fragment: _Fragment) -> None:
        """Wait for the exchange of a fragment, and set this rank's weights to the mean; the global weights stay unchanged."""
        self._wait(state, fragment)
        for part in fragment.parts:
            part.weights.write([torch.sub(part.start(), part.bucket.flat, out=part.bucket.flat)])
            part.release()

    def agree(self, state: DiLoCoState) -> None:
        """Finish running exchanges; make fragments that may differ between ranks equal, by ``agree_by``. Every rank must call.

        Afterwards all ranks hold equal weights: with "outer" the global weights, with "mean" the mean.
        """
        for fragment in state.fragments:
            if fragment.works:
                self._take_over(state, fragment, self._kept)
        apart = [fragment for fragment in state.fragments if fragment.settled < state.num_steps]
        for fragment in apart:
            self._send(state, fragment, state.num_steps - 1)
        for fragment in apart:
            if self.agree_by == "mean":
                self._take_mean(state, fragment)
            else:
                self._take_over(state, fragment, 0.0)
            fragment.settled = state.num_steps

    def end(self, state: DiLoCoState) -> None:
        """Wait for running exchanges without using their results, and end the groups that were made. Every rank must call."""
        for fragment in state.fragments:
            self._wait(state, fragment)
        end_together(state.made, state.group)
        self.close(state)

    @override
    def close(self, state: DiLoCoState) -> None:
        for fragment in state.fragments:
            fragment.works = []

    def state_dict(self, state: DiLoCoState) -> dict[str, Any]:
        """Return the global weights and the outer momentum by parameter, and the state of the coded exchange."""
        saved: dict[str, Any] = {"global": {}, "momentum": {}, "num_exchanges": state.num_exchanges}
        for fragment in state.fragments:
            for part in fragment.parts:
                part.saved(part.globals, saved["global"], state.shapes)
                if part.momentum is not None:
                    part.saved(part.momentum, saved["momentum"], state.shapes)
        saved["codec"] = state.exchange.state_dict(state.exchange_state)
        return saved

    @torch.no_grad()
    def load_state_dict(self, state: DiLoCoState, saved: Mapping[str, Any]) -> None:
        """Restore a saved state; it may be of a run with another number of fragments. Every rank must call.

        Raises:
            UsageError: the state was saved by another method, or for other parameters.
        """
        check_saved(saved, {"global", "momentum", "num_exchanges", "codec"}, "DiLoCo")
        for key in ("global", "momentum") if self.outer_momentum > 0 else ("global",):
            theirs = {name: value.shape for name, value in saved[key].items()}
            wrong = sorted(name for name in theirs.keys() | state.shapes if theirs.get(name) != state.shapes.get(name))
            if wrong:
                what = f"the checkpoint's {key} weights are of other parameters, or were saved without any"
                fix = "load it into the model and the settings that it was saved with"
                raise UsageError(explain(what, value=wrong[:5], rank=state.group.rank(), fix=fix))
        for fragment in state.fragments:
            fragment.works, fragment.settled = [], state.num_steps
            for part in fragment.parts:
                part.load(part.globals, saved["global"])
                if part.momentum is not None:
                    part.load(part.momentum, saved["momentum"])
        if saved["codec"]:
            state.exchange.load_state_dict(state.exchange_state, saved["codec"])
        state.num_exchanges = int(saved["num_exchanges"])

    def traffic(self, num_elements: int, element_bytes: int, world_size: int) -> float | None:
        """Return the bytes of one exchange of all fragments divided by ``every``; :meth:`agree` is not counted."""
        one = -(-num_elements // self.num_fragments)
        sent = self._exchange.traffic(one, max(4, element_bytes), world_size)
        return None if sent is None else self.num_fragments * sent / self.every
