"""Turns rows of a file into labelled texts: finds the label and text columns and the header, and rejects bad rows.

Then numbers the classes, and splits the samples into a training and a held-out part, the same in every process.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from guozhuang.errors import UsageError, explain
from guozhuang.workloads.encoding import bad_bytes
from guozhuang.workloads.rows import Table, TableRow, read_table

# Usual names of the column of labels, and of columns of text, in data sets; compared without case.
_LABEL_NAMES = (
    "label",
    "labels",
    "class",
    "category",
    "target",
    "sentiment",
    "topic",
    "class index",
    "coarse_label",
    "y",
)
_TEXT_NAMES = ("title", "headline", "subject", "text", "sentence", "content", "description", "body", "review",
               "message", "question", "document", "comment", "abstract", "sms", "tweet", "utterance")  # fmt: skip

# What programs write in place of a value that is missing; compared without case. "none" and "n/a" are left to be classes.
_MISSING = frozenset({"nan", "-nan", "null", "<na>", "#n/a", "nat"})

_NUM_REPORTED = 3


@dataclass(frozen=True)
class Samples:
    """Labelled texts, in the order of their file.

    Attributes:
        labels: one per sample, never empty, stripped.
        texts: one per sample, never blank.
        lines: the line on which each sample begins in its file, see ``rows.TableRow``.
        table: the file they were read from.
        skipped: the lines of the bad rows that were left out.
        columns: a text that says which columns were used as label and text.
    """

    labels: list[str]
    texts: list[str]
    lines: list[int]
    table: Table
    skipped: list[int]
    columns: str

    def place(self, index: int) -> str:
        """Return where a sample stands, ``file:line``, for the text of an error."""
        return self.table.place(self.lines[index])


def read_samples(
    path: Path,
    *,
    format: str = "auto",
    delimiter: str | None = None,
    quoting: str = "auto",
    encoding: str | None = None,
    header: str = "auto",
    label: str | None = None,
    text: Sequence[str] = (),
    label_until: str | None = None,
    skip_bad: bool = False,
) -> Samples:
    """Read a file of labelled texts.

    Args:
        path: the file.
        format: see ``rows.read_table``, also for delimiter, quoting and encoding.
        header: "yes", "no", or "auto": the first row of csv or tsv is a header if it contains a column name given here, or if
            its label never occurs again although labels repeat.
        label: the column of the label, by name or number from 0. None: one with a usual name, else the first.
        text: the columns of the text, joined by a space. Empty: those with usual names, else all but the label's.
        label_until: cut each label at the first occurrence of this text (``:`` turns ``DESC:manner`` into DESC).
        skip_bad: leave bad rows out and count them, instead of raising. A row is bad that has no label or no text (blank, null,
            NaN, or a word for it such as "nan" and "null"), or that cannot be read.

    Raises:
        UsageError: the text names the file, and the line if the error is in a row.
    """
    table = read_table(path, format, delimiter, quoting, encoding)
    if not table.rows:
        raise UsageError(explain(f"{path} is empty", fix="give a file with a label and a text in each row"))
    names, rows, header_note = _header(table, header, [n for n in (label, *text) if n is not None], label)
    if not rows:
        raise UsageError(explain(f"{path} has a header and no rows", fix="add rows, or say --header no"))
    width = len(names) if names is not None else _usual_width(rows)
    # jsonl and parquet also have columns of numbers, which are not used as text unless given by ``text``.
    head = [row.cells for row in rows[:1000] if not row.problem and len(row.cells) == width]
    textual = [at for at in range(width) if any(isinstance(cells[at], str) for cells in head)]
    label_at, text_at = _choose_columns(table, names, width, label, text, textual)
    labels, texts, lines, bad = [], [], [], list[tuple[int, str]]()
    for row in rows:
        problem = row.problem
        if not problem and len(row.cells) != width:
            problem = f"it has {len(row.cells)} columns where the file has {width}"
        if not problem:
            problem, row_label, row_text = _sample(row, label_at, text_at, label_until)
        if not problem:
            labels.append(row_label)
            texts.append(row_text)
            lines.append(row.line)
        else:
            bad.append((row.line, problem))
    if bad and not skip_bad:
        raise UsageError(_bad_rows(table, bad, len(rows)))
    for line, problem in bad[:_NUM_REPORTED]:
        logging.getLogger(__name__).warning("%s: bad row: %s; skipped", table.place(line), problem)
    skipped = [line for line, _ in bad]
    if len(bad) > _NUM_REPORTED:
        logging.getLogger(__name__).warning(
            "%s: %d bad rows skipped in all (%s)", path, len(bad), table.places(skipped)
        )
    if not labels:
        raise UsageError(explain(f"{path} has no usable row: all {len(bad)} are bad", fix="look at the warnings above"))
    columns = f"label {_called(names, label_at)}, text {' + '.join(_called(names, at) for at in text_at)}{header_note}"
    return Samples(labels, texts, lines, table, skipped, columns)


def _bad_rows(table: Table, bad: Sequence[tuple[int, str]], num_rows: int) -> str:
    """Describe the bad rows of a file: the first one, how many there are, and where."""
    line, problem = bad[0]
    what = f"{table.place(line)}: bad row: {problem}"
    fix = "mend the row, or leave such rows out with --bad-rows skip"
    if len(bad) > 1:
        what += f"; {len(bad)} of {num_rows} rows are bad: {table.places([line for line, _ in bad])}"
        fix = "mend the rows, or leave such rows out with --bad-rows skip"
    if table.encoding and any("byte" in problem for _, problem in bad):
        fix += ", or name the encoding with --encoding"
    return explain(what, fix=fix)


def _called(names: Sequence[str] | None, at: int) -> str:
    return repr(names[at]) if names is not None else f"column {at}"


def _header(
    table: Table, header: str, named: Sequence[str], label: str | None
) -> tuple[Sequence[str] | None, list[TableRow], str]:
    """Return the names of the columns, the rows without the header, and a remark on the header."""
    if table.names is not None:
        if header != "auto":
            raise UsageError(
                explain(f"a {table.format} file names its columns itself", value=header, fix="leave --header out")
            )
        return table.names, table.rows, ""
    if table.format == "lines" and header == "auto":
        header = "no"
    by_name = [name for name in named if not _is_number(name)]
    first = [str(cell).strip() for cell in table.rows[0].cells]
    if header == "no":
        if by_name:
            what = f"{table.path} has no header, so its columns have no names"
            raise UsageError(explain(what, value=by_name[0], fix="give numbers from 0"))
        return None, table.rows, ""
    if header == "yes" or by_name:
        return first, table.rows[1:], ""
    if _looks_like_header(table.rows, first, int(label) if label is not None and _is_number(label) else None):
        return first, table.rows[1:], ", first row taken for a header"
    return None, table.rows, ""


def _looks_like_header(rows: Sequence[TableRow], first: Sequence[str], label_at: int | None) -> bool:
    width = _usual_width(rows)
    if rows[0].problem or len(first) != width or not all(first) or len(set(first)) != width:
        return False
    usual = [at for at, name in enumerate(first) if name.casefold() in _LABEL_NAMES]
    at = label_at if label_at is not None else usual[0] if usual else 0
    if at >= width:
        return False
    below = Counter(str(row.cells[at]).strip() for row in rows[1:] if len(row.cells) == width)
    repeats = below.total() > len(below)
    known = bool(usual) or any(name.casefold() in _TEXT_NAMES for name in first)
    return first[at] not in below and (known or repeats)


def _usual_width(rows: Sequence[TableRow]) -> int:
    widths = Counter(len(row.cells) for row in rows[:1000] if not row.problem)
    return widths.most_common(1)[0][0] if widths else 0


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _choose_columns(
    table: Table,
    names: Sequence[str] | None,
    width: int,
    label: str | None,
    text: Sequence[str],
    textual: Sequence[int],
) -> tuple[int, list[int]]:
    path = table.path

    def find(name: str) -> int:
        if names is not None and list(names).count(name) > 1:
            raise UsageError(
                explain(f"{path} has several columns of that name", value=name, fix="give its number from 0")
            )
        if names is not None and name in names:
            return list(names).index(name)
        if _is_number(name) and int(name) < width:
            return int(name)
        there = ", ".join(map(repr, names)) if names is not None else f"numbers 0 to {width - 1} (it has no header)"
        raise UsageError(explain(f"{path} has no such column", value=name, fix=f"use one of: {there}"))

    folded = [name.casefold() for name in names] if names is not None else []
    text_at = [find(name) for name in text]
    if label is not None:
        label_at = find(label)
    else:
        free = [at for at in range(width) if at not in text_at]
        label_at = next((at for at in free if at < len(folded) and folded[at] in _LABEL_NAMES), free[0] if free else 0)
    if not text_at:
        others = [at for at in textual if at != label_at]
        text_at = [at for at in others if at < len(folded) and folded[at] in _TEXT_NAMES] or others
    if not text_at:
        fix = "name the separator with --delimiter (tab, comma, space, ...), or the format with --data-format"
        if table.names is not None:
            fix = f"give each row a label and a text; it has the columns {', '.join(map(repr, table.names))}"
        raise UsageError(explain(f"{path} has no column left for the text beside the label", fix=fix))
    if label_at in text_at:
        what = f"{path}: one column is both label and text"
        raise UsageError(explain(what, value=_called(names, label_at), fix="name two columns"))
    return label_at, text_at


def _sample(row: TableRow, label_at: int, text_at: Sequence[int], label_until: str | None) -> tuple[str, str, str]:
    """Return the problem of a row (empty: none), its label and its text."""
    raw = row.cells[label_at]
    if isinstance(raw, list | dict | bytes):
        return f"its label is a {type(raw).__name__}", "", ""
    if isinstance(raw, float) and not math.isfinite(raw):
        return f"its label is {_number(raw)}", "", ""
    if isinstance(raw, float) and raw.is_integer():  # whole numbers become floats in a column where others are missing
        raw = int(raw)
    label = "" if raw is None else str(raw).strip()
    if label.casefold() in _MISSING:
        return f"its label is {label!r}, which stands for a missing one", "", ""
    if label_until:
        label = label.split(label_until, 1)[0].strip()
    if not label:
        return "it has no label", "", ""
    parts, without = [], "it has no text"
    for at in text_at:
        cell = row.cells[at]
        if isinstance(cell, float) and math.isnan(cell):
            without = "its text is NaN"
        elif cell is not None and not isinstance(cell, str):
            return f"its text is a {type(cell).__name__}", "", ""
        elif cell and cell.strip().casefold() in _MISSING:
            without = f"its text is {cell.strip()!r}, which stands for a missing one"
        elif cell and cell.strip():
            parts.append(cell)
    text = " ".join(parts)
    for name, value in (("label", label), ("text", text)):
        if "\0" in value:
            return f"its {name} has a NUL character (is the file UTF-16?)", "", ""
        if not value.isascii():
            byte = bad_bytes(value)
            if byte:
                return f"its {name} has the byte {byte}, which is not of the file's encoding", "", ""
            if any("\ud800" <= character <= "\udfff" for character in value):
                return f"its {name} has half a surrogate pair, which is not a character", "", ""
    return ("", label, text) if text else (without, "", "")


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else str(value)


def classes_of(labels: Sequence[str], source: str) -> list[str]:
    """Return the distinct labels, in the order of their class numbers: by value if all are integers, else by text.

    Raises:
        UsageError: there are fewer than two, or so many that the column cannot be the label.
    """
    distinct = set(labels)
    if len(distinct) < 2:
        what = f"{source} has a single class: there is nothing to tell apart"
        fix = "name the column of the label with --label, or give data of two classes or more"
        raise UsageError(explain(what, value=next(iter(distinct)), fix=fix))
    if 2 * len(distinct) > len(labels):
        what = f"{source} has {len(distinct)} classes in {len(labels)} samples; two or more a class are needed"
        fix = "name the column of the label with --label (and say --header yes or no if it was guessed wrong)"
        raise UsageError(explain(what, value=", ".join(sorted(distinct)[:3]) + ", ...", fix=fix))
    if all(label.isascii() and label.lstrip("-").isdigit() and label.count("-") < 2 for label in distinct):
        return sorted(distinct, key=lambda label: (int(label), label))
    return sorted(distinct)


def hold_out(classes: Sequence[int], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Split sample numbers into a training part and a held-out part, with the same fraction of each class.

    A class of two samples or more has at least one in each part; a class of one stays in training. Both parts keep
    the order of the samples.

    Args:
        classes: the class number of each sample.
        fraction: share of each class to hold out, between 0 and 1.
        seed: seed of the random choice.
    """
    by_class: dict[int, list[int]] = {}
    for index, number in enumerate(classes):
        by_class.setdefault(number, []).append(index)
    chooser = random.Random(seed)
    held: set[int] = set()
    for number in sorted(by_class):
        members = by_class[number]
        if len(members) > 1:
            held.update(chooser.sample(members, min(max(round(fraction * len(members)), 1), len(members) - 1)))
    return [i for i in range(len(classes)) if i not in held], sorted(held)


def cap(indices: Sequence[int], limit: int, seed: int) -> list[int]:
    """Return at most ``limit`` of the sample numbers ``indices``, chosen randomly by the seed, in their order; 0 means all."""
    if limit == 0 or len(indices) <= limit:
        return list(indices)
    return sorted(random.Random(seed).sample(list(indices), limit))


def class_numbers(samples: Samples, classes: Sequence[str], trained_on: Path) -> list[int]:
    """Return the class numbers of an evaluation file's samples, by the classes of the training data.

    Raises:
        UsageError: a label does not occur in the training data; the text names file and line.
    """
    numbers = {label: number for number, label in enumerate(classes)}
    for index, label in enumerate(samples.labels):
        if label not in numbers:
            known = ", ".join(classes[:12]) + (", ..." if len(classes) > 12 else "")
            what = f"{samples.place(index)}: no row of {trained_on} has this label"
            fix = f"use the same labels in both files; training has: {known}"
            raise UsageError(explain(what, value=label, fix=fix))
    return [numbers[label] for label in samples.labels]
