"""The algorithms of ``with_bagua``, and their registry."""

from . import (
    async_model_average,
    base,
    bytegrad,
    decentralized,
    gradient_allreduce,
    low_precision_decentralized,
    q_adam,
)
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "async_model_average",
    "base",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
    "low_precision_decentralized",
    "q_adam",
]

for _name, _algorithm, _description in (
    ("async", async_model_average.AsyncModelAverageAlgorithm, "Weights averaged in the background"),
    ("bytegrad", bytegrad.ByteGradAlgorithm, "Gradients averaged in 8 bits"),
    ("decentralized", decentralized.DecentralizedAlgorithm, "Weights averaged with all ranks, or one at a time"),
    ("gradient_allreduce", gradient_allreduce.GradientAllReduceAlgorithm, "Gradients averaged exactly"),
    (
        "low_precision_decentralized",
        low_precision_decentralized.LowPrecisionDecentralizedAlgorithm,
        "Weights averaged in a ring, in 8 bits",
    ),
    ("qadam", q_adam.QAdamAlgorithm, "Adam's momentum averaged in 8 bits"),
):
    GlobalAlgorithmRegistry.register(_name, _algorithm, _description)
