"""Parameters whose gradients are exchanged together when the gradient of another parameter is ready.

PyTorch's arguments ``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce``. Unlike there, the exchange is waited for
before ``backward`` returns, and ``no_sync`` holds for these parameters too.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ..buckets import Caps, Slot, assign, place
from ..exchange import AllReduce, Work
from ..reducer import GradientViews


class DelayedGradients:
    """Their flat tensors, and the hook that starts to sum them.

    Args:
        named_parameters: whose exchange waits. Their gradients must be complete when the trigger's is.
        trigger: the parameter that is waited for.
        group: the ranks; each constructs it with equal parameters.

    Attributes:
        synchronize: whether the next backward exchanges gradients; the wrapper sets it at each forward.
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
        self._views = GradientViews(self._parameters, self._placement.views)
        self._group, self._exchange = group, AllReduce()
        self._state = self._exchange.prepare(self._placement.buckets, group)
        self.synchronize = False
        self._step = 0
        self._works: list[Work] = []
        self._last_works: list[Work] = []  # see [Note: who drops a work last]
        reference = weakref.ref(self)  # the parameter may outlive the wrapper

        def triggered(_: Tensor) -> None:
            alive = reference()
            if alive is not None:
                alive._start()

        trigger.register_post_accumulate_grad_hook(triggered)

    def _start(self) -> None:
        if not self.synchronize or self._works:
            return
        self._views.begin(self._exchange.input_scale(self._group.size()))
        self._views.fill_together(range(len(self._parameters)))
        self._works = [self._exchange.start(b, self._state, self._step) for b in self._placement.buckets]
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._last_works, self._works = self._works, []
        for work in self._last_works:
            work.wait()
        for i in range(len(self._parameters)):
            self._views.settle(i, used=True)
        self._step += 1
