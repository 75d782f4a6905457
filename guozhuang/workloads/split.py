"""Which samples are trained on and which are held out, and what the classes are: the same in every process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from guozhuang.errors import UsageError, explain
from guozhuang.workloads.samples import Samples


def classes_of(labels: Sequence[str], source: str) -> list[str]:
    """The distinct labels, in the order of their class numbers: by value if all are whole numbers, else by text.

    Raises:
        UsageError: fewer than two, or so many that the label column cannot be one.
    """
    distinct = set(labels)
    if len(distinct) < 2:
        raise UsageError(
            explain(
                f"{source} has a single class: there is nothing to tell apart",
                value=next(iter(distinct)),
                fix="name the column of the label with --label, or give data of two classes or more",
            )
        )
    if 2 * len(distinct) > len(labels):
        raise UsageError(
            explain(
                f"{source} has {len(distinct)} classes in {len(labels)} samples; two or more a class are needed",
                value=", ".join(sorted(distinct)[:3]) + ", ...",
                fix="name the column of the label with --label (and say --header yes or no if it was guessed wrong)",
            )
        )
    if all(label.isascii() and label.lstrip("-").isdigit() and label.count("-") < 2 for label in distinct):
        return sorted(distinct, key=lambda label: (int(label), label))
    return sorted(distinct)


def hold_out(classes: Sequence[int], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Split sample numbers into a part to train on and a part held out, each class by the same fraction.

    A class of two samples or more gives at least one to either part; a class of one stays in training. Both parts keep
    the order of the samples.

    Args:
        classes: the class number of each sample.
        fraction: of each class to hold out, between 0 and 1.
        seed: chooses which.
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
    """At most ``limit`` of these sample numbers, chosen by the seed, in their order; 0 means all."""
    if limit == 0 or len(indices) <= limit:
        return list(indices)
    return sorted(random.Random(seed).sample(list(indices), limit))


def class_numbers(samples: Samples, classes: Sequence[str], trained_on: Path) -> list[int]:
    """The class numbers of an evaluation file's samples.

    Raises:
        UsageError: a label that the training data does not have, with its file and line.
    """
    numbers = {label: number for number, label in enumerate(classes)}
    for index, label in enumerate(samples.labels):
        if label not in numbers:
            known = ", ".join(classes[:12]) + (", ..." if len(classes) > 12 else "")
            raise UsageError(
                explain(
                    f"{samples.place(index)}: no row of {trained_on} has this label",
                    value=label,
                    fix=f"use the same labels in both files; training has: {known}",
                )
            )
    return [numbers[label] for label in samples.labels]
