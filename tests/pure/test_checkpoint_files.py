"""Checkpoints on the disk: states without loss, deaths at any call, full disks, flipped bits, hostile files."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import pickle
import random
import shutil
import subprocess
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from guozhuang.checkpoint import files, folder, saver
from guozhuang.checkpoint.folder import MANIFEST, CheckpointFolder, manifest_of, read_part, verify
from guozhuang.checkpoint.saver import Board, Saver
from guozhuang.checkpoint.state import Flat
from guozhuang.checkpoint.tree import flatten, unflatten
from guozhuang.errors import CheckpointError, UsageError
from guozhuang.net.ended import tell_ended
from tests.waiting import LIMIT_S

TENSORS = {
    "shared/w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "shared/b": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "shared/n": torch.tensor(7),
}

ABOUT: dict[str, Any] = {"ranks": 1, "strategies": [], "machine": {}}


# ---- nested states --------------------------------------------------------------------------------------------------------

STATES: list[Any] = [
    {"a": [1, 2.5, None, True, "x"], "b": {1: "one", (2, 3): "tuple"}, "$odd": 3, "c": ()},
    [float("inf"), -float("inf"), 0.1 + 0.2, 1e-320, 2**70],
    {"python": random.Random(3).getstate(), "numpy": np.random.RandomState(3).get_state()},
    {
        "set": {1, 2},
        "bytes": b"\x00\xff",
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu", 0),
    },
    {"scalar": np.float32(0.1), "array": np.arange(6).reshape(2, 3), "z": 3 + 4j},
    {"milestones": Counter({3: 1, 5: 2})},
    {1: torch.ones(2), "1": torch.zeros(2), "a/b": torch.ones(1), "a": {"b": torch.zeros(1)}},
]


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_states_come_back_as_they_were(state) -> None:
    tensors: dict[str, torch.Tensor] = {}
    tree = json.loads(json.dumps(flatten(state, "x", tensors), allow_nan=False))
    found = unflatten(tree, tensors)
    assert repr(found) == repr(state)


def test_tensors_come_back_with_their_bits(tmp_path) -> None:
    odd = {
        "nan": torch.tensor([float("nan"), -0.0]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "strided": torch.randn(4, 6).t()[::2],
        "empty": torch.empty(0, 3),
        "bools": torch.tensor([True, False]),
        "scalar": torch.tensor(2**60 + 1),
        **{
            str(d): torch.ones(3).to(d)
            for d in (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.float8_e5m2)
        },
    }
    part = Flat.of(odd, "odd")
    staged = {key: tensor.contiguous() for key, tensor in part.tensors.items()}
    facts = files.write_tensors(tmp_path / "shared.safetensors", staged, {})
    found = unflatten(part.tree, files.read_tensors(tmp_path, "shared.safetensors", facts))
    for key, value in odd.items():
        assert found[key].dtype == value.dtype and found[key].shape == value.shape
        both = [torch.view_as_real(t) if t.is_complex() else t for t in (found[key], value)]
        ours, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in both)
        assert torch.equal(ours, theirs), key


@pytest.mark.parametrize("bad", [object(), {"a": [lambda: 0]}, torch.eye(2).to_sparse(), threading.Lock()])
def test_what_cannot_be_saved_is_named(bad) -> None:
    with pytest.raises(UsageError, match=r"here(/a/0)? is "):
        flatten(bad, "here", {})


# ---- one save -------------------------------------------------------------------------------------------------------------


def save(place: CheckpointFolder, step: int, keep: int | None = None, **options: Any) -> str:
    """Save a small state as one rank; return why it failed."""
    one = Saver(place, Board(None, 0, 1), keep, **options)
    tensors = {key: tensor + step for key, tensor in TENSORS.items()}
    own = Flat.of({"value": step}, "rank-0")
    one.start(step, Flat({"step": step, "trained": [], "w": {"$tensor": "shared/w"}}, tensors), own, True, ABOUT)
    one.wait()
    return one.outcome()


def newest_whole(place: CheckpointFolder) -> int | None:
    for step in place.steps():
        try:
            verify(place.of(step))
        except CheckpointError:
            continue
        tree, tensors = read_part(place.of(step), manifest_of(place.of(step)), "shared")
        assert tree["tree"]["step"] == step and torch.equal(tensors["shared/w"], TENSORS["shared/w"] + step)
        return step
    return None


class Died(BaseException):
    """The process ended here."""


class Calls:
    """Counts the calls that change the disk; at one of them the process ends, and nothing is called after it."""

    NAMES = ("open", "write", "fsync", "rename", "mkdir", "close")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, die_at: int | None, under: Path) -> None:
        self.number, self.die_at, self.is_dead = 0, die_at, False
        self.paths: dict[int, str] = {}
        self.unsynced: set[str] = set()
        self.renames: list[tuple[str, str]] = []
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        remove = shutil.rmtree

        def rmtree(path: Any, **options: Any) -> None:
            self._count()
            names = sorted(Path(path).iterdir()) if Path(path).is_dir() else []
            for each in names[: len(names) // 2]:
                each.unlink()
            self._count()  # it may end in the middle
            remove(path, **options)

        monkeypatch.setattr(shutil, "rmtree", rmtree)

    def _count(self) -> None:
        if self.is_dead or self.number == self.die_at:
            self.is_dead = True
            raise Died
        self.number += 1

    def _wrap(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name != "guozhuang checkpoint":
                return real(*args, **kwargs)
            if name == "close":
                return real(*args, **kwargs)
            self._count()
            found = real(*args, **kwargs)
            if name == "open":
                self.paths[found] = os.fspath(args[0])
            elif name == "write":
                self.unsynced.add(self.paths[args[0]])
            elif name == "fsync":
                path = self.paths[args[0]]
                self.unsynced.discard(path)
                self.renames = [pair for pair in self.renames if os.path.dirname(pair[1]) != path]
            elif name == "rename":
                self.renames.append((os.fspath(args[0]), os.fspath(args[1])))
            return found

        return call

    def lose_power(self) -> None:
        """Undo what was not flushed: names that were changed, and contents of files."""
        for old, new in reversed(self.renames):
            if os.path.exists(new):
                os.replace(new, old) if not os.path.exists(old) else None
        for path in self.unsynced:
            if os.path.exists(path):
                os.truncate(path, os.path.getsize(path) // 2)


@pytest.mark.parametrize(
    ("power", "stride"),
    [(False, 4), *(pytest.param(power, 1, marks=pytest.mark.slow) for power in (True, False))],
)
def test_death_at_any_call_leaves_the_newest_whole_or_the_one_before(tmp_path, monkeypatch, power, stride) -> None:
    seen = set()
    for die_at in itertools.count(step=stride):
        place = CheckpointFolder(tmp_path / f"at-{die_at}")
        assert save(place, 1) == "" and save(place, 2, keep=2) == ""
        with monkeypatch.context() as patch:
            calls = Calls(patch, die_at, tmp_path)
            with contextlib.suppress(Died):
                save(place, 3, keep=2)
            if calls.is_dead and not power:
                calls.lose_power()
        found = newest_whole(place)
        assert found in (2, 3), f"after {die_at} calls the newest whole checkpoint is {found}"
        seen.add(found)
        assert save(place, 4, keep=1) == "" and sorted(os.listdir(place.path)) == ["step-4"]
        shutil.rmtree(place.path)
        if not calls.is_dead:
            break
    assert seen == {2, 3} and die_at > 30


@pytest.mark.parametrize("call", ["open", "write", "fsync", "mkdir", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failing_disk_gives_the_save_up_and_the_next_one_works(tmp_path, monkeypatch, call, number, caplog) -> None:
    place = CheckpointFolder(tmp_path / "c")
    assert save(place, 1) == ""
    real = getattr(os, call)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "guozhuang checkpoint" and (call != "open" or args[1] & os.O_CREAT):
            raise OSError(number, os.strerror(number), os.fspath(args[0]) if isinstance(args[0], str | Path) else None)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        failure = save(place, 2)
    assert os.strerror(number) in failure
    assert len([r for r in caplog.records if "given up" in r.message]) == 1 and "step 2" in caplog.text
    assert newest_whole(place) == 1
    assert save(place, 3) == "" and sorted(os.listdir(place.path)) == ["step-1", "step-3"]


def test_a_folder_that_is_deleted_under_a_save(tmp_path, monkeypatch) -> None:
    place = CheckpointFolder(tmp_path / "c")

    def write(path: Path, *args: Any) -> files.Facts:
        shutil.rmtree(place.path)
        return files.write_tensors(path, *args)

    assert "No such file" in save(place, 1, write=write)
    assert save(place, 2) == "" and newest_whole(place) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system needs root")
def test_a_full_disk(tmp_path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", tmp_path], check=True)
    try:
        place = CheckpointFolder(tmp_path / "c")
        assert save(place, 1) == ""
        (tmp_path / "ballast").write_bytes(bytes(200_000))
        (tmp_path / "more").touch()
        with pytest.raises(OSError), open(tmp_path / "more", "wb", buffering=0) as file:
            while True:
                if file.write(bytes(4096)) < 4096:
                    raise OSError(errno.ENOSPC, "full")
        assert "No space left" in save(place, 2)
        assert newest_whole(place) == 1 and os.listdir(place.path) == ["step-1"]
        (tmp_path / "ballast").unlink()
        assert save(place, 3) == ""
    finally:
        subprocess.run(["umount", tmp_path], check=True)


# ---- broken and hostile files ---------------------------------------------------------------------------------------------


def test_each_flipped_bit_truncation_swap_and_missing_file_is_refused_by_name(tmp_path) -> None:
    place = CheckpointFolder(tmp_path)
    assert save(place, 1) == "" and save(place, 2) == ""
    found, other = place.of(2), place.of(1)
    originals = {name: (found / name).read_bytes() for name in os.listdir(found)}
    draw = random.Random(0)

    def refused(name: str, contents: bytes | None) -> None:
        path = found / name
        path.unlink()
        if contents is not None:
            path.write_bytes(contents)
        with pytest.raises(CheckpointError, match=name.removesuffix(".json")):
            verify(found)
        assert newest_whole(place) == 1
        path.unlink(missing_ok=True)
        path.write_bytes(originals[name])

    for name, contents in originals.items():
        for at in range(0, len(contents), 1 if len(contents) < 100 else 11):
            flipped = bytearray(contents)
            flipped[at] ^= 1 << draw.randrange(8)
            refused(name, bytes(flipped))
        refused(name, contents[:-1])
        refused(name, contents + b"x")
        refused(name, b"")
        refused(name, None)
        if name != "rank-0.safetensors":  # it holds no tensor here, so both steps' are the same
            refused(name, (other / name).read_bytes())
    assert verify(found)["step"] == 2
    (tmp_path / "step-9").symlink_to(found)
    with pytest.raises(CheckpointError, match="step-9"):
        verify(tmp_path / "step-9")


def hostile(body: dict[str, Any], path: Path, name: str, header: bytes | None) -> None:
    """Change a checkpoint so that all of its hashes fit."""
    if header is not None:
        text = len(header).to_bytes(8, "little") + header
        (path / name).write_bytes(text)
        body["files"][name] = {"bytes": len(text), "sha256": folder.hashlib.sha256(text).hexdigest(), "tensors": {}}
    (path / MANIFEST).write_text(json.dumps({**body, "sha256": folder._own_hash(body)}))


def test_hostile_checkpoints_are_refused_and_nothing_is_run(tmp_path) -> None:
    place = CheckpointFolder(tmp_path / "c")
    assert save(place, 1) == ""
    path, trap = place.of(1), tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {trap}",)

    pickled = pickle.dumps(Trap())
    overlap = {n: {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} for n in ("a", "b")}
    outside = {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    name = "shared.safetensors"
    cases: list[tuple[str, bytes | None, dict[str, Any]]] = [
        (name, pickled, {}),
        (name, json.dumps(overlap).encode() + bytes(8), {}),
        (name, json.dumps(outside).encode(), {}),
        ("shared.json", pickled, {}),
        ("../evil.json", None, {"../evil.json": {"bytes": 1, "sha256": ""}}),
        ("/etc/passwd", None, {"/etc/passwd": {"bytes": 1, "sha256": ""}}),
        ("shared.pt", None, {"shared.pt": {"bytes": 1, "sha256": ""}}),
    ]
    good = json.loads((path / MANIFEST).read_text())
    good.pop("sha256")
    kept = {each: (path / each).read_bytes() for each in os.listdir(path)}
    for target, header, more in cases:
        body = json.loads(json.dumps(good))
        body["files"] |= more
        hostile(body, path, target, header)
        with pytest.raises(CheckpointError):
            verify(path)
        for each, contents in kept.items():
            (path / each).write_bytes(contents)
    (path / name).write_bytes((1 << 62).to_bytes(8, "little") + bytes(64))  # a header of 4 EB
    hostile(good | {"files": good["files"] | {name: {**good["files"][name], "bytes": 72}}}, path, name, None)
    with pytest.raises(CheckpointError, match=name):
        verify(path)
    (path / name).unlink()
    (path / name).symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match=name):
        verify(path)
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match=name):
        verify(path)
    assert not trap.exists() and not (tmp_path / "evil.json").exists()


# ---- what stays, and who is waited for ------------------------------------------------------------------------------------


def test_older_ones_go_only_when_a_newer_one_was_read_back(tmp_path, monkeypatch) -> None:
    place = CheckpointFolder(tmp_path)
    for step in range(1, 5):
        assert save(place, step, keep=2) == ""
    assert place.steps() == [4, 3]

    def flips(path: Path, tensors: Any, digests: Any) -> files.Facts:
        facts = files.write_tensors(path, tensors, digests)
        if path.stat().st_size > 100:
            with open(path, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\xaa")
        return facts

    assert "does not have the bytes" in save(place, 5, keep=1, write=flips)
    assert place.steps() == [4, 3] and sorted(os.listdir(tmp_path)) == ["step-3", "step-4"]


def test_a_rank_that_does_not_answer_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(saver, "LIMIT_S", 0.1)
    store = torch.distributed.HashStore()
    one = Saver(CheckpointFolder(tmp_path), Board(store, 0, 2), None)
    one.start(1, Flat({"trained": []}, {}), Flat({}, {}), True, {**ABOUT, "ranks": 2})
    one.wait()
    assert "rank 1 did not answer within 0.1 s" in one.outcome() and not os.listdir(tmp_path)


def test_a_rank_that_ended_with_0_is_not_waited_for(tmp_path) -> None:
    store = torch.distributed.HashStore()
    tell_ended(store, 1)  # as its launcher does
    one = Saver(CheckpointFolder(tmp_path), Board(torch.distributed.PrefixStore("saves", store), 0, 2), None)
    one.start(1, Flat({"trained": []}, {}), Flat({}, {}), True, {**ABOUT, "ranks": 2})
    one.wait()
    assert "rank 1 ended with exit code 0" in one.outcome() and not os.listdir(tmp_path)


def test_equal_tensors_of_ranks_are_written_once(tmp_path) -> None:
    store, place = torch.distributed.HashStore(), CheckpointFolder(tmp_path)
    savers = [Saver(place, Board(store, rank, 2), None) for rank in range(2)]
    for rank, one in enumerate(savers):
        shaped = torch.zeros((2, 3) if rank else (3, 2))  # the same bytes
        own = Flat.of(
            {"same": torch.ones(1000), "mine": torch.full((10,), float(rank)), "shaped": shaped}, f"rank-{rank}"
        )
        one.start(3, Flat.of({"trained": [], "w": torch.ones(5)}, "shared"), own, True, {**ABOUT, "ranks": 2})
    for one in savers:
        one.wait()
        assert one.outcome() == ""
    manifest = verify(place.of(3))
    tree, tensors = read_part(place.of(3), manifest, "rank-1")
    assert tensors.keys() == {"rank-1/mine", "rank-1/shaped"} and tree["as_rank_0"] == {"rank-1/same": "rank-0/same"}


def test_a_step_that_comes_again_is_saved_again(tmp_path) -> None:
    place, asked = CheckpointFolder(tmp_path), threading.Event()

    class Asked(torch.distributed.HashStore):
        def check(self, keys):
            asked.set()
            return super().check(keys)

    store = Asked()
    savers = [Saver(place, Board(store, rank, 2), None) for rank in range(2)]
    for value in (1.0, 2.0):
        asked.clear()
        for one in reversed(savers):  # rank 1 begins, and must wait for what rank 0 tells of this save
            shared = Flat.of({"trained": [], "w": torch.full((5,), value)}, "shared")
            one.start(3, shared, Flat.of({}, f"rank-{one.board.rank}"), True, {**ABOUT, "ranks": 2})
            assert asked.wait(LIMIT_S)
        for one in savers:
            one.wait()
            assert one.outcome() == ""
    _, tensors = read_part(place.of(3), verify(place.of(3)), "shared")
    assert torch.equal(tensors["shared/w"], torch.full((5,), 2.0))
