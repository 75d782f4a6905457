"""Predict what others have published, and print it beside what they published.

    python -m benchmarks.published [--summary]
    python -m benchmarks.published --calibration FILE --rows FILE --out FILE

Every point of `scaling.toml`, `layouts.toml` and `others.toml` calibrates a prediction, is predicted, or is named as one that
nothing predicts. No point that is predicted took part in a fit. An error is predicted / published - 1 of times (of the value
itself where no time is published). The second form is that of `calibrated.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import calibrated, data_parallel, divided, trainings
from .points import Protocol, percent, read, rows, table


def protocols() -> list[Protocol]:
    """Return all protocols, with their points predicted."""
    return [make() for make in (*data_parallel.PROTOCOLS, *trainings.PROTOCOLS, *divided.PROTOCOLS)]


def point_lines(found: Sequence[Protocol]) -> list[str]:
    """Return a line for each predicted point, by protocol."""
    lines = []
    for protocol in found:
        cells = [["", "", "predicted", "published", "error", "null model" if protocol.null else ""]]
        for p in protocol.points:
            null = percent(p.null / p.published - 1) if p.null is not None else ""
            error = percent(p.predicted / p.published - 1)
            cells.append([p.what, p.at, p.shown(p.predicted), p.shown(p.published), error, null])
        lines += ["", protocol.title, *("  " + line for line in table(cells, 2))]
    return lines


def summary_lines(found: Sequence[Protocol]) -> list[str]:
    """Return a table with a line for each protocol."""
    cells = [["", "points", "mean", "worst", "bias", "null model", "aim"]]
    for protocol in found:
        errors, null = protocol.errors(), protocol.null_error()
        cells.append(
            [
                protocol.title, str(errors.num), percent(errors.mean), percent(errors.worst), percent(errors.bias),
                "" if null is None else percent(null), "" if protocol.target is None else percent(protocol.target, 0),
            ]
        )  # fmt: skip
    return table(cells)


def remark_lines(found: Sequence[Protocol]) -> list[str]:
    """Return the outliers and the notes of all protocols."""
    lines = ["Outliers, which no fit used:"]
    lines += [f"  {each}" for protocol in found for each in protocol.outliers]
    lines += ["Notes:"]
    lines += [f"  {protocol.title}: {each}" for protocol in found for each in protocol.notes]
    return lines


def count_line(found: Sequence[Protocol]) -> str:
    """Return how many numbers are published here, and how many of them are predicted."""
    scaling = sum(len(each["points"]) for each in read("scaling")["series"])
    more = sum(len(list(rows(each))) for each in read("layouts").values())
    predicted = sum(len(protocol.points) for protocol in found)
    fitted = len(read("layouts")["vtrain"]["rows"])
    return (
        f"{fitted} layouts of vTrain are among those that the shipped model of a step was fitted to.\n"
        f"{scaling} rates and times by the number of GPUs, {more} layouts; {predicted} numbers are predicted."
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--summary", action="store_true", help="print only the errors of each protocol, outliers and notes"
    )
    calibrated.add_options(parser)
    given = parser.parse_args(argv)
    if calibrated.run(parser, given):
        return 0
    found = protocols()
    lines = [] if given.summary else [*point_lines(found), ""]
    lines += [*summary_lines(found), "", *remark_lines(found), "Nothing to predict it from:"]
    lines += [*(f"  {each}" for each in data_parallel.alone()), count_line(found)]
    lines += ["", "Error by the points that calibrate, mean (worst):"]
    for cells in (data_parallel.by_calibration(), data_parallel.bert_by_calibration(), data_parallel.laws_compared()):
        lines += ["", *(f"  {line}" for line in table(cells))]
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
