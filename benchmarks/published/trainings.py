"""Predict layouts, whole trainings, memory and money: what is published of them, beside what formulas give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from guozhuang.cost import laws, memory
from guozhuang.cost.fit import relative_least_squares
from guozhuang.cost.transformer import Transformer

from .data_parallel import bert_steps
from .points import Point, Protocol, all_series, read, rows

LAYOUTS, OTHERS = read("layouts"), read("others")
DAY, HOUR, MINUTE = 86400.0, 3600.0, 60.0


def utilization() -> Protocol:
    """The model's FLOP utilization of four trainings, from their step times."""
    found = Protocol("MFU of four GPTs on A100, from the formula and their step times (%)")
    for row in rows(LAYOUTS["korthikanti"]):
        model = Transformer(row["layers"], row["hidden"], row["heads"], row["sequence"], row["vocabulary"])
        share = model.mfu(row["batch"] / row["selective_s"], row["gpus"], row["peak_tflops"] * 1e12)
        found.points.append(
            Point(f"GPT {row['parameters_b']} B", f"{row['gpus']} GPUs", 100 * share, row["mfu_percent"])
        )
    most = max(abs(p.predicted - p.published) for p in found.points)
    found.notes.append(f"largest difference {most:.2f} points")
    return found


def days() -> Protocol:
    """Days for 300 billion tokens: 8 operations a token and parameter, over GPUs times their rate."""
    found = Protocol("12 trainings in days: 8·tokens·parameters/(GPUs·FLOP/s)", target=0.03)
    for row in rows(LAYOUTS["megatron-2021-days"]):
        rate = row["gpus"] * row["tflops_a_gpu"] * 1e12
        took = 8 * row["tokens"] * row["parameters_b"] * 1e9 / rate / DAY
        found.points.append(Point(f"{row['scheme']} {row['parameters_b']} B", f"{row['gpus']} GPUs", took, row["days"]))
    found.notes.append(
        "days are published as whole numbers; the formula leaves attention's own operations out, 2 % of all"
    )
    return found


def bert_hours() -> Protocol:
    """BERT-Large pretraining end to end, from the rates of its two phases."""
    found = Protocol("BERT-Large end to end on 256 A100, hours: steps x seconds of a step", target=0.02)
    for training in OTHERS["training"]:
        took = 0.0
        for phase in rows(OTHERS["bert-phases"]):
            for series in all_series("bert"):
                if (series.about["precision"], series.about["sequence"]) == (training["precision"], phase["sequence"]):
                    took += laws.training_seconds(
                        phase["steps"] * phase["batch"], phase["batch"], bert_steps(series)[training["gpus"]]
                    )
        found.points.append(Point(f"bert-large {training['precision']}", "256 GPUs", took / HOUR, training["hours"]))
    return found


def bert_seconds_on_v100() -> float:
    """Return the seconds of BERT-Large's pretraining on one V100 (fp16), from the rates of its two phases."""
    rate = {
        s.about["sequence"]: s.points[1] for s in all_series("weak") if "V100-32 DGX-1" in s.name and "fp16" in s.name
    }
    return sum(p["steps"] * p["batch"] / rate[p["sequence"]] for p in rows(OTHERS["bert-phases"]))


def activation_memory() -> Protocol:
    """Activations of the first stage, to the last digit."""
    found = Protocol("activations of the fullest GPU, GiB: formulas", target=0.0)
    for row in rows(LAYOUTS["activation-memory"]):
        model = Transformer(row["layers"], row["hidden"], row["heads"], row["sequence"], row["vocabulary"])
        for parallel, recompute, column in ((False, "none", "none_gib"), (True, "selective", "selective_gib")):
            num_bytes = memory.activations(
                model, row["micro_batch"], pipeline=row["pipeline"], interleave=row["interleave"], tensor=row["tensor"],
                sequence_parallel=parallel, recompute=recompute,
            )  # fmt: skip
            found.points.append(Point(f"GPT {row['parameters_b']} B", recompute, num_bytes / memory.GIB, row[column]))
    return found


def budget() -> Protocol:
    """The price of the survey's machine: the sum of its parts."""
    found = Protocol("the survey's machine, RMB: the sum of its parts", target=0.0)
    total = sum(row["count"] * row["price"] for row in rows(OTHERS["budget"]))
    found.points.append(Point("4 x A100 40 GB", "sum", total, OTHERS["budget"]["total"]))
    modules = OTHERS["budget"]["memory_modules_in_the_text"]
    more = next(row for row in rows(OTHERS["budget"]) if row["part"].startswith("DDR4"))
    would = total + (modules - more["count"]) * more["price"]
    found.notes.append(
        f"right with {more['count']} memory modules; with the {modules} of its text it would be {would:,}"
    )
    return found


def failures() -> Protocol:
    """The mean time between failures on 16,384 GPUs, from that on 1,024."""
    found = Protocol("hours between failures: 1,024 GPUs -> 16,384, as 1/n")
    first, second = rows(OTHERS["failures"])
    took = laws.mean_time_between_failures(first["hours"] * first["gpus"], second["gpus"])
    found.points.append(Point("Llama 3", f"{second['gpus']} GPUs", took, second["hours"]))
    found.notes.append("the law is no prediction here: failures a GPU became rarer between the two trainings")
    return found


def data_ways() -> Protocol:
    """What 128 data ways add to a step divided by tensor ways: a time by the parameters of a GPU, from the other models."""
    found = Protocol("Megatron 2020: model ways alone -> 128 data ways, from the other models", "nothing added")
    each = list(rows(LAYOUTS["megatron-2020"]))
    for row in each:
        others = [other for other in each if other is not row]
        held = [(other["parameters_b"] / other["model_ways"],) for other in others]
        added = [other["a100_data_ms"] - other["a100_ms"] for other in others]
        coefficient = relative_least_squares(held, added)[0]
        took = row["a100_ms"] + coefficient * row["parameters_b"] / row["model_ways"]
        found.points.append(
            Point(f"GPT {row['parameters_b']} B", f"{row['gpus']} GPUs", took, row["a100_data_ms"], row["a100_ms"])
        )
        found.num_calibrating += 1
    return found


def strong_gpt() -> Protocol:
    """MFU of one model from 96 to 4,608 GPUs: without the interleaving, which is not published, only that it stays."""
    found = Protocol("Megatron 2024: MFU of 177 B, 96 GPUs -> 4,608, the same")
    first, second = rows(LAYOUTS["megatron-2024-strong"])
    found.points.append(Point("GPT 177 B", f"{second['gpus']} GPUs", first["mfu_percent"], second["mfu_percent"]))
    found.num_calibrating += 1
    return found


PROTOCOLS: Sequence[Callable[[], Protocol]] = (
    utilization, days, bert_hours, activation_memory, budget, failures,
    data_ways, strong_gpt,
)  # fmt: skip
