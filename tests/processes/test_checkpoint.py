"""Checkpoints of real ranks: what is restored is what was saved, and a run that goes on is the run that was not interrupted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import guozhuang as gz
from guozhuang.checkpoint import run as of_run
from guozhuang.data import Loader
from guozhuang.errors import MismatchError, UsageError
from guozhuang.registry import registry
from tests.ranks import run_ranks
from tests.waiting import LIMIT_S

NUM_EPOCHS, SAVED_AT = 3, 4
EXACT = ("ddp", "sharded")
SOME = ("ddp", "sharded", "diloco")
MORE = (
    *("auto", "sharded-weights", "dithering", "decentralized-pairs", "qadam", "none"),
    *(
        "sharded-gradients",
        "sharded-quantize8",
        "torch-ddp",
        "horovod",
        "onebit",
        "topk",
        "powersgd",
        "sparse-rows",
        "adasum",
    ),
    *(
        "parameter-server",
        "local-sgd",
        "overlapped-local-sgd",
        "decentralized",
        "low-precision-decentralized",
        "onebit-adam",
    ),
)


class Model(nn.Module):
    """Draws, keeps running statistics, a buffer that ``state_dict`` leaves out, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
        self.register_buffer("calls", torch.zeros(1), persistent=False)
        self.extra = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.extra += 1
        return self.layers(x + 0.1 * self.calls.sin() * random.random() * float(np.random.rand()))

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.extra)

    def set_extra_state(self, state: Tensor) -> None:
        self.extra = int(state)


class Run:
    """A script from its beginning to the end, or to a step at which it dies."""

    def __init__(self, strategy: str, rank: int) -> None:
        of_run._leave()  # what an earlier run of this process registered
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(48, 6, generator=generator)
        self.module = Model()
        self.optimizer = torch.optim.AdamW(
            [{"params": self.module.layers[4].parameters()}, {"params": self.module.layers[:4].parameters()}], lr=1e-2
        )
        if strategy in ("qadam", "onebit-adam"):
            self.optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.model, self.optimizer = gz.prepare(self.module, self.optimizer, strategy)
        self.ema = AveragedModel(Model(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.kept = gz.keep(scheduler=self.scheduler, ema=self.ema, best=float("inf"), seen=[])
        self.batches = gz.loader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 + rank)

    def train(self, until: int | None = None, folder: str | None = None) -> None:
        """Train; at step ``SAVED_AT`` save into the folder, if there is one."""
        for _ in gz.epochs(NUM_EPOCHS):
            for x, y in self.batches:
                loss = nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.kept.best = min(self.kept.best, loss.item())
                self.kept.seen = [*self.kept.seen, round(y.float().sum().item())]
                self.ema.update_parameters(self.module_with_whole_weights())
                step = len(self.kept.seen)
                if step == SAVED_AT and folder is not None:
                    gz.save(folder)
                if step == until:
                    return

    def registered(self) -> gz.TrainingState:
        return gz.TrainingState()

    def module_with_whole_weights(self) -> nn.Module:
        if not any(hasattr(p, "full_tensor") for p in self.module.parameters()):
            return self.module
        whole = Model()
        with torch.no_grad():
            for mine, p in zip(whole.parameters(), self.module.parameters(), strict=True):
                mine.copy_(p.full_tensor())
        return whole

    def everything(self) -> dict[str, Any]:
        """All that a rank could see of the run's state."""
        found: dict[str, Any] = {
            f"weight {n}": p.detach().clone() for n, p in self.module_with_whole_weights().named_parameters()
        }
        found |= {f"buffer {name}": b.clone() for name, b in self.module.named_buffers()}
        state = self.optimizer.state_dict()["state"]
        for index, values in state.items():
            for key, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, Tensor):
                    found[f"optimizer {index} {key}"] = (
                        value.full_tensor() if hasattr(value, "full_tensor") else value
                    ).clone()
        found |= {f"ema {n}": v.clone() for n, v in self.ema.state_dict().items() if isinstance(v, Tensor)}
        return {
            **found,
            "extra": self.module.extra,
            "lr": [group["lr"] for group in self.optimizer.param_groups],
            "kept": (self.kept.best, self.kept.seen),
            "scheduler": self.scheduler.state_dict()["last_epoch"],
            "loader": self.batches.state_dict(),
            "draws": (torch.rand(2), random.random(), np.random.rand()),
        }


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor):
            return x.dtype == y.dtype and torch.equal(x, y)
        if isinstance(x, tuple):
            return len(x) == len(y) and all(map(same, x, y))
        return bool(x == y)

    return [key for key in sorted(a.keys() | b.keys()) if key not in a or key not in b or not same(a[key], b[key])]


def goes_on(rank: int, world_size: int, strategies: tuple[str, ...], folder: str) -> list[str]:
    """Train with a checkpoint on the way; then begin anew from the checkpoint. Return what differs at the end."""
    gz.init(timeout_s=LIMIT_S)
    wrong = []
    for strategy in strategies:
        first = Run(strategy, rank)
        first.train(folder=f"{folder}/{strategy}")
        expected = first.everything()
        del first
        second = Run(strategy, rank)
        assert gz.restore(f"{folder}/{strategy}") == SAVED_AT
        second.train()
        wrong += [f"{strategy}: {key}" for key in differing(expected, second.everything())]
        del second
    gz.shutdown()
    return wrong


def arrives(rank: int, world_size: int, pairs: list[tuple[str, str]], folder: str) -> list[str]:
    """Restore each checkpoint under another strategy and number of ranks; return what is not as in its files."""
    gz.init(timeout_s=LIMIT_S)
    wrong = []
    for saved, strategy in pairs:
        run = Run(strategy, rank)
        assert gz.restore(f"{folder}/{saved}") == SAVED_AT
        shared = load_file(f"{folder}/{saved}/step-{SAVED_AT}/shared.safetensors")
        found = run.everything()
        for key, value in shared.items():
            if "/parameters/" in key:
                name = key.partition("/parameters/")[2]
                wrong += [f"{saved} to {strategy}: {name}"] if not torch.equal(found[f"weight {name}"], value) else []
        if saved in EXACT:  # the optimizer's state is one for all ranks
            names = {id(p): n for n, p in run.module.named_parameters()}
            order = [names[id(p)] for group in run.optimizer.param_groups for p in group["params"]]
            for index, name in enumerate(order):
                saved_value = shared[f"shared/trained/0/optimizer/state/{name}/exp_avg"]
                if strategy in EXACT and not torch.equal(found[f"optimizer {index} exp_avg"], saved_value):
                    wrong.append(f"{saved} to {strategy}: exp_avg of {name}")
        assert found["kept"][1] == found["kept"][1] and len(found["kept"][1]) == SAVED_AT
        consumed = found["loader"]["consumed"]
        run.train(until=SAVED_AT + 1)
        assert run.batches.state_dict()["consumed"] == consumed + 4 * world_size or consumed % 48 == 0, (
            saved,
            strategy,
        )
        assert all(p.isfinite().all() for p in run.module_with_whole_weights().parameters())
        del run
    gz.shutdown()
    return wrong


def check_strategies(
    strategies: tuple[str, ...], folder: Path, pairs: list[tuple[str, str]], sizes: tuple[int, ...]
) -> None:
    env = {"GUOZHUANG_SERVERS": None}
    assert run_ranks(goes_on, 2, strategies, str(folder), init=False, env=env, timeout_s=150) == [[], []]
    for num_ranks in sizes:
        assert run_ranks(arrives, num_ranks, pairs, str(folder), init=False, env=env) == [[]] * num_ranks


def test_a_run_goes_on_bit_for_bit_and_on_any_number_of_ranks(tmp_path) -> None:
    pairs = [("ddp", "sharded"), ("sharded", "ddp"), ("diloco", "diloco")]
    check_strategies(SOME, tmp_path, pairs, (1,))


@pytest.mark.slow
def test_every_other_strategy_goes_on_too(tmp_path) -> None:
    own_groups = ("qadam", "onebit-adam")  # their scripts here have an optimizer of other groups
    pairs = [(s, other) for s in MORE for other in ((s,) if s in own_groups else (s, "sharded-weights"))]
    check_strategies((*MORE, *SOME), tmp_path, [*pairs, *((s, o) for s in SOME for o in SOME)], (1, 3))


def diverges(rank: int, world_size: int, folder: str) -> None:
    gz.init(timeout_s=LIMIT_S)
    for planted in ("weight", "momentum", "rate"):
        run = Run("ddp", rank)
        run.train(until=2)
        if rank == 1:
            p = run.module.layers[4].weight
            with torch.no_grad():
                if planted == "weight":
                    p[0, 3] += 1e-7
                elif planted == "momentum":
                    run.optimizer.state[p]["exp_avg"][1, 1] *= 1.0001
                else:
                    run.optimizer.param_groups[0]["lr"] *= 2
        with pytest.raises(
            MismatchError,
            match="rank 1: .*"
            + {"weight": "layers.4.weight", "momentum": "layers.4.weight/exp_avg"}.get(planted, "learning rates"),
        ):
            gz.save(folder)
        assert not list(Path(folder).glob("step-*"))
    assert registry.on_pause is not None
    gz.shutdown()


def test_replicas_that_differ_are_refused_by_name(tmp_path) -> None:
    run_ranks(diverges, 2, str(tmp_path), init=False)


def through_dcp(rank: int, world_size: int, strategies: tuple[str, ...], folder: str) -> list[str]:
    """Like ``goes_on``, by PyTorch's own checkpoints."""
    import torch.distributed.checkpoint as dcp

    gz.init(timeout_s=LIMIT_S)
    wrong = []
    for strategy in strategies:
        path = f"{folder}/{strategy}"
        first = Run(strategy, rank)
        first.train(until=SAVED_AT)
        dcp.save({"training": first.registered()}, checkpoint_id=path)
        saved = first.everything()
        second = Run(strategy, rank)
        dcp.load({"training": second.registered()}, checkpoint_id=path)
        assert second.registered().step == SAVED_AT
        wrong += [f"{strategy}: {key}" for key in differing(saved, second.everything())]
        del first, second
    gz.shutdown()
    return wrong


@pytest.mark.slow
def test_torchs_checkpoints_hold_every_rank(tmp_path) -> None:
    strategies = ("ddp", "sharded", "sharded-weights", "diloco", "decentralized", "local-sgd", "dithering")
    assert run_ranks(through_dcp, 2, strategies, str(tmp_path), init=False) == [[], []]


class Refusing:
    """An object of a script that does not take the state of a checkpoint."""

    def __init__(self, state: int, refuses: bool) -> None:
        self.state, self.refuses = state, refuses

    def state_dict(self) -> dict[str, int]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state["state"]
        if self.refuses and self.state == 1:
            raise KeyError("generation")


def refused_on_one(rank: int, size: int, strategy: str, folder: str) -> tuple[str, list[str]]:
    """Restore where an object of rank 1 refuses; return the error, and what has changed all the same."""
    gz.init(timeout_s=LIMIT_S)
    first = Run(strategy, rank)
    gz.keep(own=Refusing(1, False))
    first.train(until=SAVED_AT)
    gz.save(folder)
    run = Run(strategy, rank)
    kept = gz.keep(own=Refusing(2, rank == 1))
    before = run.everything()
    with pytest.raises(UsageError) as caught:
        gz.restore(folder)
    changed = [what for what in differing(before, run.everything()) if what != "draws"]  # the look itself draws
    changed += ["own"] * (kept.own.state != 2)
    gz.shutdown()
    return str(caught.value), changed


@pytest.mark.parametrize("strategy", ["ddp", "sharded"])
def test_an_object_of_one_rank_that_does_not_take_its_state_changes_nothing_on_any(tmp_path, strategy) -> None:
    for rank, (text, changed) in enumerate(run_ranks(refused_on_one, 2, strategy, str(tmp_path), init=False)):
        assert "own of gz.keep cannot be restored: KeyError: 'generation'" in text
        assert ("(on rank 1)" in text) == (rank == 0)
        assert changed == []


def forgets(rank: int, world_size: int, strategy: str, folder: str) -> dict[str, list[str]]:
    """Leave one part of a checkpoint out at a time when it is restored; return what differs at the end for each."""
    from guozhuang.checkpoint import state as of_state
    from guozhuang.checkpoint import trained as of_trained

    gz.init(timeout_s=LIMIT_S)
    first = Run(strategy, rank)
    first.train(folder=folder)
    expected = first.everything()
    del first
    found = {}
    nothing: Any = lambda *_, **__: ""  # noqa: E731
    for what, where, name, instead in (
        ("nothing", of_state, "machine", of_state.machine),
        ("weights", of_trained, "_set_parameters", nothing),
        ("buffers", of_trained, "_set_buffers", nothing),
        ("extra states", Model, "set_extra_state", nothing),
        ("kept objects", of_state, "_restore_objects", nothing),
        ("optimizer", of_trained, "_load_optimizer", nothing),
        ("exchange", of_trained, "_load_exchange", nothing),
        ("generators", of_state, "set_generators", nothing),
        ("loader", Loader, "load_state_dict", nothing),
        ("kept values", of_state, "set_values", lambda *_: []),
    ):
        run = Run(strategy, rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, name, instead)
            gz.restore(folder)
        run.train()
        found[what] = differing(expected, run.everything())
        del run
    gz.shutdown()
    return found


@pytest.mark.slow
def test_whatever_is_left_out_is_noticed(tmp_path) -> None:
    """The tests above would fail for each part that a checkpoint forgot."""
    for found in run_ranks(forgets, 2, "local-sgd", str(tmp_path), init=False):
        assert found.pop("nothing") == []
        assert [what for what, differ in found.items() if not differ] == []
