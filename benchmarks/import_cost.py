"""Race `import guozhuang` against `import torch`: fresh interpreters in turn.

python benchmarks/import_cost.py [--rounds 11]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time


def seconds(statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    ours, peers = [], []
    for r in range(-1, options.rounds):
        pair = seconds("import guozhuang"), seconds("import torch")
        if r >= 0:  # the first round warms the file cache
            ours.append(pair[0])
            peers.append(pair[1])
    ratios = [a / b for a, b in zip(ours, peers, strict=True)]
    print(f"import torch      {statistics.median(peers):.2f} s (median of {options.rounds})")
    print(f"import guozhuang  {statistics.median(ours):.2f} s")
    print(f"ratio             {statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})")


if __name__ == "__main__":
    main()
