"""The messages of a pipeline in a fake world, where one process plays all stages and hands itself what they send each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from .transfers import CONCLUSION, StageMessage, StageTransfers


class PlayedTransfers(StageTransfers):
    """Hands messages over and records what they would be: a header, and each tensor. Constructor: see ``StageTransfers``."""

    _concluded: tuple[StageMessage, ...] = ()

    @override
    def expect(self, peer: int, messages: Sequence[StageMessage]) -> None:
        """Do nothing: messages do not come from elsewhere."""

    @override
    def has(self, message: StageMessage) -> bool:
        return message in self._here

    @override
    def receive(self, message: StageMessage, why: str) -> list[Tensor | None]:
        tensors = self._here.pop(message)
        self._record("recv", message, tensors)
        return tensors

    @override
    def release(self, messages: Sequence[StageMessage]) -> None:
        """Do nothing: nothing was received into buffers."""

    @override
    def send(self, message: StageMessage, tensors: Sequence[Tensor | None], why: str) -> None:
        self._here[message] = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self._record("send", message, tensors)
        if message.kind == CONCLUSION:
            self._concluded += (message,)

    @override
    def finish(self, why: str) -> None:
        """Let all ranks receive the conclusions, as they do at the end of a batch."""
        recorder: Any = self._group.recorder  # type: ignore[attr-defined]
        messages, self._concluded = self._concluded, ()
        for message in messages:
            with recorder.playing(message.destination):
                self.receive(message, why)

    def _record(self, verb: str, message: StageMessage, tensors: Sequence[Tensor | None]) -> None:
        group: Any = self._group
        source, destination = self._rank_of(message.source), self._rank_of(message.destination)
        if source == destination:
            return
        pieces = [*self._headers(message, tensors), *(each for each in tensors if each is not None and each.numel())]
        for piece in pieces:
            call = group.recorder.start(verb, piece.nbytes, (source, destination), group=group.number)
            group.recorder.go_on()
            if verb == "recv":
                group.recorder.wait(call)
