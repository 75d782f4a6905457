"""Race exchanges on links of a given rate and delay: 4 hosts, BERT-mini with AdamW, 8 x 64 tokens a rank and step.

    python -m benchmarks.links [--links 1gbit/0.1,100mbit/0.5,100mbit/10] [--contestants NAMES] [--rounds 3] [--json FILE]
    python -m benchmarks.links --sweep [--rates unshaped,10gbit,1gbit,100mbit] [--models tiny,mini,small] [--budget-s 1500]

Needs root: the hosts are network namespaces of this machine (tests/hosts/network.py), each with one rank of one thread; a link
is RATE/DELAY, the delay in milliseconds one way. PyTorch's DDP, the same with its fp16 hook, `none` (no communication: the
bound) and strategies of this project take turns in the same processes, round after round (links_rank.py). A ratio is taken
within a round, and the median over rounds is printed, with the bytes that one host puts on its link and the processor time that
one rank takes per step.

What begins with whole gradients or averages for some steps (Warmup, QAdam, start_step) is raced as it is after those steps; for
others that begin differently `--warmup NAME=STEPS` makes them take so many untimed steps. What sends every so many steps is
timed over whole periods (`--period NAME=STEPS` where it does not say its period by itself). Strategies that need processes
besides the ranks, such as servers, are refused.

All ranks share the processors of this machine: where 4 ranks run on 2 cores, a code's processor time counts double, and a
ratio to `none` is worse than on hosts of their own.

`--sweep` prints for each rate and model size the fastest exchange, and where plain `ddp` is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.links_rank import TORCH, TORCH_FP16, Plan
from guozhuang.strategies import STRATEGIES, WithExchange
from tests.hosts.network import Hosts, missing, run_everywhere

RANKS = 4
NONE, PLAIN = "none", "ddp"
REFERENCES = (NONE, TORCH, TORCH_FP16)
#: Strategies raced by default, those that there are.
GRADIENTS = (
    PLAIN, "sparse-rows", "sparse-rows8", "fp16", "bf16", "quantize8", "quantize4", "onebit", "topk", "powersgd",
    "qadam", "onebit-adam",
)  # fmt: skip
WEIGHTS = (
    "local-sgd", "overlapped-local-sgd", "diloco", "decentralized", "decentralized-pairs", "low-precision-decentralized",
    "async-model-average",
)  # fmt: skip
#: Those that count as exact or of 8 bits an element.
EXACT_OR_8_BITS = (PLAIN, "sparse-rows", "sparse-rows8", "fp16", "bf16", "quantize8", "sharded", "parameter-server")
#: By link: best of the above / torch DDP, best of all / torch DDP, best of all / none.
ASKED = {"1gbit/0.1": (1.6, 2.2, 0.9), "100mbit/0.5": (3.2, 12.0, 0.8), "100mbit/10": (3.2, 12.0, 0.8)}
UNSHAPED = "unshaped"
#: Words for all ranks on one host, in place of a rate.
LOCAL = ("shm", "gloo")
_PAYS = 1.05  # a gain below this is noise
_START_S = 40.0  # until 4 ranks have imported everything

Turns = dict[str, list[dict[str, Any]]]


def run(link: str, plan: Plan, num_ranks: int = RANKS) -> dict[str, Turns]:
    """Start the hosts of a link and race on them; turns by model and contestant.

    On the link "shm" or "gloo" all ranks are on one host, and their collectives on that backend; else each has a host.

    Raises:
        AssertionError: a rank failed, or did not end in time; the text has what all of them printed.
    """
    rate, _, delay = link.partition("/")
    root = Path(__file__).resolve().parents[1]
    env = os.environ | {"PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "eth0"}
    local = rate in LOCAL
    told = json.dumps(dataclasses.asdict(dataclasses.replace(plan, backend=rate if local else "gloo")))
    command = [sys.executable, "-m", "benchmarks.links_rank", told, f"/proc/{os.getpid()}/fd/2"]
    ranks_of_hosts = [num_ranks] if local else [1] * num_ranks
    with Hosts(len(ranks_of_hosts), "" if local or rate == UNSHAPED else rate, float(delay or 0)) as hosts:
        # A turn that is longer than was expected of it may pass the budget.
        printed = run_everywhere(hosts, ranks_of_hosts, command, env, timeout_s=1.5 * plan.budget_s + 600)
    found: dict[str, Turns] = next(
        json.loads(line.removeprefix("FOUND ")) for line in printed[0].splitlines() if line.startswith("FOUND ")
    )
    return found


def median(turns: Turns, name: str, key: str = "samples_per_s") -> float | None:
    """The median over a contestant's turns; None if it had none."""
    return statistics.median(float(turn[key]) for turn in turns[name]) if turns.get(name) else None


def ratio(turns: Turns, over: str, under: str) -> tuple[float, float, float] | None:
    """Median, least and greatest of the rounds' ratios of speeds; None if they had no round together."""
    a, b = ({turn["round"]: float(turn["samples_per_s"]) for turn in turns.get(name, [])} for name in (over, under))
    found = [a[number] / b[number] for number in a if number in b]  # a contestant may have missed a round
    return (statistics.median(found), min(found), max(found)) if found else None


def best(turns: Turns, names: Iterable[str]) -> str | None:
    """The fastest of the names."""
    speeds = {name: speed for name in names if (speed := median(turns, name)) is not None}
    return max(speeds, key=lambda name: speeds[name]) if speeds else None


def table(turns: Turns) -> list[str]:
    """Lines of Markdown: a row for each contestant."""
    common = min((len(turn["losses"]) for each in turns.values() for turn in each), default=0)
    lines = [
        f"| exchange | samples/s | / {TORCH} (min .. max) | / fp16 hook | / none | MB sent a step | CPU ms a step "
        f"| loss of step {common} | loss at the end (after steps) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, each in turns.items():
        if not each:
            lines.append(f"| {name} | not in the time that was given | | | | | | | |")
            continue
        cells = [name, f"{median(turns, name):.1f}"]
        for under in (TORCH, TORCH_FP16, NONE):
            found = ratio(turns, name, under)
            spread = f" ({found[1]:.2f} .. {found[2]:.2f})" if found and under == TORCH else ""
            cells.append(f"{found[0]:.2f}{spread}" if found else "")
        sent, cpu = median(turns, name, "sent_bytes_per_step"), median(turns, name, "cpu_s_per_step")
        cells += [f"{(sent or 0) / 1e6:.2f}", f"{1e3 * (cpu or 0):.0f}", f"{each[0]['losses'][common - 1]:.4f}"]
        cells.append(f"{each[-1]['losses'][-1]:.4f} ({len(each[-1]['losses'])})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdict(link: str, turns: Turns) -> list[str]:
    """What was asked of a link, and what was found."""
    ours = [name for name in turns if name not in REFERENCES]
    sides = (
        ("best exact or 8-bit", [name for name in ours if name.partition("@")[0] in EXACT_OR_8_BITS], TORCH),
        ("best of all", ours, TORCH),
        ("best of all", ours, NONE),
    )
    lines = []
    for (what, names, under), asked in zip(sides, ASKED.get(link, (None,) * 3), strict=True):
        name = best(turns, names)
        found = ratio(turns, name, under) if name else None
        if found is None:
            continue
        goal = "" if asked is None else f", asked {asked}: {'reached' if found[0] >= asked else 'NOT reached'}"
        lines.append(f"{what} / {under}: {found[0]:.2f} ({name}){goal}")
    return lines


def cell(turns: Turns, names: Sequence[str]) -> str:
    """The fastest of some exchanges, against plain ddp."""
    plain, fastest = median(turns, PLAIN), best(turns, names)
    others = best(turns, [name for name in names if name != PLAIN])
    if plain is None or others is None:
        return f"{fastest or 'none'} alone had time"
    gain = (median(turns, others) or 0.0) / plain
    return f"**{others}** {gain:.2f} x" if gain >= _PAYS else f"ddp ({others} {gain:.2f} x: does not pay)"


def sweep(options: argparse.Namespace, plan: Plan) -> dict[str, dict[str, Turns]]:
    """Race on all rates, the fastest first, whose time that is left goes to the slower ones; print the tables."""
    end = time.monotonic() + options.budget_s
    rates, found = options.rates.split(","), {}
    for done, rate in enumerate(rates):
        budget_s = (end - time.monotonic()) / (len(rates) - done) - _START_S
        found[rate] = run(rate, dataclasses.replace(plan, budget_s=max(budget_s, 1.0)))
        save(options.json, found)
    for what, names in (
        ("gradient exchanges", [name for name in plan.contestants if name in GRADIENTS]),
        ("all", [name for name in plan.contestants if name not in REFERENCES]),
    ):
        print(f"\nThe fastest of {what}, against plain ddp ({', '.join(names)}):\n")
        print(f"| link | {' | '.join(f'BERT-{size}' for size in plan.models)} |\n|{'---|' * (1 + len(plan.models))}")
        for rate, by_size in found.items():
            print(f"| {rate} | {' | '.join(cell(by_size[size], names) for size in plan.models)} |")
    for rate, by_size in found.items():
        for size, turns in by_size.items():
            print(f"\n{rate}, BERT-{size}\n\n" + "\n".join(table(turns)))
    return found


def save(path: Path | None, found: dict[str, dict[str, Turns]]) -> None:
    """Write what is there so far."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def counts(pairs: list[str]) -> dict[str, int]:
    """Read NAME=STEPS."""
    return {name: int(number) for name, _, number in (pair.partition("=") for pair in pairs)}


def parse() -> argparse.Namespace:
    """Read the command line."""
    there = [name for name in (*GRADIENTS, *WEIGHTS) if name in STRATEGIES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--links", default=",".join(ASKED), help="RATE/DELAY, as tc writes rates; the delay in ms, one way"
    )
    parser.add_argument(
        "--contestants",
        default=",".join((*REFERENCES, *there)),
        help="strategies, by name; NAME@MIB: with such buckets",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn-s", type=float, default=8.0, help="seconds of timed steps in a turn")
    parser.add_argument("--max-steps", type=int, default=30, help="timed steps of a turn, but at least a period")
    parser.add_argument("--models", default="mini", help="sizes of BERT: tiny, mini, small, base")
    parser.add_argument("--batch", type=int, default=8, help="samples a rank and step")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--unfused", action="store_true", help="AdamW of all contestants as a loop over parameters")
    parser.add_argument("--warmup", action="append", default=[], metavar="NAME=STEPS", help="untimed steps")
    parser.add_argument("--period", action="append", default=[], metavar="NAME=STEPS", help="time multiples of it")
    parser.add_argument("--budget-s", type=float, default=1500.0, help="of each link, or of the whole sweep")
    parser.add_argument("--sweep", action="store_true", help="rates x models: the fastest exchange of each")
    parser.add_argument("--rates", default=f"{UNSHAPED},10gbit,1gbit,100mbit", help="of the sweep, the fastest first")
    parser.add_argument("--json", type=Path, help="write all turns there")
    options = parser.parse_args()
    known = {*REFERENCES, *STRATEGIES}
    exchanging = [name for name, one in STRATEGIES.items() if isinstance(one.prepare, WithExchange)]
    for told in options.contestants.split(","):
        name, _, cap = told.partition("@")
        if cap and (not cap.isdecimal() or name not in (TORCH, TORCH_FP16, PLAIN, *exchanging)):
            parser.error(f"{told!r}: a cap of the buckets is a number of MiB, for DDP's, ddp and exchanges")
        if name not in known or (name in STRATEGIES and STRATEGIES[name].one_process):
            parser.error(f"{name!r} cannot be raced on {RANKS} hosts; there are {', '.join(sorted(known))}")
    return options


def main() -> None:
    options = parse()
    if told := missing(delay=True):
        sys.exit(f"hosts cannot be made: {told}")
    plan = Plan(
        models=options.models.split(","),
        contestants=options.contestants.split(","),
        rounds=options.rounds,
        turn_s=options.turn_s,
        max_steps=options.max_steps,
        warmup_s=1.0,
        warmups=counts(options.warmup),
        periods=counts(options.period),
        budget_s=options.budget_s,
        batch=options.batch,
        tokens=options.tokens,
        fused=not options.unfused,
    )
    if options.sweep:
        if options.models == "mini":
            plan = dataclasses.replace(plan, models=["tiny", "mini", "small"])
        sweep(options, plan)
        return
    found: dict[str, dict[str, Turns]] = {}
    for link in options.links.split(","):
        found[link] = run(link, plan)
        save(options.json, found)
        for size, turns in found[link].items():
            print(f"\n{link}, BERT-{size}, {options.batch} x {options.tokens} tokens a rank\n")
            print("\n".join([*table(turns), "", *verdict(link, turns)]), flush=True)


if __name__ == "__main__":
    main()
