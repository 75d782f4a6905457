"""How long a rank that was killed is missing: replaced by a fork of the warm parent, and by a new interpreter (--no-warm).

Rank 1 kills itself several times while rank 0 goes on. The times are from its death to the first line of the script, and to the
end of the first optimizer step, of the process that replaces it. Rounds alternate; the ratio of the medians counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WAYS = {"warm": [], "cold": ["--no-warm"]}
SCRIPT = """
import json, os, sys, time
begun = time.time()
import torch
import guozhuang
folder, lives, first_life_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
if os.environ["RANK"] == "0":
    while not os.path.exists(f"{folder}/done"):
        time.sleep(0.05)
    sys.exit()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(16, 64)).square().mean().backward()
optimizer.step()
stepped = time.time()
life = len(os.listdir(folder))
if life == lives:
    open(f"{folder}/done", "w").close()
time.sleep(first_life_s if life == 0 else 0.5)  # the first one waits for the warm parent's imports
is_fork = "warm.py" in open("/proc/self/cmdline").read()
with open(f"{folder}/{life}.json", "w") as file:
    json.dump({"begun": begun, "stepped": stepped, "died": time.time(), "fork": is_fork}, file)
if life < lives:
    os.kill(os.getpid(), 9)
"""


def measure(way: str, num_deaths: int, first_life_s: float) -> list[tuple[float, float]]:
    """Seconds to the script and to the end of the first step, for each time that the rank was replaced."""
    with tempfile.TemporaryDirectory() as folder:
        script, lives = Path(folder, "train.py"), Path(folder, "lives")
        script.write_text(SCRIPT)
        lives.mkdir()
        command = [sys.executable, "-m", "guozhuang", "run", "-np", "2", "--max-restarts", str(num_deaths)]
        command += ["--on-failure", "keep-survivors", *WAYS[way], str(script), str(lives), str(num_deaths)]
        subprocess.run([*command, str(first_life_s)], check=True, capture_output=True, cwd=folder)
        told = [json.loads((lives / f"{life}.json").read_text()) for life in range(num_deaths)]
    assert all(each["fork"] == (way == "warm") for each in told[1:]), (
        "the warm parent was not ready: raise --first-life"
    )
    return [(new["begun"] - old["died"], new["stepped"] - old["died"]) for old, new in itertools.pairwise(told)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deaths", type=int, default=5, help="in each run; the first replacement counts too")
    parser.add_argument("--first-life", type=float, default=20.0, help="seconds before the first death")
    asked = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in range(asked.rounds):
        for way in sorted(WAYS, reverse=bool(turn % 2)):
            found[way] += measure(way, asked.deaths, asked.first_life)
    print("way    to the script (s)          to the end of the first step (s)")
    medians = {}
    for way, times in found.items():
        script, step = zip(*times, strict=True)
        medians[way] = (statistics.median(script), statistics.median(step))
        print(
            f"{way}   {medians[way][0]:.3f} ({min(script):.3f} .. {max(script):.3f})      "
            f"{medians[way][1]:.3f} ({min(step):.3f} .. {max(step):.3f})"
        )
    print(
        *(f"cold / warm {cold / warm:.1f}" for warm, cold in zip(medians["warm"], medians["cold"], strict=True)),
        sep=", ",
    )


if __name__ == "__main__":
    main()
