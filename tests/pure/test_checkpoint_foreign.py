"""Checkpoints that another program made: refused by the entry that differs, before anything of the training has changed."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import guozhuang as gz
from guozhuang.checkpoint import folder
from guozhuang.checkpoint import run as of_run
from guozhuang.checkpoint.folder import LOCK, MANIFEST, CheckpointFolder, hold, sees
from guozhuang.errors import CheckpointError, UsageError
from guozhuang.registry import registry

PARTS = ("shared.json", "rank-0.json")


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    of_run._leave()
    yield
    of_run._leave()


def training(make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that is registered as gz.prepare does under one process, without a process group."""
    of_run._leave()
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.1)
    of_run.begin_session()
    registry.add_trained(model, model, optimizer, "single", "")
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(path: Path, num: int = 2) -> None:
    model, optimizer = training()
    for _ in range(num):
        step(model, optimizer)
        registry.pause()
        gz.save(path)


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the records of a checkpoint, each under the name of its file, and let all hashes fit."""
    records = {name: json.loads((checkpoint / name).read_bytes()) for name in (MANIFEST, *PARTS)}
    change(records)
    body = records[MANIFEST]
    for name in PARTS:
        text = json.dumps(records[name]).encode()
        (checkpoint / name).write_bytes(text)
        if isinstance(body.get("files"), dict) and name in body["files"]:
            body["files"][name] = {"bytes": len(text), "sha256": folder.hashlib.sha256(text).hexdigest()}
    body.pop("sha256", None)
    (checkpoint / MANIFEST).write_text(json.dumps({**body, "sha256": folder._own_hash(body)}))


def entries(checkpoint: Path) -> list[tuple[str, ...]]:
    """The path of every entry of the records that must be there."""
    optional = {"frozen"}
    free = {
        "machine",
        "as_rank_0",
        "generators",
        "buffers",
        "extra",
        "exchange",
        "tied",
        "groups",
        "state",
        "rest",
        "kept",
    }
    found: list[tuple[str, ...]] = []

    def walk(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, dict) and not any(key.startswith("$") for key in value):
            for key, each in value.items():
                if key in optional or (key == "class" and path[-1] == "optimizer") or path[-1:] == ("parameters",):
                    continue
                found.append((*path, key))
                if key not in free:
                    walk(each, (*path, key))
        elif isinstance(value, list):
            for i, each in enumerate(value):
                walk(each, (*path, str(i)))

    for name in (MANIFEST, *PARTS):
        walk(json.loads((checkpoint / name).read_bytes()), (name,))
    written_anew = {(MANIFEST, "sha256"), *((MANIFEST, "files", name) for name in PARTS)}  # by ``rewrite``
    return [path for path in found if path[:2] not in written_anew and path[:3] not in written_anew]


def at(records: Any, path: tuple[str, ...]) -> Any:
    for key in path[:-1]:
        records = records[int(key)] if isinstance(records, list) else records[key]
    return records


def test_each_entry_that_is_missing_or_of_another_type_is_refused_and_the_older_one_taken(tmp_path, caplog) -> None:
    saved(tmp_path / "good")
    wrong = []
    for path in entries(tmp_path / "good" / "step-2"):
        for is_missing in (True, False):
            shutil.rmtree(tmp_path / "bad", ignore_errors=True)
            shutil.copytree(tmp_path / "good", tmp_path / "bad")

            def change(records: Any, path: tuple[str, ...] = path, is_missing: bool = is_missing) -> None:
                inside = at(records, path)
                found = inside.pop(path[-1])
                if not is_missing:  # no entry is a negative number
                    inside[path[-1]] = -1
                    assert found != -1

            rewrite(tmp_path / "bad" / "step-2", change)
            here = training()
            caplog.clear()
            if gz.restore(tmp_path / "bad") != 1 or "step-2 is not whole" not in caplog.text or not here:
                wrong.append((path, is_missing))
    assert not wrong


@pytest.mark.parametrize("value", [{"$dtype": "float99"}, {"$device": "nowhere"}, {"$tensor": "nothing"}, {"$new": 1}])
def test_values_that_this_version_does_not_know(tmp_path, value, caplog) -> None:
    saved(tmp_path)
    rewrite(tmp_path / "step-2", lambda records: records["rank-0.json"]["tree"]["trained"][0]["extra"].update(a=value))
    here = training()
    assert gz.restore(tmp_path) == 1 and here
    assert "step-2 is not whole" in caplog.text


def test_when_none_is_left_nothing_has_changed(tmp_path) -> None:
    saved(tmp_path, 1)
    rewrite(tmp_path / "step-1", lambda records: records[MANIFEST].pop("saved_at"))
    model, optimizer = training()
    step(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(CheckpointError, match="no entry 'saved_at'"):
        gz.restore(tmp_path)
    assert repr(before) == repr((model.state_dict(), optimizer.state_dict()))


@pytest.mark.parametrize("ranks", [0, -1, True, 2, 10**9, "1"])
def test_a_number_of_ranks_that_cannot_be(tmp_path, ranks) -> None:
    saved(tmp_path, 1)
    rewrite(tmp_path / "step-1", lambda records: records[MANIFEST].update(ranks=ranks))
    training()
    with pytest.raises(CheckpointError, match="rank"):
        gz.restore(tmp_path)


def test_another_optimizer_is_refused_by_name(tmp_path) -> None:
    saved(tmp_path, 1)
    model, _ = training(torch.optim.Adam)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match="state of SGD, and the optimizer here is Adam"):
        gz.restore(tmp_path)
    assert repr(before) == repr(model.state_dict())


@pytest.mark.parametrize("what", ["file", "link", "fifo"])
def test_what_is_no_folder_in_the_place_of_one(tmp_path, what) -> None:
    """The newest checkpoint, and the folder into which one is written, are something else."""
    saved(tmp_path / "c")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    for name in ("step-9", "step-3.partial"):
        path = tmp_path / "c" / name
        if what == "file":
            path.write_text("x")
        elif what == "link":
            path.symlink_to(outside)
        else:
            os.mkfifo(path)
    model, optimizer = training()
    assert gz.restore(tmp_path / "c") == 2
    step(model, optimizer)
    registry.pause()
    gz.save(tmp_path / "c")
    assert CheckpointFolder(tmp_path / "c").of(3).is_dir()
    assert [each.name for each in outside.iterdir()] == ["precious"]


@pytest.mark.parametrize("kind", ["link", "hard link", "folder", "fifo", "large"])
def test_the_lock_is_a_file_of_this_program_or_nothing_is_written(tmp_path, kind) -> None:
    precious, lock = tmp_path / "precious", tmp_path / "c" / LOCK
    precious.write_text("precious")
    lock.parent.mkdir()
    {
        "link": lambda: lock.symlink_to(precious),
        "hard link": lambda: lock.hardlink_to(precious),
        "folder": lambda: lock.mkdir(),
        "fifo": lambda: os.mkfifo(lock),
        "large": lambda: lock.write_text("x" * 100),
    }[kind]()
    with pytest.raises(UsageError, match="folder for checkpoints"):
        hold(lock.parent)
    assert precious.read_text() == "precious"


def test_a_lock_that_becomes_a_link_is_not_seen(tmp_path) -> None:
    descriptor, sign = hold(tmp_path)
    os.close(descriptor or 0)
    assert sees(tmp_path, sign)
    os.rename(tmp_path / LOCK, tmp_path / "other")
    (tmp_path / LOCK).symlink_to(tmp_path / "other")
    assert not sees(tmp_path, sign)


def test_folders_whose_names_are_no_text(tmp_path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    saved(path)
    here = training()
    assert gz.restore(path) == 2 and here
