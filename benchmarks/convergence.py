"""Final accuracy of every strategy on real text after the same number of samples, against `ddp`, over several seeds.

    python -m benchmarks.convergence [--data FOLDER] [--strategies ddp,quantize8] [--seeds 3] [--budget-s 900] [--json FILE]

Two ranks with one thread each train a small BERT from scratch on the text workload: the embedded docstrings, or what a
folder holds: train*.csv(.gz) and test.csv(.gz) with rows of label, title, description (AG News). The learning rate
rises over the first tenth of the steps and falls to 0. Every strategy sees the same samples in the same order, from the
same weights, given the seed. `model.eval()` is called on every rank, where exchanges of weights bring the ranks to one
model; then rank 0 measures accuracy on held-out samples.

Processes are started once for a seed and run its strategies one after the other, `ddp` first; one that fails, or that
ends nothing within --limit-s, is said in the table, and the rest goes on in new processes. Seeds go one after the other
too, so that a budget that ends early leaves whole seeds. The difference to ddp is the mean over seeds of differences
within a seed, in points (percent of the held-out samples), `deviation` the standard deviation of these differences,
`worst` the seed that loses most.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

MAX_LENGTH, VOCABULARY, NUM_HELD_OUT = 40, 4000, 4000
RISE = 0.1  # share of the steps in which the learning rate grows
GRACE_S = 10.0  # for the other ranks to end when one has failed


def names_that_train() -> list[str]:
    from guozhuang.strategies import STRATEGIES
    from guozhuang.world.layout import HYBRID, OWN_AXIS

    others = ("ddp", HYBRID, *OWN_AXIS)  # which divide the model compute what one process does
    found = [one for one in STRATEGIES.values() if one.trains and not one.one_process and one.name not in others]
    return ["ddp", *(one.name for one in sorted(found, key=lambda one: one.exact))]  # what is exact last


def workload_options(data: Path | None, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    told: dict[str, Any] = {
        "model": options.model,
        "batch_size": options.batch_size,
        "lr": options.lr,
        "fused": True,  # the same update, in a third of the time
        "max_length": MAX_LENGTH,
        "vocab_size": VOCABULARY,
        "eval_limit": NUM_HELD_OUT,
    }
    if data is None:
        return told | {"eval_fraction": 0.2}
    train = sorted(path for path in data.iterdir() if path.name.startswith("train") and ".csv" in path.name)
    test = sorted(path for path in data.iterdir() if path.name.startswith("test.csv"))
    if not train or not test or len({path.suffix for path in train}) > 1:
        sys.exit(f"{data} must hold train*.csv and test.csv, or both with .gz at the end")
    joined = folder / f"train.csv{'.gz' if train[0].suffix == '.gz' else ''}"
    joined.write_bytes(b"".join(path.read_bytes() for path in train))  # parts of a .gz file may follow each other
    return told | {"data": str(joined), "eval_data": str(test[0]), "header": "no"}


def train(name: str, seed: int, told: dict[str, Any], steps: int, cache: Path) -> dict[str, float]:
    """One strategy on this rank, from the start to the measured accuracy."""
    import torch
    import torch.distributed as dist

    from guozhuang import data, strategies, world
    from guozhuang.lab.measure import digest
    from guozhuang.sharding.whole import full_weights, is_divided, load_whole
    from guozhuang.workloads import load

    here = world.current()
    assert here is not None
    began, cpu = time.perf_counter(), time.process_time()
    workload = load("text", told | {"seed": 0}, cache)  # the same held-out samples for all seeds
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    bare = workload.model()
    model, optimizer = strategies.prepare(bare, workload.optimizer(bare), name)
    loader = data.loader(
        workload.train,
        workload.batch_size,
        seed=seed,
        ends="drop",
        drop_last=True,
        collate_fn=workload.collate,
        world=here,
    )
    top = [float(group["lr"]) for group in optimizer.param_groups]
    done, losses = 0, []
    while done < steps:
        for batch in loader:
            share = min((done + 1) / (RISE * steps), (steps - done) / ((1 - RISE) * steps))
            for group, lr in zip(optimizer.param_groups, top, strict=True):
                group["lr"] = lr * share
            loss = workload.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            done += 1
            if done == steps:
                break
    trained_s = time.perf_counter() - began
    model.eval()  # on every rank: where weights are exchanged the ranks agree on them now
    whole = full_weights(bare)
    digests: list[Any] = [None] * here.size
    dist.all_gather_object(digests, digest(whole.values()))
    found = {}
    if here.rank == 0:
        torch.set_num_threads(here.size)
        measured = load_whole(workload.model(), whole, bare) if is_divided(bare) else bare
        assert workload.evaluate is not None
        found = {key: float(value) for key, value in workload.evaluate(measured).items()}
        torch.set_num_threads(1)
    dist.barrier()
    last = [float(loss) for loss in losses[-20:]]
    return found | {
        "train loss": sum(last) / len(last),
        "equal": float(len(set(digests)) == 1),
        "training s": trained_s,
        "processor s": time.process_time() - cpu,
        "all s": time.perf_counter() - began,
    }


def rank_main(rank: int, size: int, port: int, names: list[str], job: dict[str, Any]) -> None:
    """One rank of one seed: its strategies one after the other."""
    folder = Path(job["folder"])
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in env.items()}, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    warnings.simplefilter("ignore")
    code = 0
    try:
        import torch.distributed as dist

        from guozhuang import world

        world.init(timeout_s=120.0)
        longest_s = 0.0
        for name in names:
            goes_on = [time.time() + longest_s < job["deadline"]]
            dist.broadcast_object_list(goes_on, src=0)
            if not goes_on[0]:
                break
            result = train(name, job["seed"], job["told"], job["steps"], folder / "cache")
            longest_s = max(longest_s, result["all s"])
            gc.collect()  # hooks and buckets of this one must not live on beside the next
            if rank == 0:
                draft = folder / f".{job['seed']}-{name}"
                draft.write_text(json.dumps(result))
                draft.rename(folder / f"result-{job['seed']}-{name}.json")
        if rank == 0:
            (folder / f"end-{job['seed']}").touch()
        world.shutdown()
    except BaseException:
        (folder / f"error-{job['seed']}-{rank}").write_text(f"{time.monotonic()}\n{traceback.format_exc()}")
        code = 1
    os._exit(code)  # nothing of interest follows, and what a failed rank left under way must not hold it


def run_seed(names: list[str], job: dict[str, Any], size: int, limit_s: float) -> dict[str, str]:
    """All strategies of a seed; return the errors of those that failed, by name. Results are left in files."""
    folder, seed, failed = Path(job["folder"]), job["seed"], {}
    context = multiprocessing.get_context("spawn")
    left = list(names)

    def result_of(name: str) -> Path:
        return folder / f"result-{seed}-{name}.json"

    def is_done(name: str) -> bool:
        return result_of(name).exists()

    while left and not (folder / f"end-{seed}").exists() and time.time() < job["deadline"]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        ranks = [context.Process(target=rank_main, args=(r, size, port, left, job)) for r in range(size)]
        for each in ranks:
            each.start()
        try:
            since, waiting = time.monotonic(), list(left)
            while any(each.is_alive() for each in ranks) and time.monotonic() - since < limit_s:
                time.sleep(0.2)
                for name in filter(is_done, waiting):
                    since = time.monotonic()
                    run = json.loads(result_of(name).read_text())
                    told = (
                        f"{100 * run['accuracy']:.2f} %, {run['all s']:.1f} s, {run['processor s']:.1f} s of processor"
                    )
                    print(f"seed {seed} {name}: {told}", file=sys.stderr, flush=True)
                waiting = [name for name in waiting if not is_done(name)]
                if any(each.exitcode not in (None, 0) for each in ranks):
                    for each in ranks:
                        each.join(GRACE_S / size)
                    break
        finally:
            for each in ranks:
                if each.is_alive():
                    each.kill()
                each.join()
        errors = [path.read_text() for path in folder.glob(f"error-{seed}-*")]
        errors.sort(key=lambda text: float(text.partition("\n")[0]))  # the first one first
        for path in folder.glob(f"error-{seed}-*"):
            path.unlink()
        left = [name for name in left if not is_done(name)]
        if left and not (folder / f"end-{seed}").exists():
            why = errors[0].partition("\n")[2] if errors else f"nothing came within {limit_s:g} s, or a rank died"
            failed[left.pop(0)] = why
    return failed


def table(names: list[str], found: dict[str, dict[int, dict[str, float]]], failed: dict[str, dict[int, str]]) -> str:
    lines = [
        f"{'strategy':28}{'seeds':>6}{'accuracy':>10}{'to ddp':>9}{'deviation':>11}{'worst':>16}{'loss':>8}{'s':>7}{'cpu s':>7}"
    ]
    for name in names:
        runs = found.get(name, {})
        note = f"  failed with seed {', '.join(map(str, failed[name]))}" if failed.get(name) else ""
        if not runs:
            lines.append(f"{name:28}{0:>6}{note or '  not run'}")
            continue
        accuracies = [100 * run["accuracy"] for run in runs.values()]
        pairs = {
            seed: 100 * (run["accuracy"] - found["ddp"][seed]["accuracy"])
            for seed, run in runs.items()
            if seed in found.get("ddp", {})
        }
        row = f"{name:28}{len(runs):>6}{statistics.mean(accuracies):>8.2f} %"
        if pairs:
            deviation = statistics.stdev(pairs.values()) if len(pairs) > 1 else float("nan")
            if name == "ddp" and len(accuracies) > 1:
                deviation = statistics.stdev(accuracies)
            worst = min(pairs, key=lambda seed: pairs[seed])
            row += f"{statistics.mean(pairs.values()):>+9.2f}{deviation:>11.2f}"
            row += f"{f'{pairs[worst]:+.2f} (seed {worst})':>16}"
        else:
            row += " " * 36
        row += f"{statistics.mean(run['train loss'] for run in runs.values()):>8.3f}"
        row += f"{statistics.mean(run['all s'] for run in runs.values()):>7.1f}"
        if not all(run["equal"] for run in runs.values()):
            note += "  RANKS DIFFER"
        row += f"{statistics.mean(run['processor s'] for run in runs.values()):>7.1f}"
        lines.append(row + note)
    lines.append("deviation: of the differences to ddp over seeds; of ddp, of its accuracies")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with train*.csv and test.csv (default: docstrings)")
    parser.add_argument("--strategies", help="names with commas (default: all that train in several processes)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="bert-tiny")
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--steps", type=int, default=500, help="of each strategy")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest learning rate, of AdamW")
    parser.add_argument("--budget-s", type=float, default=900.0, help="begin no strategy that may end later")
    parser.add_argument("--limit-s", type=float, default=180.0, help="for one strategy")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # ranks and files are not left behind
    known = names_that_train()
    names = options.strategies.split(",") if options.strategies else known
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no such strategy, or none that trains in several processes: {', '.join(unknown)}")
    started = time.time()
    found: dict[str, dict[int, dict[str, float]]] = {}
    failed: dict[str, dict[int, str]] = {}
    folder = Path(tempfile.mkdtemp(prefix="convergence-"))
    try:
        told = workload_options(options.data, folder, options)
        from guozhuang.workloads import load

        details = load("text", told | {"seed": 0}, folder / "cache").details
        num_samples = options.steps * options.batch_size * options.ranks
        print(
            f"{details['model']}, {details['classes'].partition(':')[0]} classes, {details['training samples']} samples, "
            f"{details['evaluation samples']} held out; {options.ranks} ranks x {options.batch_size} x {options.steps} steps = "
            f"{num_samples} samples, learning rate {options.lr:g}",
            flush=True,
        )
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            job = {"folder": str(folder), "seed": seed, "told": told, "steps": options.steps}
            job["deadline"] = started + options.budget_s
            for name, why in run_seed(names, job, options.ranks, options.limit_s).items():
                failed.setdefault(name, {})[seed] = why
                print(f"{name} with seed {seed} failed:\n{why[-1500:]}", file=sys.stderr, flush=True)
            for name in names:
                path = folder / f"result-{seed}-{name}.json"
                if path.exists():
                    found.setdefault(name, {})[seed] = json.loads(path.read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(names, found, failed))
    print(f"{time.time() - started:.0f} s")
    if options.json:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        text = {"settings": settings, "details": dict(details), "found": found, "failed": failed}
        options.json.write_text(json.dumps(text, indent=1))
    if not found:
        sys.exit(1)


if __name__ == "__main__":
    main()
