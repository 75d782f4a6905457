"""Race Accelerate's own training on CPUs, on gloo, against the same script with one variable: samples/s, in alternating rounds.

    python benchmarks/accelerate_cpu.py DATA [--sizes tiny,mini,base] [--rounds 9] [--ranks 2] [--batch-size 4]
        [--contenders gloo,ddp,sharded,none] [--json FILE]

DATA is the file that examples/accelerate_text.py takes. Its training is what is timed: BERT with dropout, AdamW, a
schedule, batches padded to 64 tokens. Every contender is a training of its own, in its own processes, started as a
user would: gloo by torchrun, a strategy by ``GUOZHUANG_STRATEGY=... accelerate launch --cpu --num_processes N``;
under none the ranks exchange nothing. All of them live at the same time and take turns: one takes some steps while
the others wait, round after round, so that a change of the machine's speed meets all. A turn lasts from the word to
begin until its slowest rank is done. A round's ratio is taken within the round; the median over rounds is printed,
with the least and the largest. Steps before the first round are not timed; the mean loss over the ranks in them is
printed, which tells whether it is the same training.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONTENDERS = ("gloo", "ddp", "sharded", "none")
STEPS = {"tiny": 40, "mini": 10, "base": 3}  # of a turn
# Least ratios that are asked of BERT-base with 2 ranks.
ASKED = {("sharded", "gloo"): 1.2, ("ddp", "none"): 0.97}
PAIRS = (*ASKED, ("ddp", "gloo"), ("sharded", "none"))
START_S = 300.0  # how long the ranks of a contender may take until they are ready


class Contender:
    """A training in its own processes.

    Args:
        name: "gloo", or a strategy.
        size: of the model.
        data: the file.
        options: of the command line.
        folder: for the address and what the ranks print.
    """

    def __init__(self, name: str, size: str, data: Path, options: argparse.Namespace, folder: Path) -> None:
        self.name = name
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        environment = dict(os.environ)
        # The same threads for all: both launchers leave a number that is given as it is.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // options.ranks)))
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment.pop("GUOZHUANG_STRATEGY", None)
        if name != "gloo":
            environment["GUOZHUANG_STRATEGY"] = name
            launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu"]
            launch += ["--num_processes", str(options.ranks)]
        address = str(folder / f"{name}-{size}")
        self._log = folder / f"{name}-{size}.log"
        told = ["--model", size, "--batch_size", str(options.batch_size), "--pad_to_max_length", "--epochs", "1"]
        script = str(Path(__file__).with_name("accelerate_rank.py"))
        words = [sys.executable, *launch, script, address, str(data), *told]
        self._listener = Listener(address, "AF_UNIX")
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self._num, self._ranks = options.ranks, list[Connection]()
        until = time.monotonic() + START_S
        while len(self._ranks) < self._num:
            self._accept(until)

    def _accept(self, until: float) -> None:
        listening: Any = self._listener._listener._socket  # type: ignore[attr-defined]
        while not wait([listening], timeout=1.0):
            if self._process.poll() is not None or time.monotonic() > until:
                self.end()
                raise SystemExit(f"{self.name} did not begin; its ranks printed:\n{self._log.read_text()[-4000:]}")
        rank = self._listener.accept()
        num = rank.recv()
        self._ranks.append(rank)
        assert num == self._num, f"{self.name}: {num} ranks train together"

    def turn(self, steps: int) -> tuple[float, float]:
        """Take steps on all ranks. Return the seconds until the slowest was done, and the mean loss."""
        start = time.perf_counter()
        for rank in self._ranks:
            rank.send(steps)
        losses = [rank.recv() for rank in self._ranks]
        return time.perf_counter() - start, losses[0]

    def end(self) -> None:
        """End the ranks and the launcher."""
        for rank in self._ranks:
            rank.send(0)
            rank.close()
        self._listener.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(30)


def race(size: str, data: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Let all contenders train a model of one size in turns."""
    steps = options.steps or STEPS[size]
    contenders: list[Contender] = []
    losses, speeds = {}, {name: [] for name in options.contenders}
    try:
        for name in options.contenders:
            contenders.append(Contender(name, size, data, options, folder))
            _, losses[name] = contenders[-1].turn(options.warm_up)
        for r in range(options.rounds):
            k = r % len(contenders)
            for each in contenders[k:] + contenders[:k]:
                seconds, _ = each.turn(steps)
                speeds[each.name].append(steps * options.batch_size * options.ranks / seconds)
    finally:
        for each in contenders:
            each.end()
    return {"samples_per_s": speeds, "loss": losses}


def report(results: dict[str, Any], ranks: int) -> None:
    """Print a table for each size."""
    print(f"{ranks} ranks; samples/s are medians; ratios are medians of the rounds' ratios (min .. max)")
    for size, result in results.items():
        speeds = result["samples_per_s"]
        print(f"\nBERT-{size}")
        for name, found in speeds.items():
            print(f"  {name:10}{statistics.median(found):9.2f} samples/s   loss {result['loss'][name]:.6f}")
        for over, under in PAIRS:
            if over in speeds and under in speeds:
                ratios = [a / b for a, b in zip(speeds[over], speeds[under], strict=True)]
                text = f"{statistics.median(ratios):.3f} ({min(ratios):.2f} .. {max(ratios):.2f})"
                if size == "base" and ranks == 2 and (over, under) in ASKED:
                    text += f", asked {ASKED[over, under]}"
                print(f"  {over + ' / ' + under:18} {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a .csv or .tsv file, or .gz of one: label, text")
    parser.add_argument("--sizes", type=lambda text: text.split(","), default=["base"])
    parser.add_argument("--contenders", type=lambda text: text.split(","), default=list(CONTENDERS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4, help="samples of a rank in a step")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, help=f"of a turn (default: {STEPS})")
    parser.add_argument("--warm-up", type=int, default=8, help="steps before the first round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in options.sizes:
            results[size] = race(size, options.data.resolve(), options, Path(folder))
    report(results, options.ranks)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
