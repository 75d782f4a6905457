"""The table of strategies: from a name to the function that prepares a model and an optimizer. A new one is an entry here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from guozhuang.errors import UsageError, explain
from guozhuang.exchange import papers
from guozhuang.strategies import ways
from guozhuang.strategies.ways import Lazy, Setup, WithExchange

DEFAULT = "ddp"

# Adam's second moment is assumed to have settled after this many steps; 100 are too few for BERT from scratch.
_ADAM_WARMUP_STEPS = 300
# Methods with error feedback send whole gradients in this many first steps, in which gradients are large; 20 are too few for
# BERT from scratch (benchmarks/convergence.py).
_WARMUP_STEPS = 100


@dataclass(frozen=True)
class Strategy:
    """One complete way to train a model on the ranks of a world, and its properties.

    Attributes:
        name: the word that selects the strategy.
        summary: one line for tables and help.
        exact: whether the weights equal those of a single process on the joined batch, to rounding.
        trains: False for a bound on speed that must not be used to train.
        one_process: whether the whole global batch goes through one process, so that a world of several ranks is impossible.
        prepare: applies the strategy to a model and its optimizer on every rank; returns a ``PreparedPair`` to own the step.
        source: the paper or the software on which the strategy is based, for reports; empty if there is none.
        takes_groups: whether the strategy can send its buckets through several process groups in turn.
        warmup_steps: number of first steps in which the strategy sends more bytes than later.
        divides_itself: whether ``prepare`` divides the model along the strategy's own axis; else that is done for it.
    """

    name: str
    summary: str
    exact: bool
    trains: bool
    one_process: bool
    prepare: Callable[[nn.Module, Optimizer, Setup], tuple[nn.Module, Optimizer]]
    source: str = ""
    takes_groups: bool = False
    warmup_steps: int = 0
    divides_itself: bool = False


def _compressed(codec: str, *args: Any, error_feedback: bool = False, **options: Any) -> Lazy:
    code = Lazy(f"exchange.codecs.{codec}", *args, **options)
    return Lazy("exchange.compressed:Compressed", code, error_feedback=error_feedback)


def _after_warmup(then: Lazy) -> Lazy:
    return Lazy("exchange.warmup:Warmup", _WARMUP_STEPS, _ALLREDUCE, then)


def _exchange(
    name: str,
    summary: str,
    exchange: Lazy | None,
    source: str,
    *,
    around: Lazy | None = None,
    exact: bool = False,
    warmup_steps: int = 0,
) -> Strategy:
    return Strategy(
        name,
        summary,
        exact=exact,
        trains=True,
        one_process=False,
        prepare=WithExchange(exchange, around),
        source=source,
        warmup_steps=warmup_steps,
    )


def _divided(name: str, summary: str, source: str) -> Strategy:
    """Return the entry of a strategy that divides the model; where the layout does not divide it, it is ddp."""
    return Strategy(name, summary, exact=True, trains=True, one_process=False, prepare=ways.ddp, source=source)


_ALLREDUCE = Lazy("exchange.allreduce:AllReduce")
_QUANTIZE8 = _compressed("quantize8:MinMax8")
_LOCAL_SGD = Lazy("exchange.local_sgd:LocalSGD", every=16)

# Ordered from the simplest to use: if measurements tie, the earlier one is recommended.
_TABLE: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "single",
            "one process, all cores, the whole global batch",
            exact=True,
            trains=True,
            one_process=True,
            prepare=ways.single,
        ),
        Strategy(
            "ddp",
            "a process per share; gradients averaged while backward runs",
            exact=True,
            trains=True,
            one_process=False,
            prepare=ways.ddp,
            source=papers.LI_2020,
            takes_groups=True,
        ),
        Strategy(
            "torch-ddp",
            "the same by PyTorch's own DistributedDataParallel, the peer",
            exact=True,
            trains=True,
            one_process=False,
            prepare=ways.torch_ddp,
            source=papers.LI_2020,
            takes_groups=True,
        ),
        Strategy(
            "dp",
            "one process, a replica per share in threads, one optimizer",
            exact=True,
            trains=True,
            one_process=True,
            prepare=ways.dp,
            source="torch.nn.DataParallel, of which it is a drop-in; Krizhevsky, One weird trick, 2014, arXiv:1404.5997",
        ),
        Strategy(
            "sharded",
            "each rank updates its part of the weights; in the shared memory of one CPU node they exist once",
            exact=True,
            trains=True,
            one_process=False,
            prepare=ways.Sharded(),
            source=papers.RAJBHANDARI_2020,
        ),
        Strategy(
            "sharded-quantize8",
            "sharded, with gradients averaged in 8 bits as under quantize8",
            exact=False,
            trains=True,
            one_process=False,
            prepare=ways.Sharded(_QUANTIZE8),
            source=f"{papers.RAJBHANDARI_2020}; {papers.GAN_2021}",
        ),
        Strategy(
            "sharded-gradients",
            "gradients and optimizer state divided, by PyTorch's fully_shard",
            exact=True,
            trains=True,
            one_process=False,
            prepare=ways.sharded_gradients,
            source=papers.RAJBHANDARI_2020,
        ),
        Strategy(
            "sharded-weights",
            "weights divided too, gathered layer by layer, by PyTorch's fully_shard",
            exact=True,
            trains=True,
            one_process=False,
            prepare=ways.sharded_weights,
            source=papers.RAJBHANDARI_2020,
        ),
        _divided(
            "pipeline", "the model's layers divided into stages; microbatches pass through them", papers.HUANG_2019
        ),
        Strategy(
            "torch-pipeline",
            "PyTorch's pipelining: traced, cut by counting blocks; GPipe's schedule or 1F1B",
            exact=False,
            trains=True,
            one_process=False,
            prepare=Lazy("strategies.peers:torch_pipeline"),
            source="PyTorch torch.distributed.pipelining",
            divides_itself=True,
        ),
        _divided("tensor", "each matrix divided, with the heads of attention", papers.SHOEYBI_2019),
        Strategy(
            "torch-tensor",
            "PyTorch's tensor parallelism: parallelize_module with DTensor",
            exact=False,
            trains=True,
            one_process=False,
            prepare=Lazy("strategies.peers:torch_tensor"),
            source="PyTorch torch.distributed.tensor.parallel",
            divides_itself=True,
        ),
        _divided("space", "each image divided, with halos from the neighbours", papers.DRYDEN_2019),
        _divided("sequence", "each sequence divided; attention exchanges heads or blocks", papers.JACOBS_2023),
        _divided(
            "hybrid", "axes of --layout, such as pp=2,tp=2,dp=auto; gradients averaged along dp", papers.NARAYANAN_2021
        ),
        _exchange(
            "parameter-server",
            "gradients summed by servers: threads of the ranks, or processes of their own with guozhuang run --servers",
            Lazy("exchange.parameter_server:ParameterServer"),
            papers.JIANG_2020 + "; " + papers.PENG_2019,
            exact=True,
        ),
        _exchange(
            "sparse-rows",
            "ddp that sends of an embedding's gradient only the rows that were used",
            Lazy("exchange.sparse_rows:SparseRows", _ALLREDUCE),
            papers.KIM_2019,
            exact=True,
        ),
        _exchange(
            "sparse-rows8",
            "the same, and all other gradients in 8 bits",
            Lazy("exchange.sparse_rows:SparseRows", _QUANTIZE8),
            "Kim et al., Parallax, EuroSys 2019, arXiv:1808.02621; the 8 bits are those of quantize8",
        ),
        _exchange(
            "fp16",
            "ddp with gradients in fp16 on the wire",
            Lazy("exchange.cast:Cast", torch.float16, _ALLREDUCE),
            "Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740",
        ),
        _exchange(
            "bf16",
            "ddp with gradients in bf16 on the wire",
            Lazy("exchange.cast:Cast", torch.bfloat16, _ALLREDUCE),
            "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019, arXiv:1905.12322",
        ),
        _exchange(
            "quantize8",
            "gradients in 8 bits, both ways (ByteGrad)",
            _QUANTIZE8,
            papers.GAN_2021,
        ),
        _exchange(
            "quantize4",
            "gradients in 4 bits, rounded at random, with error feedback",
            _compressed("dithering:Dithering", bits=4, error_feedback=True),
            "Alistarh et al., QSGD, NeurIPS 2017, arXiv:1610.02132",
        ),
        _exchange(
            "dithering",
            "gradients to powers of two in 4 bits, right on average",
            _compressed("dithering:Dithering", bits=4, partition="natural"),
            "Horvath et al., Natural Compression for Distributed Deep Learning, 2019, arXiv:1905.10988",
        ),
        _exchange(
            "onebit",
            "signs of gradients and a magnitude per block, with error feedback",
            _after_warmup(_compressed("onebit:OneBit", error_feedback=True)),
            "Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019, "
            "arXiv:1901.09847",
            warmup_steps=_WARMUP_STEPS,
        ),
        _exchange(
            "topk",
            "the greatest 1 % of gradients, with error feedback",
            _after_warmup(_compressed("topk:TopK", 0.01, error_feedback=True)),
            papers.STICH_2018,
            warmup_steps=_WARMUP_STEPS,
        ),
        _exchange(
            "randomk",
            "5 % of gradients, drawn at random, with error feedback",
            _after_warmup(_compressed("topk:RandomK", 0.05, error_feedback=True)),
            papers.STICH_2018,
            warmup_steps=_WARMUP_STEPS,
        ),
        _exchange(
            "powersgd",
            "gradients of matrices as two thin ones of rank 4, with error feedback",
            _after_warmup(Lazy("exchange.powersgd:PowerSGD", rank=4)),
            "Vogels et al., PowerSGD, NeurIPS 2019, arXiv:1905.13727",
            warmup_steps=_WARMUP_STEPS,
        ),
        _exchange(
            "adasum",
            "gradients added where they are orthogonal, averaged where they agree",
            Lazy("exchange.adasum:Adasum"),
            "Maleki et al., Scaling Distributed Training with Adaptive Summation, MLSys 2021, arXiv:2006.02924",
        ),
        _exchange(
            "qadam",
            "Adam whose momentum travels in 8 bits after a warm-up; for torch's Adam and AdamW",
            None,
            papers.GAN_2021,
            around=Lazy("optim:QAdam.around", warmup_steps=_ADAM_WARMUP_STEPS),
            warmup_steps=_ADAM_WARMUP_STEPS,
        ),
        _exchange(
            "onebit-adam",
            "the same in 1 bit, with error feedback",
            None,
            papers.TANG_2021,
            around=Lazy(
                "optim:QAdam.around",
                warmup_steps=_ADAM_WARMUP_STEPS,
                codec=Lazy("exchange.codecs.onebit:OneBit"),
                error_feedback=True,
            ),
            warmup_steps=_ADAM_WARMUP_STEPS,
        ),
        _exchange(
            "local-sgd",
            "each rank trains alone; weights are averaged every 16 steps",
            _LOCAL_SGD,
            "Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767",
        ),
        _exchange(
            "overlapped-local-sgd",
            "the same in two parts and 8 bits, each 7 steps under way in the background",
            Lazy(
                # With this outer optimizer the result of an exchange is the plain mean of the weights that were sent.
                "exchange.diloco:DiLoCo",
                every=16,
                outer_lr=1.0,
                outer_momentum=0.0,
                num_fragments=2,
                overlap_steps=7,
                keep_progress=True,
                codec=Lazy("exchange.codecs.dithering:Dithering", 8),
            ),
            "Douillard et al., Streaming DiLoCo, 2025, arXiv:2501.18512, without an outer optimizer",
        ),
        _exchange(
            "node-local-sgd",
            "ddp inside each node; weights are averaged between nodes every 16 steps",
            Lazy("exchange.weight_hierarchical:WeightHierarchical", _ALLREDUCE, _LOCAL_SGD),
            "Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, arXiv:1808.07217",
        ),
        _exchange(
            "diloco",
            "each rank trains alone; an outer optimizer follows their mean every 50 steps, in two parts, in the background",
            Lazy("exchange.diloco:DiLoCo", every=50, num_fragments=2, overlap_steps=10),
            "Douillard et al., DiLoCo, 2023, arXiv:2311.08105, and Streaming DiLoCo, 2025, arXiv:2501.18512",
        ),
        _exchange(
            "decentralized",
            "weights of the step before are averaged over all ranks while the next gradients are computed",
            Lazy("exchange.decentralized:Decentralized", "all"),
            papers.LIAN_2017,
        ),
        _exchange(
            "decentralized-pairs",
            "the same with one other rank in each step",
            Lazy("exchange.decentralized:Decentralized", "shift_one"),
            papers.LIAN_2017,
        ),
        _exchange(
            "low-precision-decentralized",
            "differences of weights in 8 bits to both neighbours of a ring",
            Lazy("exchange.low_precision_decentralized:LowPrecisionDecentralized"),
            papers.GAN_2021,
        ),
        _exchange(
            "async-parameter-server",
            "servers hold the weights; each rank adds its step and takes what is there, at most 4 steps ahead of the slowest",
            Lazy("exchange.parameter_server:AsyncParameterServer", max_staleness_steps=4, average=True),
            "Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013",
        ),
        _exchange(
            "async-model-average",
            "weights are averaged in the background every half second, and nobody waits for anybody",
            Lazy("exchange.async_average:AsyncModelAverage"),
            papers.GAN_2021,
        ),
        Strategy(
            "none",
            "ranks without any communication: the bound on speed, not a way to train",
            exact=False,
            trains=False,
            one_process=False,
            prepare=ways.none,
        ),
    )
}
STRATEGIES: Mapping[str, Strategy] = MappingProxyType(_TABLE)

#: Chooses among strategies while the script trains, so it is none of the table, which comparisons go through.
AUTO = Strategy("auto", "the fastest exact one, raced in the first steps", True, True, False, ways.auto)


def register(strategy: Strategy, after: str) -> None:
    """Add a strategy to the table. A package that this module may not import calls this when it is imported itself.

    Args:
        strategy: the new strategy.
        after: the name of the strategy after which it is inserted; the order of the table matters.
    """
    assert strategy.name not in _TABLE and after in _TABLE, strategy.name
    names = list(_TABLE)
    later = {name: _TABLE.pop(name) for name in names[names.index(after) + 1 :]}
    _TABLE.update({strategy.name: strategy, **later})


def get(name: str) -> Strategy:
    """Return the strategy with this name, one of the table or :data:`AUTO`.

    Raises:
        UsageError: there is no strategy of that name; the text lists all names.
    """
    if name == AUTO.name:
        return AUTO
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, 1)
        fix = f"write {near[0]}, or choose" if near else "choose"
        raise UsageError(explain("there is no such strategy", value=name, fix=f"{fix} one of {', '.join(STRATEGIES)}"))
    return STRATEGIES[name]


def check_groups(strategy: Strategy, num_groups: int) -> None:
    """Raise if several groups were requested for a strategy that cannot use them.

    Raises:
        UsageError: ``num_groups`` is above 1, and the strategy does not take groups.
    """
    if num_groups > 1 and not strategy.takes_groups:
        takers = [one.name for one in STRATEGIES.values() if one.takes_groups]
        what = f"strategy {strategy.name} does not hand buckets to several groups"
        fix = f"leave --groups out, or choose one of {', '.join(takers)}"
        raise UsageError(explain(what, value=f"--groups {num_groups}", fix=fix))
