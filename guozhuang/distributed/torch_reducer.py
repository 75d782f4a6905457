"""The reducer under the names by which trainers call PyTorch's (``model.reducer.prepare_for_backward`` and others)."""

from __future__ import annotations

from ..gradients.reducer import Reducer


class TorchReducer(Reducer):
    """A :class:`Reducer` with the methods of ``torch.distributed.Reducer`` that trainers call from outside."""

    def prepare_for_backward(self, outputs: object = ()) -> None:
        """Average the gradients of the next backward, whichever forward made its graph. Every rank must call it.

        Args:
            outputs: the tensors from which that backward starts; not read, because the running backward tells its graph.
        """
        self.expect_backward()

    def _rebuild_buckets(self) -> bool:
        """Apply a new order of buckets, if the ranks have agreed on one; return whether they have. Not inside a backward."""
        return self.renew_buckets()

    def _delay_all_reduce(self) -> None:
        """Do nothing: trainers call it after the first backward of a static graph, and that backward has averaged already."""
