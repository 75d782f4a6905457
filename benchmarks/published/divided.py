"""Predict trainings divided by tensor, pipeline and data ways with the model of a step as it is shipped for A100.

No training here took part in its fit, but those with sharded weights (ZeRO-3, FSDP) set two coefficients. Where the
micro-batch is not published, the best of 1, 2, 4 and 8 is taken, as its authors did; where interleaving is not, there is none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from guozhuang.cost.describe import parse_cluster
from guozhuang.cost.step import step
from guozhuang.cost.transformer import Transformer

from .points import Point, Protocol, all_series, read, rows

LAYOUTS = read("layouts")
PER_NODE = 8


def _seconds(row: dict[str, Any], device: str, network: str, micro_batches: Sequence[int], **more: Any) -> float:
    """Return the predicted seconds of a step, with the micro-batch that is predicted to be best."""
    model = Transformer(row["layers"], row["hidden"], row["heads"], row["sequence"], row["vocabulary"])
    nodes = row["gpus"] // PER_NODE
    cluster = parse_cluster(f"{nodes}x{PER_NODE}x{device}" + (f",ib={network}" if nodes > 1 else ""))
    data = row["gpus"] // row["tensor"] // row["pipeline"]
    ways = {"tensor": row["tensor"], "pipeline": row["pipeline"], "data": data, "global_batch": row["batch"]}
    fitting = [b for b in micro_batches if row["batch"] % (data * b) == 0]
    return min(step(model, cluster=cluster, micro_batch=b, **ways, **more).seconds for b in fitting)


def rates_2021() -> Protocol:
    """FLOP/s a GPU of GPTs from 1.7 to 1,008 billion parameters."""
    return _rates("megatron-2021", "A100-80", "8x200gbit", "full", recompute="full")


def rates_2024() -> Protocol:
    """FLOP/s a GPU of GPTs on H100: carried over from A100 by data sheets alone."""
    found = _rates("megatron-2024", "H100", "8x400gbit", "none", flash=True, sequence_parallel=True, overlap=True)
    found.notes.append(
        "carried over from A100 by data sheets; assumes flash attention, and gradients averaged beside backward"
    )
    return found


def _rates(table: str, device: str, network: str, counted: str, **more: Any) -> Protocol:
    found = Protocol(f"{table}: TFLOP/s a GPU, the shipped model of a step", "the median of the other trainings")
    each = list(rows(LAYOUTS[table]))
    for i, row in enumerate(each):
        if "model_ways" in row:
            tensor = min(PER_NODE, row["model_ways"])
            row |= {"tensor": tensor, "pipeline": row["model_ways"] // tensor}
        seconds = _seconds(row, device, network, (1, 2, 4, 8), **more)
        model = Transformer(row["layers"], row["hidden"], row["heads"], row["sequence"], row["vocabulary"])
        work = model.flops(row["batch"], counted) / row["gpus"] / 1e12
        null = statistics.median(other["tflops_a_gpu"] for other in each[:i] + each[i + 1 :])
        published = row["tflops_a_gpu"]
        what = f"GPT {row['parameters_b']} B"
        found.points.append(Point(what, f"{row['gpus']} GPUs", seconds, work / published, work / null, work))
    return found


def recomputation() -> Protocol:
    """Seconds of a step with whole layers computed again, and with attention's scores alone beside sequence parallelism."""
    found = Protocol("Korthikanti: seconds of a step, the shipped model of a step")
    for row in rows(LAYOUTS["korthikanti"]):
        given = {"interleave": row["interleave"]}
        ways = {"full_s": {"recompute": "full"}, "selective_s": {"recompute": "selective", "sequence_parallel": True}}
        for column, more in ways.items():
            seconds = _seconds(row, "A100-80", "8x200gbit", (row["micro_batch"],), **given, **more)
            what = f"GPT {row['parameters_b']} B, {column.removesuffix('_s')}"
            found.points.append(Point(what, f"{row['gpus']} GPUs", seconds, row[column]))
    return found


def more_data_ways() -> Protocol:
    """FLOP/s a GPU of two GPTs as their data ways double and double again, the batch as it was."""
    found = Protocol("Megatron 2021, table 2: TFLOP/s a GPU by the number of GPUs, the shipped model of a step")
    shapes = {174.6: (12288, 96, 96), 529.6: (20480, 105, 128)}
    for row in rows(LAYOUTS["megatron-2021-days"]):
        if row["scheme"] != "ptd":
            continue
        hidden, layers, heads = shapes[row["parameters_b"]]
        row |= {"hidden": hidden, "layers": layers, "heads": heads, "sequence": 2048, "vocabulary": 51200}
        row |= {"tensor": PER_NODE, "pipeline": row["model_ways"] // PER_NODE}
        seconds = _seconds(row, "A100-80", "8x200gbit", (row["micro_batch"],), recompute="full")
        work = Transformer(layers, hidden, heads, 2048, 51200).flops(row["batch"], "full") / row["gpus"] / 1e12
        what = f"GPT {row['parameters_b']} B"
        found.points.append(Point(what, f"{row['gpus']} GPUs", seconds, work / row["tflops_a_gpu"], None, work))
    return found


# Layers, hidden width and heads of MosaicML's GPTs, by their number of parameters; 2,048 tokens, a vocabulary of 50,368.
MPT = {
    0.125: (12, 768, 12), 0.356: (24, 1024, 16), 0.76: (24, 1536, 12), 1.316: (24, 2048, 16), 2.65: (32, 2560, 20),
    6.66: (32, 4096, 32), 12.85: (40, 5120, 40), 29.98: (48, 7168, 56), 64.9: (80, 8192, 64),
}  # fmt: skip
SET_ON_THESE = "two coefficients of sharded weights were set by hand between these rates of ZeRO-3 and FSDP"


def zero_3() -> Protocol:
    """FLOP/s a GPU of two GPTs whose weights are sharded over all GPUs."""
    found = Protocol("ZeRO-3, 2021: TFLOP/s a GPU, the shipped model of a step")
    shapes = {174.6: (96, 12288, 96), 529.6: (105, 20480, 128)}
    for row in rows(LAYOUTS["megatron-2021-days"]):
        if row["scheme"] == "zero3":
            layers, hidden, heads = shapes[row["parameters_b"]]
            row |= {"hidden": hidden, "layers": layers, "heads": heads, "sequence": 2048, "vocabulary": 51200}
            row |= {"tensor": 1, "pipeline": 1}
            more = {"recompute": "full", "sharding": 3, "overlap": True}
            seconds = _seconds(row, "A100-80", "8x200gbit", (row["micro_batch"],), **more)
            work = Transformer(layers, hidden, heads, 2048, 51200).flops(row["batch"], "full") / row["gpus"] / 1e12
            what = f"GPT {row['parameters_b']} B"
            found.points.append(Point(what, f"{row['gpus']} GPUs", seconds, work / row["tflops_a_gpu"], None, work))
    found.notes.append(SET_ON_THESE)
    return found


def fsdp(device: str) -> Protocol:
    """Tokens/s a GPU of GPTs whose weights are sharded; two micro-batches a step are assumed, and flash attention."""
    found = Protocol(f"FSDP on {device}: tokens/s a GPU, the shipped model of a step")
    for series in all_series("fsdp"):
        about = series.about
        if about["source"] != "mpt" or not about["machine"].startswith(device) or about["parameters_b"] not in MPT:
            continue
        layers, hidden, heads = MPT[about["parameters_b"]]
        for gpus, rate in series.points.items():
            micro_batch = int(about["micro_batches"][str(gpus)])
            row = {"hidden": hidden, "layers": layers, "heads": heads, "sequence": 2048, "vocabulary": 50368}
            row |= {"gpus": gpus, "batch": 2 * gpus * micro_batch, "tensor": 1, "pipeline": 1}
            network = "8x200gbit" if device.startswith("A100") else "8x400gbit"
            more = {"recompute": about["recompute"], "sharding": 3, "overlap": True, "flash": True}
            seconds = _seconds(row, device, network, (micro_batch,), **more)
            work = 2 * micro_batch * 2048.0
            found.points.append(Point(about["model"], f"{gpus} GPUs", seconds, work / rate, None, work))
    found.notes.append(SET_ON_THESE if device.startswith("A100") else "carried over from A100 by data sheets")
    return found


PROTOCOLS: Sequence[Callable[[], Protocol]] = (
    rates_2021, more_data_ways, recomputation, rates_2024, zero_3, lambda: fsdp("A100-40"), lambda: fsdp("H100"),
)  # fmt: skip
