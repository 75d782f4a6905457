"""Compute every figure of docs/scaling.md.

    python -m benchmarks.scaling [NAME ...]   prints the blocks, or those of these names
    python -m benchmarks.scaling --write      puts them into docs/scaling.md

A block of the page stands below a line ``<!-- scaling: NAME -->``. Nothing is measured: published points
(benchmarks/published), the laws and the simulator of guozhuang/cost give the same text on every machine.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from guozhuang.cost import laws
from guozhuang.cost.collectives import collective_cost
from guozhuang.cost.describe import parse_cluster
from guozhuang.cost.fit import fit_scaling
from guozhuang.cost.hardware import device
from guozhuang.cost.simulate import simulate
from guozhuang.cost.spread import Spread
from guozhuang.cost.trace import Compute, Start, Trace, Wait

from .published import data_parallel, trainings
from .published.points import all_series, percent, rows, table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
MIB = 1 << 20
BERT_LARGE = 336e6  # parameters


def why() -> list[str]:
    one = trainings.bert_seconds_on_v100()
    hours = {p.what.split()[-1]: p.predicted for p in trainings.bert_hours().points}
    lines = [
        ["BERT-Large pretraining on", "takes", "from"],
        ["1 V100, fp16", f"{one / 86400:.1f} days", "rates of one GPU"],
    ]
    lines += [["256 A100, fp16", f"{hours['fp16']:.2f} h", "published rates; end to end 1.2 h were published"]]
    lines += [["256 A100, tf32", f"{hours['tf32']:.2f} h", "published rates; end to end 2.4 h were published"]]
    lines += [
        ["1,472 V100, fp16", f"{one / 1472 / 60:.0f} min", "one V100, if scaling were perfect; 47 min were published"]
    ]
    return table(lines, 3)


def bert_1472() -> list[str]:
    told = trainings.OTHERS["bert-1472"]
    n, phases = told["gpus"], list(rows(trainings.OTHERS["bert-phases"]))
    steps = sum(phase["steps"] for phase in phases)
    compute = trainings.bert_seconds_on_v100() / n
    cluster = parse_cluster(f"{n // told['gpus_a_node']}xdgx-2")
    exchange = steps * collective_cost("all_reduce", 2 * BERT_LARGE, range(n), cluster).seconds
    # LAMB reads and writes weights, gradients, two moments and the copy in 32 bits, and once more for the norms.
    optimizer = steps * 56 * BERT_LARGE / device("V100-32").bytes_per_s
    spread = Spread(tuple(statistics.NormalDist(1, 0.03).quantiles(101)))
    slowest = compute * (spread.slowest(n) - 1)
    published = told["minutes"] * 60.0
    parts = [
        ("work of one GPU, divided by 1,472", compute), ("averaging gradients in 16 bits, nothing hidden", exchange),
        ("optimizer (LAMB), on every GPU whole", optimizer), ("waiting for the slowest of 1,472, steps of 3 % spread", slowest),
    ]  # fmt: skip
    total = sum(seconds for _, seconds in parts)
    lines = [["", "minutes"], *([name, f"{seconds / 60:.1f}"] for name, seconds in parts)]
    lines += [["sum", f"{total / 60:.1f}"], ["published", f"{published / 60:.0f}"]]
    lines += [["not explained by these", f"{(published - total) / 60:.1f}"]]
    lines += [
        ["efficiency, published", percent(compute / published, 0)],
        ["efficiency, by the sum", percent(compute / total, 0)],
    ]
    return table(lines)


def near_linear() -> list[str]:
    lines = [["", "GPUs", "efficiency", "from", "serial share (Karp-Flatt)"]]
    for series in all_series("bert"):
        first = 8
        for n in (64, 256):
            speed_up = series.points[n] / series.points[first]
            share = laws.karp_flatt(speed_up, n / first)
            lines.append([series.name, str(n), percent(speed_up / (n / first), 0), f"{first} GPUs", percent(share, 2)])
    for series in all_series("weak"):
        if min(series.points) == 16:
            speed_up = series.points[128] / series.points[16]
            lines.append(
                [series.name, "128", percent(speed_up / 8, 0), "16 GPUs", percent(laws.karp_flatt(speed_up, 8), 2)]
            )
    for series in all_series("minutes"):
        for n in (64, 256, 1024):
            speed_up = series.points[16] / series.points[n]
            share = laws.karp_flatt(speed_up, n / 16)
            lines.append([series.name, f"{n:,}", percent(speed_up / (n / 16), 0), "16 GPUs", percent(share, 2)])
    for series in all_series("efficiency"):
        lines += [[series.name, str(n), percent(value, 0), "1 GPU", ""] for n, value in series.points.items()]
    ratio = trainings.OTHERS["ddp-paper"]
    lines.append(
        ["DDP's paper, shared cluster (read off a figure)", "256", percent(1 / ratio["step_ratio"], 0), "1 GPU", ""]
    )
    return table(lines)


def when() -> list[str]:
    lines = [["", "GPUs", "efficiency", "one more of them adds"]]
    for series in all_series("strong"):
        for before, n in zip(series.points, list(series.points)[1:], strict=False):
            gain = (series.points[n] - series.points[before]) / (n - before) / series.points[1]
            lines.append(
                [series.name, str(n), percent(series.points[n] / n / series.points[1], 0), f"{gain:.2f} GPUs' worth"]
            )
    series = next(s for s in all_series("weak") if s.about["model"] == "resnet50" and s.about["quantity"] == "step_s")
    fitted = fit_scaling(series.times)
    sample_s = series.about["without_ddp_s"] / 32
    lines += [["", "", "", ""], ["resnet50 on V100, DDP: smallest batch a GPU that keeps", "80 %", "90 %", "95 %"]]
    for n in (2, 16, 256):
        exposed = fitted.step_s(n) - series.about["without_ddp_s"]
        needed = [laws.isoefficiency_batch(share, exposed, sample_s) for share in (0.8, 0.9, 0.95)]
        lines.append([f"on {n} GPUs", *(str(math.ceil(batch)) for batch in needed)])
    return table(lines)


def weak_strong() -> list[str]:
    """One rank needs 100 ms for 32 samples, 10 ms of which no batch changes; a ring of n ranks adds 5 ms times 2(n-1)/n."""
    fixed, sample, ring = 0.010, 0.090 / 32, 0.005
    lines = [
        [
            "ranks",
            "step, 32 each",
            "weak efficiency",
            "step, 32 in all",
            "strong efficiency",
            "Amdahl's f",
            "Gustafson's f",
        ]
    ]
    for n in (1, 2, 4, 8, 16, 32):
        added = ring * 2 * (n - 1) / n
        one, weak, strong = 0.100, 0.100 + added, fixed + 32 / n * sample + added
        share = 1.0 if n == 1 else 1 - laws.karp_flatt(one / strong, n)
        lines.append([
            str(n), f"{weak * 1e3:.1f} ms", percent(laws.weak_efficiency(one, weak), 0), f"{strong * 1e3:.1f} ms",
            percent(laws.strong_efficiency(one, strong, n), 0), f"{share:.3f}", f"{laws.share_on_n(share, n):.3f}",
        ])  # fmt: skip
    return table(lines, 0)


def critical() -> list[str]:
    lines = [["batch / noise scale", "steps / least", "samples / least", "twice the batch: steps"]]
    noise = laws.CriticalBatch(noise_batch=1.0, least_steps=1.0)
    for batch in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8):
        gain = noise.steps(batch) / noise.steps(2 * batch)
        lines.append([f"{batch:g}", f"{noise.steps(batch):.2f}", f"{noise.samples(batch):.2f}", f"1/{gain:.2f}"])
    return table(lines, 0)


def _bucketed(n: int, num_bytes: float, cap: float, step_s: float, bucket_s: float) -> Trace:
    """Return the trace of a step whose gradients arrive evenly in backward, and are averaged in buckets."""
    k = max(1, math.ceil(num_bytes / cap))
    events: list[Compute | Start | Wait] = [Compute("forward", 0.3 * step_s)]
    for i in range(k):
        events.append(Compute("backward", 0.65 * step_s / k))
        events.append(Compute("exchange", bucket_s))
        events.append(Start(i, "all_reduce", int(num_bytes / k), tuple(range(n))))
    events += [*(Wait(i) for i in range(k)), Compute("optimizer", 0.05 * step_s)]
    return Trace(0, n, tuple(events), 1)


def _step_s(where: str, n: int, num_bytes: float, cap_mib: float, step_s: float, bucket_s: float) -> float:
    trace = _bucketed(n, num_bytes, cap_mib * MIB, step_s, bucket_s)
    return simulate(
        trace, parse_cluster(where.format(n=n, nodes=n // 8)), costs=collective_cost, num_repetitions=2
    ).step_s


V100 = "{nodes}xdgx-1"
STEP_S = {"resnet50": 0.097, "resnet101": 0.162}  # without DDP: scaling.toml


def _caps_rows() -> list[dict[str, float | str]]:
    return list(rows(trainings.OTHERS["bucket-caps"]))


@lru_cache(maxsize=1)
def bucket_seconds() -> float:
    """Return what a bucket costs each GPU besides its bytes: from one published row, ResNet-50 on 8 GPUs."""
    first = _caps_rows()[0]
    num_bytes, step_s = float(first["parameters_m"]) * 4e6, STEP_S["resnet50"]
    large = _step_s(V100, 8, num_bytes, 25, step_s, 0.0)
    more = large / (1 - float(first["slower_percent"]) / 100) - _step_s(V100, 8, num_bytes, 1, step_s, 0.0)
    return more / (math.ceil(num_bytes / MIB) - math.ceil(num_bytes / (25 * MIB)))


def caps() -> list[str]:
    each = bucket_seconds()
    lines = [["25 -> 1 MiB makes slower by", "GPUs", "published", "simulated"]]
    for number, row in enumerate(_caps_rows()):
        n, num_bytes, step_s = int(row["gpus"]), float(row["parameters_m"]) * 4e6, STEP_S[str(row["model"])]
        small, large = (_step_s(V100, n, num_bytes, cap, step_s, each) for cap in (1, 25))
        found = "fitted" if number == 0 else percent(1 - large / small)
        lines.append([str(row["model"]), str(n), f"{row['slower_percent']} %", found])
    lines = [f"a bucket costs {each * 1e6:.0f} us of each GPU, fitted to one row", *table(lines), ""]
    sizes = (1, 2, 5, 10, 25, 50, 100)
    for name, where, num_bytes, step_s, cost, ns in (
        (
            "ResNet-50, V100, NCCL, 4 x 100 Gb/s InfiniBand a node",
            V100,
            102.4e6,
            0.097,
            each,
            (8, 16, 64, 256),
        ),
        (
            "BERT-base, CPU hosts, gloo, 10 Gb/s and 0.1 ms",
            "{n}x8cores,10gbit/0.1ms,ranks=1",
            440e6,
            4.0,
            50e-6,
            (4, 8, 16, 32, 64),
        ),
    ):
        cells = [["ranks", *(f"{cap} MiB" for cap in sizes), "best"]]
        for n in ns:
            found = [_step_s(where, n, num_bytes, cap, step_s, cost) for cap in sizes]
            best = min(range(len(sizes)), key=found.__getitem__)
            cells.append([str(n), *(f"{t * 1e3:.1f}" for t in found), f"{sizes[best]} MiB"])
        lines += [f"{name}: ms a step by the bucket cap", *table(cells, 0), ""]
    return lines[:-1]


def laws_table() -> list[str]:
    return table(data_parallel.laws_compared())


def calibration() -> list[str]:
    return [*table(data_parallel.by_calibration()), "", *table(data_parallel.bert_by_calibration())]


def failures() -> list[str]:
    lines = [["GPUs", "hours between failures", "checkpoint of 60 s every", "useful time, 5 min to restart"]]
    for row in rows(trainings.OTHERS["failures"]):
        mean = row["hours"] * 3600
        every = laws.young_interval(60, mean)
        useful = laws.useful_share(60, every, mean, 300)
        lines.append([f"{row['gpus']:,}", f"{row['hours']}", f"{every / 60:.0f} min", percent(useful, 0)])
    return table(lines, 0)


BLOCKS: dict[str, Callable[[], list[str]]] = {
    "why": why, "near-linear": near_linear, "when": when, "weak-strong": weak_strong, "bert-1472": bert_1472, "caps": caps,
    "critical": critical, "laws": laws_table, "calibration": calibration, "failures": failures,
}  # fmt: skip


def block(name: str) -> str:
    """Return a block as it stands in the page, between the fences."""
    return "\n".join(line.rstrip() for line in BLOCKS[name]()) + "\n"


def with_blocks(text: str, make: Callable[[str], str] = block) -> str:
    """Return a page with the text of each block made anew."""
    pattern = r"(<!-- scaling: ([\w-]+) -->\n```text\n)(.*?)(```)"
    return re.sub(pattern, lambda m: m[1] + make(m[2]) + m[4], text, flags=re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BLOCKS)}; all without")
    parser.add_argument("--write", action="store_true", help=f"put them into {PAGE.name}")
    given = parser.parse_args(argv)
    if unknown := set(given.names) - BLOCKS.keys():
        parser.error(f"no such block: {', '.join(sorted(unknown))}")
    if given.write:
        PAGE.write_text(with_blocks(PAGE.read_text()))
        return 0
    for name in given.names or BLOCKS:
        print(f"{name}\n\n{block(name)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
