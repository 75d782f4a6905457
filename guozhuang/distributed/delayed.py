"""Parameters whose gradients are exchanged together when the gradient of another parameter is ready.

PyTorch's arguments ``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce``. Unlike there, the exchange is waited for
before ``backward`` returns, and ``no_sync`` holds for these parameters too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ..errors import WorldError, explain
from ..exchange import AllReduce, Work
from ..gradients.buckets import Caps, Slot, assign, place
from ..gradients.passes import weakly
from ..gradients.views import GradientViews


class DelayedGradients:
    """Their flat tensors, and the hook that starts to sum them.

    Args:
        named_parameters: whose exchange waits. Their gradients must be complete when the trigger's is.
        trigger: the parameter that is waited for.
        group: the ranks; each constructs it with equal parameters.

    The wrapper calls :meth:`after_forward` at each forward with gradients.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        trigger: nn.Parameter,
        group: dist.ProcessGroup,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self._parameters = [p for _, p in named_parameters]
        slots = [Slot(p.numel(), p.dtype, p.device) for p in self._parameters]
        total = sum(slot.num_bytes for slot in slots)
        layout = assign(slots, range(len(slots)), Caps((max(total, 1),)))
        self._placement = place(layout, self.names, self._parameters, slots)
        self._views = GradientViews(self._parameters, self._placement)
        self._group, self._exchange = group, AllReduce()
        self._state = self._exchange.prepare(self._placement.buckets, group)
        self._synchronize = False  # whether backwards of the last forward exchange gradients
        self._armed = False  # one is under way that came through the wrapper, or may come
        self._step = 0
        self._works: list[Work] = []
        self._last_works: list[Work] = []  # see [Note: who drops a work last]
        trigger.register_post_accumulate_grad_hook(weakly(self._start))  # the parameter may outlive the wrapper

    def after_forward(self, synchronize: bool, outputs: Sequence[Tensor]) -> None:
        """Prepare for the backward of a forward.

        Args:
            synchronize: whether it exchanges gradients.
            outputs: the tensors from which it can start. One that reaches none of them exchanges only if it is the first
                since this forward; otherwise it is one of the bare module's, which stays local.

        Raises:
            WorldError: the exchange of a backward that was broken off cannot be brought to its end.
        """
        if torch._C._current_graph_task_id() == -1 and self._works:  # inside a backward: a part that is computed again
            self._last_works, self._works = self._works, []  # a backward that raised after the exchange had begun
            self._wait()
            self._step += 1
        self._synchronize = self._armed = synchronize
        if synchronize:
            hook = weakly(self._arm)
            for output in outputs:
                output.register_hook(hook)

    def _arm(self) -> None:
        self._armed = self._synchronize

    def _start(self) -> None:
        if not self._armed or self._works:
            return
        self._views.begin(self._exchange.input_scale(self._group.size()))
        self._views.fill_together(range(len(self._parameters)))
        self._works = [self._exchange.start(b, self._state, self._step) for b in self._placement.buckets]
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._last_works, self._works = self._works, []
        self._armed = False
        self._wait()
        for i in range(len(self._parameters)):
            self._views.settle(i, used=True)
        self._step += 1

    def _wait(self) -> None:
        try:
            for work in self._last_works:
                work.wait()
        except RuntimeError as error:
            raise WorldError(
                explain(
                    f"the exchange of {len(self.names)} delayed parameters in step {self._step} failed: {error}",
                    rank=self._group.rank(),
                    fix="unless this rank's own error stands above, look at the rank that stopped first; the others only "
                    "noticed that it was gone",
                )
            ) from error
