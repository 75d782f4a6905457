"""The default corpus, its split, and the vocabulary learned from it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.errors import UsageError
from guozhuang.workloads.samples import cap, classes_of, hold_out
from guozhuang.workloads.text import MAX_PER_PACKAGE, NUM_PACKAGES, corpus
from guozhuang.workloads.tokens import SPECIAL, encode, ragged, train_wordpiece
from tests.drawing import examples


@pytest.mark.slow
def test_the_library_gives_enough_texts_and_classes() -> None:
    labels, texts = corpus()
    counts = Counter(labels)
    assert len(texts) == len(set(texts)) == len(labels) > 3000
    assert len(counts) == NUM_PACKAGES
    assert max(counts.values()) <= MAX_PER_PACKAGE
    assert max(counts.values()) <= 6 * min(counts.values())
    assert not {"test", "site-packages"} & set(labels)
    assert all(text == " ".join(text.split()) and ">>>" not in text for text in texts)


def library(folder: Path, num_packages: int, num_texts: int) -> Path:
    for package in range(num_packages):
        (folder / f"p{package}").mkdir(parents=True)
        body = "\n".join(
            f'def f{i}():\n    """Number {i} of the package called p{package}, said in words.\n\n'
            f'    >>> no() # example of it here\n\n    short one\n    """\n'
            for i in range(num_texts)
        )
        (folder / f"p{package}" / "a.py").write_text(
            "if True:\n" + "".join(f"    {line}\n" for line in body.split("\n"))
        )
    (folder / "test").mkdir(parents=True)
    (folder / "test" / "a.py").write_text('"""A test module says nothing of the library itself."""')
    (folder / "broken.py").write_text("def (")
    return folder


def test_what_is_taken_of_a_library(tmp_path) -> None:
    labels, texts = corpus(library(tmp_path, 5, 60))
    assert Counter(labels) == {f"p{package}": 60 for package in range(5)}
    assert texts[0] == "Number 0 of the package called p0, said in words."
    assert corpus(tmp_path) == (labels, texts)


def test_a_library_without_sources_is_an_error(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"too few docstrings .*\(3 packages .*--data FILE"):
        corpus(library(tmp_path, 3, 60))
    with pytest.raises(UsageError, match="0 packages"):
        corpus(tmp_path / "nothing")


@pytest.mark.slow
def test_the_vocabulary_is_the_same_in_every_process() -> None:
    program = (
        "import hashlib; from guozhuang.workloads.tokens import train_wordpiece\n"
        "words = [f'Wörter {i % 7}{chr(97 + i % 23)}{chr(97 + i % 19)}' for i in range(900)]\n"
        "texts = [f'{word} und 漢字 {chr(945 + i % 17)}x{i % 11}' for i, word in enumerate(words)]\n"
        "print(hashlib.sha256(repr(sorted(train_wordpiece(texts, 300).get_vocab().items())).encode()).hexdigest())"
    )
    root = Path(__file__).resolve().parents[2]
    said = {
        subprocess.run(
            [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        for _ in range(2)
    }
    assert len(said) == 1 and len(said.pop().strip()) == len(hashlib.sha256().hexdigest())


def test_a_vocabulary() -> None:
    texts = ["the cat sat on the mat", "the cats sat on mats", "a matted cat"] * 5
    tokenizer = train_wordpiece(texts, 100)
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2, 3, 4]
    assert tokenizer.encode("The cats").tokens[0] == "[CLS]"
    assert tokenizer.encode("The cat").tokens == ["[CLS]", "the", "cat", "[SEP]"]
    # Pieces that continue a word are no special tokens: written out in a text, they are its characters.
    assert tokenizer.encode("##t").tokens[1] == "[UNK]"
    tokens = encode(tokenizer, ["the cat " * 50, "cat"], max_length=8)
    assert tokens.ends.tolist() == [8, 11]
    assert tokens.tokens[7] == tokenizer.token_to_id("[SEP]")


def test_rare_characters_give_way_to_a_small_vocabulary() -> None:
    texts = ["".join(chr(0x4E00 + i) for i in range(start, start + 20)) for start in range(400)]
    assert train_wordpiece(texts, 200).get_vocab_size() <= 200


def test_ragged() -> None:
    flat = ragged([[1, 2], [], [3]])
    assert flat.tokens.tolist() == [1, 2, 3] and flat.ends.tolist() == [2, 2, 3]
    assert ragged([]).ends.tolist() == []


@examples()
@given(
    classes=st.lists(st.integers(0, 4), min_size=1, max_size=80),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**31),
)
def test_hold_out_divides_each_class(classes, fraction, seed) -> None:
    train, held = hold_out(classes, fraction, seed)
    assert sorted([*train, *held]) == list(range(len(classes)))
    assert (train, held) == (sorted(train), sorted(held)) == hold_out(classes, fraction, seed)
    for number, size in Counter(classes).items():
        num_held = sum(classes[index] == number for index in held)
        assert num_held == (0 if size == 1 else min(max(round(fraction * size), 1), size - 1))


def test_hold_out_depends_on_the_seed() -> None:
    assert hold_out([0] * 50 + [1] * 50, 0.2, 1) != hold_out([0] * 50 + [1] * 50, 0.2, 2)


def test_cap() -> None:
    assert cap(range(10), 0, 0) == cap(range(10), 10, 0) == list(range(10))
    some = cap(range(1000), 20, 3)
    assert len(some) == 20 and some == sorted(some) == cap(range(1000), 20, 3) != cap(range(1000), 20, 4)


def test_classes() -> None:
    assert classes_of(["10", "9", "-1"] * 2, "x") == ["-1", "9", "10"]
    assert classes_of(["b", "a", "10"] * 2, "x") == ["10", "a", "b"]
    with pytest.raises(UsageError, match=r"x has a single class: .*got 'a'"):
        classes_of(["a"] * 9, "x")
    with pytest.raises(UsageError, match=r"x has 5 classes in 6 samples.*--label"):
        classes_of(["a", "b", "c", "d", "e", "a"], "x")
