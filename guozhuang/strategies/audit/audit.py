"""The audit of a step: what gradients are, compared with those of one process on the batches of all ranks.

[Note: the audit of a step] Data parallelism averages gradients over ranks, and so trains what one process would only if the
script's loss is a mean over equally many samples. Nothing in a forward tells that. So every N steps the step itself is
repeated by one process, which is the script: where ranks ask a loader for the first batch after a step, their batches are
joined on rank 0, which forks; in the copy the world has one rank, the model averages nothing, and the loader hands out joined
batches, as many as come before the optimizer steps. There the copy tells its gradients, and ends. See [Note: the reference
process] in parallel/proof/reference.py. Rank 0 compares with it what the step is about to use, clipping included.

Ranks draw random numbers of their own, so a step that draws some is not expected to be that of one process: there a difference
is logged and not raised.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import dataloader

from ...errors import UsageError
from ...generators import checksums
from ...parallel.proof import reference
from ...parallel.proof.noise import ReferencePair, fork_pair
from ...parallel.proof.reference import ReferenceReport, lack_of
from ...parallel.proof.undivided import UndividedForm
from .alone import AuditedPair, Spool, become_one_process, whole_values
from .batches import Remembered, attempted, collated, joined, num_ranks_of, samples_of
from .findings import common_factor, differences, explained, used_gradients

_log = logging.getLogger("guozhuang")
# Of a rank, before an optimizer steps: batches of all ranks are kept until then.
_MOST_BATCHES = 1_000
_NO_LOADER = (
    "ranks share no batches that can be joined: they are joined where gz.loader, or PyTorch's DataLoader with a "
    "DistributedSampler, hands them out"
)


class _Here(threading.local):
    """The audit of the models that this thread trains."""

    audit: Audit | None = None


_here = _Here()
_remembered = Remembered()


def audit_pair(
    strategy: str, every: int, module: nn.Module, model: nn.Module, optimizers: tuple[Any, ...], form: UndividedForm
) -> Audit:
    """Audit the steps of a model from now on, together with those of other models of this rank. Every rank must call it.

    All ranks share the data.

    Args:
        strategy: its name, for texts.
        every: an audit begins after so many steps of the first optimizer.
        module: the script's own.
        model: what stands for it.
        optimizers: what the script steps.
        form: what the module was before it was prepared.
    """
    group = dist.group.WORLD
    assert group is not None
    form.was_divided()
    if _here.audit is None or _here.audit.group is not group:
        _here.audit = Audit(group, every)
        _watch()
    _here.audit.add(strategy, AuditedPair(module, model, optimizers, form))
    return _here.audit


class Audit:
    """Audits the steps of the models that a rank trains. Every rank must make the same calls.

    Attributes:
        group: the ranks that share the data.

    Args:
        group: the ranks that share the data.
        every: an audit begins after so many steps.
    """

    def __init__(self, group: dist.ProcessGroup, every: int) -> None:
        self.group = group
        self._num_ranks = group.size()  # which the copy takes to be 1
        self._every, self._strategy = every, ""
        self._pairs: dict[int, AuditedPair] = {}
        self._audited: dict[int, AuditedPair] = {}  # while a step is audited: those that all ranks have
        self._counted: AuditedPair | None = None  # whose steps are counted
        self._num_pairs = self._last_stepped = 0
        self._num_steps, self._looked_at = 0, -1
        self._is_open, self._num_batches = False, 0
        self._references: ReferencePair | None = None
        self._spool: Spool | None = None
        self._take: Callable[[], Any] | None = None  # in the copy
        self._drawn_from: dict[str, str] = {}

    def add(self, strategy: str, pair: AuditedPair) -> None:
        """Audit the steps of a model too; steps are counted anew, as those of its first optimizer."""
        self._pairs = {i: each for i, each in self._pairs.items() if each.is_alive}
        self._num_pairs, self._strategy = self._num_pairs + 1, strategy
        self._pairs[self._num_pairs] = self._counted = pair
        self._num_steps, self._looked_at = 0, -1
        for optimizer in pair.optimizers:
            optimizer.register_step_pre_hook(self.before_step)
            optimizer.register_step_post_hook(self._after_step)

    def wants(self, iterator: Any) -> bool:
        """Return whether the batches of torch's iterator are of a step that is audited, or are to be the first of one."""
        counted = self._counted
        if not (self._is_open or self._is_due) or counted is None or not counted.is_alive:
            return False
        return counted.module.training and num_ranks_of(iterator) == self._num_ranks

    def batch(self, iterator: Any, indices: Any, batch: Any) -> Any:
        """Join the batches of all ranks for the process that trains alone; return the batch that the script gets here."""
        if self._take is not None:
            return batch
        self._num_batches = self._num_batches + 1 if self._is_open else 1
        if self._num_batches > _MOST_BATCHES:
            self._give_up(f"its optimizer has not stepped after {_MOST_BATCHES} batches")
            return batch
        lacks = "" if self._is_open else self._lacks()
        whole, why = self._joined(iterator, indices, batch, lacks)
        if why:
            self._give_up(why)
        elif self._is_open:
            if self._spool is not None:
                self._spool.put(whole)
        elif self._begin(whole):
            return whole  # in the copy
        return batch

    def take(self) -> Any:
        """In the copy: return the next joined batch."""
        assert self._take is not None
        return self._take()

    @property
    def _is_due(self) -> bool:
        return self._num_steps % self._every == 0 and self._looked_at != self._num_steps

    @property
    def is_alone(self) -> bool:
        """Whether this is a copy that trains alone."""
        return self._take is not None

    # ---- the work -------------------------------------------------------------------------------------------------------

    def _lacks(self) -> str:
        """Return why this rank cannot begin; "" if it can."""
        parameters = [p for pair in self._pairs.values() if pair.is_alive for p in pair.module.parameters()]
        return lack_of(parameters, int(self.group.rank() == 0))

    def _joined(self, iterator: Any, indices: Any, batch: Any, lacks: str) -> tuple[Any, str]:
        """Return the joined batch on rank 0, and on all ranks why there is none."""
        length = len(indices) if isinstance(indices, list) and iterator._auto_collation else 0
        octets, no_octets = (b"", "") if lacks else attempted(lambda: pickle.dumps(batch))
        everyones = self._gathered((lacks or no_octets, length, octets))
        whole, lack, why = None, "", ""
        if everyones is not None:
            lack = next((each for each, _, _ in everyones if each), "")
            lengths, parts = [each for _, each, _ in everyones], [each for *_, each in everyones]
            if not lack:
                whole, why = attempted(lambda: joined(list(map(pickle.loads, parts)), lengths))
        lack, why = self._of_first((lack, why))
        if lack or not why:
            return whole, lack
        # One process makes a batch of the samples in its own way; padded to the longest of all of them, for example.
        octets, no_octets = attempted(lambda: pickle.dumps(samples_of(iterator, indices, batch)))
        everyones = self._gathered((f"{why}, and {no_octets}" if no_octets else "", octets))
        if everyones is not None:
            why, parts = next((each for each, _ in everyones if each), ""), [each for _, each in everyones]
            if not why:
                whole, why = attempted(lambda: collated(iterator, list(map(pickle.loads, parts))))
        return whole, self._of_first(why)

    def _of_first(self, mine: Any) -> Any:
        """Return on all ranks what rank 0 has."""
        told = [mine]
        dist.broadcast_object_list(told, group=self.group, group_src=0)
        return told[0]

    def _gathered(self, mine: Any) -> list[Any] | None:
        """Return what all ranks have, on rank 0."""
        everyones: list[Any] | None = [None] * self.group.size() if self.group.rank() == 0 else None
        dist.gather_object(mine, everyones, group=self.group, group_dst=0)
        return everyones

    def _begin(self, whole: Any) -> bool:
        """Fork the copies; return whether this is one of them."""
        is_first = self.group.rank() == 0
        # A model that one rank has forgotten may still be waiting for the collection of garbage on another one.
        everyones: list[Any] = [None] * self.group.size()
        dist.all_gather_object(everyones, [i for i, each in self._pairs.items() if each.is_alive], group=self.group)
        everywhere = set(self._pairs).intersection(*everyones)
        self._audited = {i: self._pairs[i] for i in sorted(everywhere)}
        wholes = whole_values(self._audited.values(), keeps=is_first)
        self._is_open, self._looked_at = True, self._num_steps
        self._drawn_from = checksums()
        if not is_first:
            return False
        self._spool = spool = Spool(2)

        def become(number: int) -> list[nn.Module]:
            take = spool.read_by(number)
            become_one_process(self._audited.values(), wholes, self.before_step)
            self._take = take
            _watch(anew=True)
            return [pair.module for pair in self._audited.values()]

        self._references = fork_pair(become)
        return self._references is None

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compare the gradients that a step is about to use; in the copy, tell them. A hook of the optimizers."""
        if not self._is_open:
            if self._is_due and self._counts(optimizer):
                self._give_up(_NO_LOADER)
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._at_step(optimizer)
            return None

        def compared() -> Any:  # gradients are there after its first call
            found = closure()
            if self._is_open:
                self._at_step(optimizer)
            return found

        if "closure" in kwargs:
            return args, {**kwargs, "closure": compared}
        return (args[0], compared, *args[2:]), kwargs

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        number = next((i for i, pair in self._pairs.items() if pair.is_stepped_by(optimizer)), None)
        if number is None:
            return
        if number == self._last_stepped:  # twice in a row: the one that was counted is gone, or steps less often
            self._counted = self._pairs[number]
        self._last_stepped = number
        self._num_steps += self._counts(optimizer)

    def _counts(self, optimizer: Any) -> bool:
        """Return whether the steps of an optimizer are those that are counted."""
        return self._counted is not None and self._counted.is_stepped_by(optimizer)

    def _at_step(self, optimizer: Any) -> None:
        audited = self._audited.items()
        number = next((i for i, pair in audited if any(each is optimizer for each in pair.optimizers)), None)
        if number is None:
            return
        if reference.here is not None:
            gradients = {(number, name): p.grad for name, p in self._audited[number].module.named_parameters()}
            reference.here.tell(ReferenceReport("step", gradients=gradients, has_drawn=self._has_drawn()))
            reference.here.leave("the optimizer steps")
        pair = self._audited[number]
        found = used_gradients(pair.module, optimizer)
        everyones: list[Any] = [None] * self.group.size()
        dist.all_gather_object(everyones, self._has_drawn(), group=self.group)
        has_drawn = any(everyones)
        why = text = logged = ""  # why nothing was compared; what differs; what is only logged
        if self.group.rank() == 0:
            assert self._references is not None
            report = self._references.next()
            if report.event != "step" or any(each != number for each, _ in report.gradients):
                why = report.why or "one process steps another optimizer first"
            else:
                text = self._difference(found, report, number, pair.module)
                if has_drawn or report.has_drawn:
                    text, logged = "", text
        why, text, logged = self._of_first((why, text, logged))
        if why:
            self._give_up(why)
            return
        self._close()
        if text:
            raise UsageError(text)
        if self.group.rank() == 0:
            if logged:
                note = "the step draws random numbers, and each rank its own: this says nothing; set dropout to 0 for an audit"
                _log.warning("%s (%s)", logged.partition(". Fix:")[0], note)
            else:
                _log.info("audit of step %d: gradients are those of one process", self._num_steps)

    def _difference(self, found: Any, report: ReferenceReport, number: int, module: nn.Module) -> str:
        wanted = {name: gradient for (_, name), gradient in report.gradients.items()}
        texts = differences(found, wanted, number, {})
        if texts and self._references is not None:
            texts = differences(found, wanted, number, self._references.noise())
        if not texts:
            return ""
        factor = common_factor(found, wanted)
        return explained(texts, factor, self.group.size(), self._num_steps, self._strategy, module)

    def _has_drawn(self) -> bool:
        return checksums() != self._drawn_from

    def _give_up(self, why: str) -> None:
        self._looked_at = self._num_steps
        if self.group.rank() == 0:
            _log.warning("audit of step %d: not compared with one process, because %s", self._num_steps, why)
        self._close()

    def _close(self) -> None:
        if self._references is not None:
            self._references.end()
        if self._spool is not None:
            self._spool.close()
        self._references = self._spool = None
        self._is_open, self._audited = False, {}


_torchs_next: Callable[[Any], Any] = dataloader._BaseDataLoaderIter.__next__
_torchs_next_index: Callable[[Any], Any] = dataloader._BaseDataLoaderIter._next_index
_is_watching = False


def _audited_next(iterator: Any) -> Any:
    audit = _here.audit
    if audit is None:
        return _torchs_next(iterator)
    if audit.is_alone:
        if audit.wants(iterator):
            return audit.take()
        assert reference.here is not None
        reference.here.leave("the script takes a batch that ranks do not share")
    batch = _torchs_next(iterator)
    indices = _remembered.take(iterator)
    return audit.batch(iterator, indices, batch) if audit.wants(iterator) else batch


def _audited_next_index(iterator: Any) -> Any:
    indices = _torchs_next_index(iterator)
    if _here.audit is not None:
        _remembered.note(iterator, indices)
    return indices


def _watch(anew: bool = False) -> None:
    """Let audits see the batches that torch's loaders hand out."""
    global _is_watching
    if not _is_watching or anew:
        _is_watching = True
        iterator: Any = dataloader._BaseDataLoaderIter
        iterator.__next__, iterator._next_index = _audited_next, _audited_next_index
