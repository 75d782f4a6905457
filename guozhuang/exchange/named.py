"""The exchanges that are strategies of their own: each by one name, with the settings that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from guozhuang.exchange.base import GradientExchange

_WARMUP_STEPS = 20  # in which large first changes pass whole, for methods that follow what gradients have in common


@dataclass(frozen=True)
class Method:
    """An exchange as a strategy.

    Attributes:
        summary: one line for tables and help.
        make: a new exchange.
        source: the paper that it comes from.
    """

    summary: str
    make: Callable[[], GradientExchange[Any]]
    source: str


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
    from guozhuang.exchange.compressed import Compressed
    from guozhuang.exchange.quantize import MinMax8

    return Compressed(MinMax8())


def _quantize4() -> GradientExchange[Any]:
    from guozhuang.exchange.compressed import Compressed
    from guozhuang.exchange.dithering import Dithering

    return Compressed(Dithering(bits=4), error_feedback=True)


def _dithering() -> GradientExchange[Any]:
    from guozhuang.exchange.compressed import Compressed
    from guozhuang.exchange.dithering import Dithering

    return Compressed(Dithering(bits=4, partition="natural"))


def _onebit() -> GradientExchange[Any]:
    from guozhuang.exchange.compressed import Compressed
    from guozhuang.exchange.onebit import OneBit

    return _after_warmup(Compressed(OneBit(), error_feedback=True))


def _topk() -> GradientExchange[Any]:
    from guozhuang.exchange.compressed import Compressed
    from guozhuang.exchange.sparsify import TopK

    return _after_warmup(Compressed(TopK(0.01), error_feedback=True))


def _randomk() -> GradientExchange[Any]:
    from guozhuang.exchange.compressed import Compressed
    from guozhuang.exchange.sparsify import RandomK

    return _after_warmup(Compressed(RandomK(0.05), error_feedback=True))


def _powersgd() -> GradientExchange[Any]:
    from guozhuang.exchange.powersgd import PowerSGD

    return _after_warmup(PowerSGD(rank=4))


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "fp16": Method(
            "ddp with gradients in fp16 on the wire",
            lambda: _cast("float16"),
            "Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740",
        ),
        "bf16": Method(
            "ddp with gradients in bf16 on the wire",
            lambda: _cast("bfloat16"),
            "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019, arXiv:1905.12322",
        ),
        "quantize8": Method(
            "gradients in 8 bits, both ways (ByteGrad)",
            _quantize8,
            "Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, VLDB 2021, arXiv:2107.01499",
        ),
        "quantize4": Method(
            "gradients in 4 bits, rounded at random, with error feedback",
            _quantize4,
            "Alistarh et al., QSGD, NeurIPS 2017, arXiv:1610.02132",
        ),
        "dithering": Method(
            "gradients to powers of two in 4 bits, right on average",
            _dithering,
            "Horvath et al., Natural Compression for Distributed Deep Learning, 2019, arXiv:1905.10988",
        ),
        "onebit": Method(
            "signs of gradients and a magnitude per block, with error feedback",
            _onebit,
            "Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019, "
            "arXiv:1901.09847",
        ),
        "topk": Method(
            "the greatest 1 % of gradients, with error feedback",
            _topk,
            "Stich et al., Sparsified SGD with Memory, NeurIPS 2018, arXiv:1809.07599",
        ),
        "randomk": Method(
            "5 % of gradients, drawn at random, with error feedback",
            _randomk,
            "Stich et al., Sparsified SGD with Memory, NeurIPS 2018, arXiv:1809.07599",
        ),
        "powersgd": Method(
            "gradients of matrices as two thin ones of rank 4, with error feedback",
            _powersgd,
            "Vogels et al., PowerSGD, NeurIPS 2019, arXiv:1905.13727",
        ),
    }
)
