"""``ByteGradAlgorithm``: gradients that are sent in 8 bits."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from guozhuang.exchange.codecs.quantize8 import MinMax8
from guozhuang.exchange.compressed import Compressed

from .base import Algorithm, AlgorithmImpl
from .gradient_allreduce import GradientsImpl, in_levels


class ByteGradAlgorithm(Algorithm):
    """Averages gradients that are sent in 8 bits, as Guozhuang's strategy ``quantize8`` with the code ``MinMax8``.

    Args:
        hierarchical: sum inside each node first, without a code; only what is sent between nodes is coded. On one node that is
            the exact mean.
        average: False: the sum in place of the mean.
    """

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical, self.average = hierarchical, average

    @override
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return GradientsImpl(process_group, in_levels(Compressed(MinMax8()), self.hierarchical, self.average))
