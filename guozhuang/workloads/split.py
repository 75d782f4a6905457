"""Splits samples into training and held-out parts, and numbers the classes: the same in every process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from guozhuang.errors import UsageError, explain
from guozhuang.workloads.samples import Samples


def classes_of(labels: Sequence[str], source: str) -> list[str]:
    """Return the distinct labels, in the order of their class numbers: by value if all are integers, else by text.

    Raises:
        UsageError: there are fewer than two, or so many that the column cannot be the label.
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
    """Return at most ``limit`` of these sample numbers, chosen randomly by the seed, in their order; 0 means all."""
    if limit == 0 or len(indices) <= limit:
        return list(indices)
    return sorted(random.Random(seed).sample(list(indices), limit))


def class_numbers(samples: Samples, classes: Sequence[str], trained_on: Path) -> list[int]:
    """Return the class numbers of an evaluation file's samples.

    Raises:
        UsageError: a label does not occur in the training data; the text names file and line.
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
