"""The exchanges that are strategies of their own: each by one name, with the settings that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer

from guozhuang.exchange.base import GradientExchange

# After which Adam's second moment is taken to have settled; 100 are too few for BERT from scratch.
_ADAM_WARMUP_STEPS = 300
# In which large first changes pass whole, for methods that add to a gradient what was lost of earlier ones; 20 are too few
# for BERT from scratch: benchmarks/convergence.py.
_WARMUP_STEPS = 100


@dataclass(frozen=True)
class Method:
    """An exchange as a strategy.

    Attributes:
        summary: one line for tables and help.
        make: a new exchange of gradients, or of weights (a ``WeightExchange``); given the optimizer that will step.
        source: the paper that it comes from.
        around: what steps in place of the user's optimizer; None for that optimizer itself.
        exact: the weights equal those of a single process on the joined batch, to rounding.
        warmup_steps: steps at the start in which it sends whole gradients.
    """

    summary: str
    make: Callable[[Any], Any]
    source: str
    around: Callable[[Optimizer], Optimizer] | None = None
    exact: bool = False
    warmup_steps: int = 0


# The modules of a method are imported by who uses it: each costs a millisecond or more, and most programs use none.


def _cast(dtype: str) -> GradientExchange[Any]:
    import torch

    from guozhuang.exchange.allreduce import AllReduce
    from guozhuang.exchange.cast import Cast

    return Cast(getattr(torch, dtype), AllReduce())


def _after_warmup(then: GradientExchange[Any]) -> GradientExchange[Any]:
    from guozhuang.exchange.allreduce import AllReduce
    from guozhuang.exchange.warmup import Warmup

    return Warmup(_WARMUP_STEPS, AllReduce(), then)


def _quantize8() -> GradientExchange[Any]:
    from guozhuang.exchange.codecs.quantize8 import MinMax8
    from guozhuang.exchange.compressed import Compressed

    return Compressed(MinMax8())


def _quantize4() -> GradientExchange[Any]:
    from guozhuang.exchange.codecs.dithering import Dithering
    from guozhuang.exchange.compressed import Compressed

    return Compressed(Dithering(bits=4), error_feedback=True)


def _dithering() -> GradientExchange[Any]:
    from guozhuang.exchange.codecs.dithering import Dithering
    from guozhuang.exchange.compressed import Compressed

    return Compressed(Dithering(bits=4, partition="natural"))


def _onebit() -> GradientExchange[Any]:
    from guozhuang.exchange.codecs.onebit import OneBit
    from guozhuang.exchange.compressed import Compressed

    return _after_warmup(Compressed(OneBit(), error_feedback=True))


def _topk() -> GradientExchange[Any]:
    from guozhuang.exchange.codecs.topk import TopK
    from guozhuang.exchange.compressed import Compressed

    return _after_warmup(Compressed(TopK(0.01), error_feedback=True))


def _randomk() -> GradientExchange[Any]:
    from guozhuang.exchange.codecs.topk import RandomK
    from guozhuang.exchange.compressed import Compressed

    return _after_warmup(Compressed(RandomK(0.05), error_feedback=True))


def _powersgd() -> GradientExchange[Any]:
    from guozhuang.exchange.powersgd import PowerSGD

    return _after_warmup(PowerSGD(rank=4))


def _adasum() -> GradientExchange[Any]:
    from guozhuang.exchange.adasum import Adasum

    return Adasum()


def _qadam(optimizer: Optimizer) -> Optimizer:
    from guozhuang.optim import QAdam

    return QAdam.around(optimizer, warmup_steps=_ADAM_WARMUP_STEPS)


def _onebit_adam(optimizer: Optimizer) -> Optimizer:
    from guozhuang.exchange.codecs.onebit import OneBit
    from guozhuang.optim import QAdam

    return QAdam.around(optimizer, warmup_steps=_ADAM_WARMUP_STEPS, codec=OneBit(), error_feedback=True)


def _local_sgd() -> Any:
    from guozhuang.exchange.local_sgd import LocalSGD

    return LocalSGD(every=16)


def _node_local_sgd() -> Any:
    from guozhuang.exchange.allreduce import AllReduce
    from guozhuang.exchange.local_sgd import LocalSGD
    from guozhuang.exchange.weight_hierarchical import WeightHierarchical

    return WeightHierarchical(AllReduce(), LocalSGD(every=16))


def _diloco() -> Any:
    from guozhuang.exchange.diloco import DiLoCo

    return DiLoCo(every=50, num_fragments=2, overlap_steps=10)


def _overlapped_local_sgd() -> Any:
    from guozhuang.exchange.codecs.dithering import Dithering
    from guozhuang.exchange.diloco import DiLoCo

    # With this outer optimizer the weights that arrive are the mean of those that were sent.
    return DiLoCo(
        every=16,
        outer_lr=1.0,
        outer_momentum=0.0,
        num_fragments=2,
        overlap_steps=7,
        keep_progress=True,
        codec=Dithering(8),
    )


def _decentralized(peers: Any) -> Any:
    from guozhuang.exchange.decentralized import Decentralized

    return Decentralized(peers)


def _low_precision_decentralized() -> Any:
    from guozhuang.exchange.low_precision_decentralized import LowPrecisionDecentralized

    return LowPrecisionDecentralized()


def _async_model_average() -> Any:
    from guozhuang.exchange.async_average import AsyncModelAverage

    return AsyncModelAverage()


def _parameter_server() -> Any:
    from guozhuang.exchange.parameter_server import ParameterServer

    return ParameterServer()


def _async_parameter_server() -> Any:
    from guozhuang.exchange.parameter_server import AsyncParameterServer

    return AsyncParameterServer(max_staleness_steps=4, average=True)


def _sparse_rows() -> Any:
    from guozhuang.exchange.allreduce import AllReduce
    from guozhuang.exchange.sparse_rows import SparseRows

    return SparseRows(AllReduce())


def _sparse_rows8() -> Any:
    from guozhuang.exchange.codecs.quantize8 import MinMax8
    from guozhuang.exchange.compressed import Compressed
    from guozhuang.exchange.sparse_rows import SparseRows

    return SparseRows(Compressed(MinMax8()))


_BAGUA = "Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, VLDB 2021, arXiv:2107.01499"
_ONEBIT_ADAM = "Tang et al., 1-bit Adam, ICML 2021, arXiv:2102.02888"

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "parameter-server": Method(
            "gradients summed by servers: threads of the ranks, or processes of their own with guozhuang run --servers",
            lambda _: _parameter_server(),
            "Jiang et al., BytePS, OSDI 2020; Peng et al., ByteScheduler, SOSP 2019",
            exact=True,
        ),
        "sparse-rows": Method(
            "ddp that sends of an embedding's gradient only the rows that were used",
            lambda _: _sparse_rows(),
            "Kim et al., Parallax, EuroSys 2019, arXiv:1808.02621",
            exact=True,
        ),
        "sparse-rows8": Method(
            "the same, and all other gradients in 8 bits",
            lambda _: _sparse_rows8(),
            "Kim et al., Parallax, EuroSys 2019, arXiv:1808.02621; the 8 bits are those of quantize8",
        ),
        "fp16": Method(
            "ddp with gradients in fp16 on the wire",
            lambda _: _cast("float16"),
            "Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740",
        ),
        "bf16": Method(
            "ddp with gradients in bf16 on the wire",
            lambda _: _cast("bfloat16"),
            "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019, arXiv:1905.12322",
        ),
        "quantize8": Method(
            "gradients in 8 bits, both ways (ByteGrad)",
            lambda _: _quantize8(),
            _BAGUA,
        ),
        "quantize4": Method(
            "gradients in 4 bits, rounded at random, with error feedback",
            lambda _: _quantize4(),
            "Alistarh et al., QSGD, NeurIPS 2017, arXiv:1610.02132",
        ),
        "dithering": Method(
            "gradients to powers of two in 4 bits, right on average",
            lambda _: _dithering(),
            "Horvath et al., Natural Compression for Distributed Deep Learning, 2019, arXiv:1905.10988",
        ),
        "onebit": Method(
            "signs of gradients and a magnitude per block, with error feedback",
            lambda _: _onebit(),
            "Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019, "
            "arXiv:1901.09847",
            warmup_steps=_WARMUP_STEPS,
        ),
        "topk": Method(
            "the greatest 1 % of gradients, with error feedback",
            lambda _: _topk(),
            "Stich et al., Sparsified SGD with Memory, NeurIPS 2018, arXiv:1809.07599",
            warmup_steps=_WARMUP_STEPS,
        ),
        "randomk": Method(
            "5 % of gradients, drawn at random, with error feedback",
            lambda _: _randomk(),
            "Stich et al., Sparsified SGD with Memory, NeurIPS 2018, arXiv:1809.07599",
            warmup_steps=_WARMUP_STEPS,
        ),
        "powersgd": Method(
            "gradients of matrices as two thin ones of rank 4, with error feedback",
            lambda _: _powersgd(),
            "Vogels et al., PowerSGD, NeurIPS 2019, arXiv:1905.13727",
            warmup_steps=_WARMUP_STEPS,
        ),
        "adasum": Method(
            "gradients added where they are orthogonal, averaged where they agree",
            lambda _: _adasum(),
            "Maleki et al., Scaling Distributed Training with Adaptive Summation, MLSys 2021, arXiv:2006.02924",
        ),
        "qadam": Method(
            "Adam whose momentum travels in 8 bits after a warm-up; for torch's Adam and AdamW",
            lambda optimizer: optimizer.exchange(),
            _BAGUA,
            _qadam,
            warmup_steps=_ADAM_WARMUP_STEPS,
        ),
        "onebit-adam": Method(
            "the same in 1 bit, with error feedback",
            lambda optimizer: optimizer.exchange(),
            _ONEBIT_ADAM,
            _onebit_adam,
            warmup_steps=_ADAM_WARMUP_STEPS,
        ),
        "local-sgd": Method(
            "each rank trains alone; weights are averaged every 16 steps",
            lambda _: _local_sgd(),
            "Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767",
        ),
        "overlapped-local-sgd": Method(
            "the same in two parts and 8 bits, each 7 steps under way in the background",
            lambda _: _overlapped_local_sgd(),
            "Douillard et al., Streaming DiLoCo, 2025, arXiv:2501.18512, without an outer optimizer",
        ),
        "node-local-sgd": Method(
            "ddp inside each node; weights are averaged between nodes every 16 steps",
            lambda _: _node_local_sgd(),
            "Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, arXiv:1808.07217",
        ),
        "diloco": Method(
            "each rank trains alone; an outer optimizer follows their mean every 50 steps, in two parts, in the background",
            lambda _: _diloco(),
            "Douillard et al., DiLoCo, 2023, arXiv:2311.08105, and Streaming DiLoCo, 2025, arXiv:2501.18512",
        ),
        "decentralized": Method(
            "weights of the step before are averaged over all ranks while the next gradients are computed",
            lambda _: _decentralized("all"),
            "Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017, arXiv:1705.09056",
        ),
        "decentralized-pairs": Method(
            "the same with one other rank in each step",
            lambda _: _decentralized("shift_one"),
            "Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017, arXiv:1705.09056",
        ),
        "low-precision-decentralized": Method(
            "differences of weights in 8 bits to both neighbours of a ring",
            lambda _: _low_precision_decentralized(),
            _BAGUA,
        ),
        "async-parameter-server": Method(
            "servers hold the weights; each rank adds its step and takes what is there, at most 4 steps ahead of the slowest",
            lambda _: _async_parameter_server(),
            "Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013",
        ),
        "async-model-average": Method(
            "weights are averaged in the background every half second, and nobody waits for anybody",
            lambda _: _async_model_average(),
            _BAGUA,
        ),
    }
)
