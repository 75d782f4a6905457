"""Checkpoints as a script and a user see them, in one process: loops, kept values, when to save, the command."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parameter import is_lazy

import guozhuang as gz
from guozhuang import cli
from guozhuang.checkpoint import run as of_run
from guozhuang.checkpoint.folder import CheckpointFolder
from guozhuang.checkpoint.saver import Board
from guozhuang.checkpoint.schedule import SaveTimes
from guozhuang.errors import CheckpointError, UsageError
from guozhuang.launch.options.arguments import read
from guozhuang.launch.options.plan import plan
from guozhuang.net.end_request import ask_to_end, is_awaited
from guozhuang.watch.processes import ENDED_BY_SIGTERM
from guozhuang.world.requests import checkpoint_interval


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    of_run._leave()
    yield
    of_run._leave()


class Script:
    """A script that wraps its model itself, as one with a DDP class of its own does."""

    def __init__(self) -> None:
        of_run._leave()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.kept = gz.keep(model=self.model, optimizer=self.optimizer, best=1.0)
        self.x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
        self.epochs: list[int] = []

    def train(self, stop_after: int | None = None, num_epochs: int = 3, batches: Any = None) -> None:
        num_steps = 0
        for epoch in gz.epochs(num_epochs):
            self.epochs.append(epoch)
            for x in self.x.split(4) if batches is None else batches:
                self.model(x).pow(2).mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                num_steps += 1
                self.kept.best = 1.0 / num_steps
                if num_steps == stop_after:
                    return


def state(script: Script) -> list[torch.Tensor]:
    momenta = [script.optimizer.state[p]["momentum_buffer"] for p in script.model.parameters()]
    return [t.clone() for t in (*script.model.parameters(), *momenta, torch.rand(2))]


def requested(monkeypatch: pytest.MonkeyPatch, folder: Any, every: str = "2steps", keep: int = 2) -> None:
    monkeypatch.setenv("GUOZHUANG_CHECKPOINT", str(folder))
    monkeypatch.setenv("GUOZHUANG_CHECKPOINT_EVERY", every)
    monkeypatch.setenv("GUOZHUANG_CHECKPOINT_KEEP", str(keep))


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each save end before the next one is due, which tiny steps would not."""
    start = of_run._start

    def start_and_wait(saver: Any) -> None:
        start(saver)
        saver.wait()

    monkeypatch.setattr(of_run, "_start", start_and_wait)


def test_the_same_command_goes_on_where_it_stopped(tmp_path, monkeypatch) -> None:
    whole = Script()
    whole.train(batches=gz.loader(whole.x, 4, rank=0, num_replicas=1))
    expected = state(whole)
    settled(monkeypatch)
    requested(monkeypatch, tmp_path)
    first = Script()
    first.train(stop_after=8, batches=gz.loader(first.x, 4, rank=0, num_replicas=1))
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-4", "step-6"]
    second = Script()
    second.train(batches=gz.loader(second.x, 4, rank=0, num_replicas=1))
    assert second.epochs == [1, 2]  # step 6 is the end of epoch 1: nothing is left of its batches
    assert all(torch.equal(a, b) for a, b in zip(expected, state(second), strict=True))
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-8", "step-9"]
    third = Script()
    third.train()
    assert third.epochs == [] and third.kept.best == 1 / 3


def test_batches_of_another_loader_are_steps_too(tmp_path, monkeypatch) -> None:
    settled(monkeypatch)
    requested(monkeypatch, tmp_path, "3steps")
    Script().train(stop_after=7)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-3", "step-6"]


def test_the_state_for_torchs_checkpoints_is_that_of_the_run() -> None:
    first = Script()
    first.train(stop_after=5)
    saved = gz.TrainingState().state_dict()
    expected = state(first)
    second = Script()
    gz.TrainingState().load_state_dict(saved)
    assert second.kept.best == 0.2 and gz.TrainingState().step == 5 and next(gz.epochs(3)) == 1
    assert all(torch.equal(a, b) for a, b in zip(expected, state(second), strict=True))


def test_the_state_counts_steps_by_itself_and_is_the_only_one_until_the_world_is_left() -> None:
    gz.init(device="cpu")
    state, linear = gz.TrainingState(), nn.Linear(3, 1)
    model, optimizer = gz.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1), "single")
    for _ in range(5):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    saved, values = state.state_dict(), state.values
    assert copy.deepcopy({"training": state})["training"] is state and state.values is values
    gz.shutdown()
    gz.init(device="cpu")
    model, optimizer = gz.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1), "single")
    again = gz.TrainingState()
    assert again is not state and again.step == 0
    again.load_state_dict(saved)
    assert again.step == 5
    gz.shutdown()


def test_several_loops_of_epochs(tmp_path) -> None:
    first = Script()
    assert list(gz.epochs(2)) == [0, 1]
    for epoch in gz.epochs(3):
        if epoch == 1:
            gz.save(tmp_path)
            break
    Script()
    gz.restore(tmp_path)
    assert list(gz.epochs(2)) == [] and list(gz.epochs(3)) == [1, 2]
    del first


def test_a_script_that_forgets_to_go_on_is_told(tmp_path, monkeypatch) -> None:
    requested(monkeypatch, tmp_path)
    script = Script()
    with pytest.raises(UsageError, match=r"gz.epochs\(n\)"):
        for x in gz.loader(script.x, 4, rank=0, num_replicas=1):
            script.model(x).sum().backward()
            script.optimizer.step()


def test_a_scheduler_that_is_not_kept_is_seen(tmp_path, monkeypatch, caplog) -> None:
    from guozhuang.registry import registry

    requested(monkeypatch, tmp_path)
    for is_kept in (True, False):
        of_run._leave()
        caplog.clear()
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        registry.add_trained(model, model, optimizer, "single")
        if is_kept:
            gz.keep(scheduler=scheduler)
        batches = gz.loader(range(4), rank=0, num_replicas=1)
        loop = gz.epochs(1)
        next(loop)
        assert ("gz.keep(scheduler=scheduler)" in caplog.text) != is_kept
        assert "gz.loader" not in caplog.text and len(batches) == 4


def test_nothing_to_save_and_what_does_not_fit(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"gz.keep\(model=model"):
        gz.save(tmp_path)
    assert gz.restore(tmp_path) is None
    with pytest.raises(UsageError, match="worse is of a type"):
        gz.keep(worse=threading.Lock())
    script = Script()
    gz.save(tmp_path)
    of_run._leave()
    gz.keep(model=3)
    with pytest.raises(UsageError, match="another kind of value"):
        gz.restore(tmp_path)
    with pytest.raises(AttributeError, match=r"gz.keep\(worst"):
        _ = script.kept.worst


def test_other_data_is_refused_before_anything_is_changed(tmp_path) -> None:
    script = Script()
    script.train(stop_after=2, batches=gz.loader(script.x, 4, rank=0, num_replicas=1))
    kept_alive = gz.loader(script.x, 4, rank=0, num_replicas=1)
    gz.save(tmp_path)
    other = Script()
    before = [p.clone() for p in other.model.parameters()]
    batches = gz.loader(other.x[:8], 4, rank=0, num_replicas=1)
    with pytest.raises(UsageError, match="length=12, but here it is 8"):
        gz.restore(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, other.model.parameters(), strict=True))
    assert len(kept_alive) == 3 and len(batches) == 2


class Counted:
    """An object of a script: a sampler that counts, which can refuse the states that it is given."""

    def __init__(self, count: int, refuses: str = "") -> None:
        self.count, self.refuses, self.list = count, refuses, [count]

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        if self.refuses == "all" or (self.refuses == "saved" and not state["refuses"]):
            raise KeyError("generation")
        self.list[:] = state["list"]


class WithExtra(nn.Linear):
    """A layer with a state of its own kind."""

    extra, refuses = 0, False

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state
        if self.refuses and state == 5:
            raise RuntimeError("no such extra")


def with_objects(number: int) -> tuple[WithExtra, torch.optim.Optimizer, gz.TrainingState]:
    """A prepared model after one step, with what is kept beside it; everything depends on the number."""
    from guozhuang.registry import registry

    of_run._leave()
    torch.manual_seed(number)
    model = WithExtra(3, 2)
    model.extra = number
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, number)
    registry.add_trained(model, model, optimizer, "single")
    gz.keep(scheduler=scheduler, average=nn.Linear(2, 2), third=Counted(number), best=number)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, gz.TrainingState()


@pytest.mark.parametrize("refuses", ["saved", "all", "extra"])
def test_an_object_that_does_not_take_its_state_changes_nothing(tmp_path, refuses) -> None:
    saved = with_objects(5)
    gz.save(tmp_path)
    model, _optimizer, training = with_objects(7)
    model.refuses, training.values.third.refuses = refuses == "extra", refuses
    before = copy.deepcopy([part.tree for part in training.capture()[:2]])
    tensors = [{key: t.clone() for key, t in part.tensors.items()} for part in training.capture()[:2]]
    object_of = "the extra state of WithExtra" if refuses == "extra" else "third of gz.keep"
    with pytest.raises(UsageError, match=f"step-1: {object_of} cannot be restored: ") as caught:
        gz.restore(tmp_path)
    assert ("had before could not be given back" in str(caught.value)) == (refuses == "all")
    if refuses != "all":
        assert [part.tree for part in training.capture()[:2]] == before
    for part, expected in zip(training.capture()[:2], tensors, strict=True):
        assert all(torch.equal(part.tensors[key], value) for key, value in expected.items())
    model.refuses, training.values.third.refuses = False, ""
    assert gz.restore(tmp_path) == 1
    assert (model.extra, training.values.third.list, training.values.best) == (5, [5], 5)
    assert torch.equal(model.weight, saved[0].weight)


def test_extra_states_that_only_one_of_both_models_has_are_refused(tmp_path) -> None:
    from guozhuang.registry import registry

    _saved = with_objects(5)
    gz.save(tmp_path)
    of_run._leave()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    registry.add_trained(model, model, optimizer, "single")
    before = model.weight.clone()
    with pytest.raises(UsageError, match="extra states are here or in it, not in both"):
        gz.restore(tmp_path)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--every", "5min"], "--every is about checkpoints"),
        (["--keep", "2"], "--keep is about checkpoints"),
        (["--checkpoint", "c", "--keep", "0"], "--keep is a count"),
        (["--checkpoint", "c", "--every", "5"], "--every must be a number of steps or a duration"),
    ],
)
def test_options_that_cannot_be(words, text, tmp_path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(UsageError, match=text):
        plan(read([*words, str(script)]), {})


def test_options_reach_the_ranks(tmp_path, monkeypatch) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.chdir(tmp_path)
    found = plan(read(["--checkpoint", "c", "--every", "2h", str(script)]), {}).variables
    assert found["GUOZHUANG_CHECKPOINT"] == str(tmp_path / "c")
    assert (found["GUOZHUANG_CHECKPOINT_EVERY"], found["GUOZHUANG_CHECKPOINT_KEEP"]) == ("2h", "3")


def test_one_that_is_not_whole_is_left_out_and_both_facts_are_said(tmp_path, caplog) -> None:
    script = Script()
    for _ in range(2):
        script.train(stop_after=1, num_epochs=9)
        gz.save(tmp_path)
    (tmp_path / "step-2" / "shared.json").write_text("{}")
    Script()
    assert gz.restore(tmp_path) == 1
    assert (
        "step-2 is not whole: shared.json has 2 bytes" in caplog.text
        and f"goes on from {tmp_path / 'step-1'}" in caplog.text
    )
    (tmp_path / "step-1" / "manifest.json").unlink()
    script = Script()
    before = [p.clone() for p in script.model.parameters()]
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        gz.restore(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, script.model.parameters(), strict=True))


def test_only_one_run_writes_into_a_folder(tmp_path, monkeypatch) -> None:
    requested(monkeypatch, tmp_path)
    Script()
    loop = gz.epochs(1)
    next(loop)
    held, of_run._saving.lock = of_run._saving.lock, None
    Script()
    with pytest.raises(UsageError, match="another run"):
        next(gz.epochs(1))
    of_run._saving.lock = held


def test_a_rank_without_a_batch_takes_part_in_the_pause_of_the_others(tmp_path, monkeypatch) -> None:
    script = Script()
    batches = gz.loader(script.x[:1], 4, rank=1, num_replicas=2, ends="uneven")
    monkeypatch.setattr(of_run, "of_all", lambda mine: [True, mine])
    assert [list(batches) for _ in gz.epochs(2)] == [[], []] and of_run._saving.state.step == 2


def test_where_it_stopped_comes_before_where_it_began(tmp_path, monkeypatch) -> None:
    script = Script()
    script.train(stop_after=1)
    gz.save(tmp_path / "began")
    for stop_after, expected in ((3, 1), (1, 3)):
        requested(monkeypatch, tmp_path / "runs", "1steps")
        settled(monkeypatch)
        script = Script()
        assert gz.restore(tmp_path / "began") == 1
        loop = gz.epochs(9)
        next(loop)
        assert of_run._saving.state.step == expected
        loop.close()
        script.train(stop_after=stop_after, num_epochs=9)


class Caching(nn.Module):
    """A module with a cache that its forward enlarges, and one that its forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 1)
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.arange(5.0)
        if not hasattr(self.inside, "mask"):
            self.inside.register_buffer("mask", torch.rand(3), persistent=False)
        return self.inside(x)


def test_caches_of_other_shapes_come_back(tmp_path, caplog) -> None:
    from guozhuang.registry import registry

    def made() -> Caching:
        of_run._leave()
        model = Caching()
        model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[assignment]
        registry.add_trained(model, model, model.optimizer, "single")  # type: ignore[arg-type]
        return model

    first = made()
    first(torch.ones(2))
    gz.save(tmp_path)
    second = made()
    second.inside.bias.requires_grad_(False)
    assert gz.restore(tmp_path) == 0
    assert "requires_grad was set otherwise" in caplog.text and "inside.bias" in caplog.text
    assert torch.equal(second.cache, first.cache) and torch.equal(second.inside.mask, first.inside.mask)
    assert list(second.state_dict()) == ["inside.weight", "inside.bias"]


def test_a_lazy_model_is_saved_after_its_first_forward_and_comes_back_before_it(tmp_path) -> None:
    from guozhuang.registry import registry

    def made() -> nn.Module:
        of_run._leave()
        model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        registry.add_trained(model, model, optimizer, "single")
        model.optimizer = optimizer  # type: ignore[assignment]
        return model

    def step(model: Any) -> None:
        model(torch.ones(5, 3).cumsum(0)).pow(2).sum().backward()
        model.optimizer.step()
        model.optimizer.zero_grad()

    first = made()
    with pytest.raises(UsageError, match=r"no shape before the first forward.*0\.weight.*after the first forward"):
        gz.save(tmp_path)
    step(first)
    gz.save(tmp_path)
    second = made()
    assert gz.restore(tmp_path) == 1
    for model in (first, second):
        step(model)
    for (name, mine), theirs in zip(second.state_dict().items(), first.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    larger = made()
    larger.append(nn.LazyLinear(2))
    with pytest.raises(UsageError, match=r"another model: its parameters differ: .*3\.weight .*nothing saved"):
        gz.restore(tmp_path)
    assert all(is_lazy(each) for each in larger[0].parameters()), "nothing was changed"


def test_death_between_two_names_loses_nothing(tmp_path, monkeypatch) -> None:
    script = Script()
    script.train(stop_after=1)
    gz.save(tmp_path)
    rename = os.rename

    def fail(source: Any, target: Any) -> None:
        if str(source).endswith("step-1.partial"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        gz.save(tmp_path)
    assert (tmp_path / "step-1").exists()
    monkeypatch.undo()
    os.rename(tmp_path / "step-1", tmp_path / "step-1.replaced.partial")  # where a process ended that replaced it
    Script()
    assert gz.restore(tmp_path) == 1


def test_those_of_later_steps_do_not_push_out_the_newest(tmp_path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in range(6):
        folder.of(step).mkdir()
    folder.prune(2, 3)
    assert folder.steps() == [5, 4, 3, 2]


# ---- when to save ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500steps", (500, None)),
        ("1step", (1, None)),
        ("30s", (None, 30.0)),
        ("5min", (None, 300.0)),
        ("1.5h", (None, 5400.0)),
    ],
)
def test_intervals(text, expected) -> None:
    assert checkpoint_interval(text) == expected


@pytest.mark.parametrize("text", ["", "5", "0steps", "0min", "-3s", "1.5steps", "5 minutes", "steps"])
def test_intervals_that_cannot_be(text) -> None:
    with pytest.raises(UsageError, match="500steps, 30s, 5min or 2h"):
        checkpoint_interval(text)


@pytest.mark.parametrize("step_s", [0.001, 0.3, 7.0])
def test_all_ranks_save_after_the_same_step_whatever_their_clocks_say(step_s) -> None:
    store, now = torch.distributed.HashStore(), [0.0]
    ranks = [
        SaveTimes(None, 60.0, Board(store, rank, 3), 5.0, clock=lambda r=rank: now[0] + 1000 * r)  # type: ignore[misc]
        for rank in range(3)
    ]
    due: list[float] = []
    for step in range(1, round(400 / step_s)):
        now[0] += step_s
        told = [each.is_due(step) for each in ranks]
        assert len(set(told)) == 1
        if told[0]:
            due.append(now[0])
            ranks[0].saved()
    gaps = [b - a for a, b in zip([0.0, *due], due, strict=False)]
    assert len(due) >= 5 and all(58 <= gap <= 60 + 3 * max(1.0, step_s) for gap in gaps), gaps
    assert store.num_keys() < 5 + 3 * 60 / min(1.0, 64 * step_s)  # what was read is removed


@pytest.mark.parametrize(
    ("every", "step_s"), [((3, None), 0.01), ((100, None), 0.01), ((None, 300.0), 0.01), ((7, None), 9.0)]
)
def test_all_ranks_save_for_the_last_time_after_the_same_step(every, step_s) -> None:
    store, now, asked = torch.distributed.HashStore(), [0.0], []
    boards = [Board(store, rank, 3) for rank in range(3)]
    ranks = [SaveTimes(*every, board, 5.0, lambda: bool(asked), lambda: now[0]) for board in boards]
    for step in range(1, 1000):
        now[0] += step_s
        told = {(each.is_due(step), each.is_last) for each in ranks}
        assert len(told) == 1
        if step == 205:
            asked.append(now[0])
        if told == {(True, True)}:
            break
        if told == {(True, False)}:
            ranks[0].saved()
        assert (True, True) not in told and (every[0] is None or told == {(step % every[0] == 0, False)})
    assert asked and now[0] - asked[0] <= 2 * max(1.0, step_s)


def test_a_request_is_seen_after_the_step_has_gone_back() -> None:
    now, asked = [0.0], [False]
    times = SaveTimes(None, 300.0, Board(None, 0, 1), 5.0, lambda: asked[0], lambda: now[0])
    for step in (*range(1, 1001), *range(400, 600)):
        now[0] += 0.01
        if times.is_due(step):
            break
        asked[0] = asked[0] or times.num_steps == 1000
    assert times.is_last and times.num_steps <= 1000 + 2 * 64


@pytest.mark.parametrize("when", ["the last step", "the save after it", "before a break"])
def test_a_request_after_the_last_check_is_obeyed(tmp_path, monkeypatch, caplog, when) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(of_run, "store_of_launcher", lambda: store)
    requested(monkeypatch, tmp_path, "5min")
    script = Script()
    if when == "the save after it":
        save = of_run.save
        monkeypatch.setattr(of_run, "save", lambda folder: (save(folder), ask_to_end(store)))
    assert not ask_to_end(store)

    def batches() -> Iterator[torch.Tensor]:
        for batch in range(3):
            if when != "the save after it" and script.epochs == [0, 1, 2] and batch == 2:
                assert ask_to_end(store)
            yield script.x[:4]

    if when == "before a break":
        script.train(stop_after=9, batches=_Again(batches))
        gc.collect()
        assert not is_awaited(store)  # so the launcher sends a signal
        return
    with pytest.raises(SystemExit) as ended:
        script.train(batches=_Again(batches))
    assert ended.value.code == ENDED_BY_SIGTERM and is_awaited(store)
    assert f"asked to end, and {tmp_path / 'step-9'} is saved" in caplog.text
    monkeypatch.undo()
    requested(monkeypatch, tmp_path, "5min")
    again = Script()
    again.train()
    assert again.epochs == []  # nothing is left to train; the script goes on after its loop


class _Again:
    def __init__(self, make: Any) -> None:
        self._make = make

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._make()  # type: ignore[no-any-return]


def test_a_rank_that_gets_no_decision_says_who_did_not_decide() -> None:
    alone = SaveTimes(None, 60.0, Board(torch.distributed.HashStore(), 1, 2), 0.05)
    assert not alone.is_due(1)
    with pytest.raises(CheckpointError, match="rank 0 did not answer"):
        alone.is_due(2)


# ---- the command ----------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys, monkeypatch) -> None:
    folder = tmp_path / "c"
    script = Script()
    script.train(stop_after=2)
    gz.save(folder)
    for action, text in (("list", "step-2"), ("show", "kept best: 0.5"), ("verify", "step-2: whole")):
        assert cli.main(["checkpoint", action, str(folder)]) == 0
        assert text in capsys.readouterr().out
    assert cli.main(["checkpoint", "export", str(folder), str(tmp_path / "m.safetensors")]) == 2  # nothing was prepared
    (folder / "step-2" / "rank-0.json").write_bytes(b"")
    for action in ("list", "verify", "show"):
        assert cli.main(["checkpoint", action, str(folder)]) == 1
        assert "rank-0.json" in capsys.readouterr().out
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(2), persistent=False)


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_the_exported_model_is_the_plain_model(tmp_path, capsys, ending) -> None:
    from guozhuang.registry import registry

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    registry.add_trained(model, model, optimizer, "single")
    gz.save(tmp_path / "c")
    path = tmp_path / f"model{ending}"
    assert cli.main(["checkpoint", "export", str(tmp_path / "c"), str(path)]) == 0
    found = load_file(path) if ending == ".safetensors" else torch.load(path, weights_only=True)
    Tied().load_state_dict(found, strict=True)
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())
