"""One script under every strategy: the model under its own names; accumulation, clipping and scaling against one process."""

from __future__ import annotations

import copy
import io
import pickle
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import guozhuang as gz
from guozhuang.errors import MismatchError, UsageError
from guozhuang.strategies import STRATEGIES, get
from guozhuang.world.layout import HYBRID, OWN_AXIS
from tests.ranks import GROUP_TIMEOUT_S, run_ranks
from tests.waiting import LIMIT_S

STEPS, MICRO, ROWS = 3, 4, 2  # optimizer steps, micro-batches in a step, rows of a rank in a micro-batch
DIVIDED = ("sharded-gradients", "sharded-weights")
DIVIDE_THE_MODEL = (*OWN_AXIS, HYBRID)  # tests/processes/test_layouts.py
SEVERAL = tuple(
    name for name, s in STRATEGIES.items() if not (s.one_process or s.divides_itself or name in DIVIDE_THE_MODEL)
)


class Config:
    width = 6


class Named(nn.Module):
    """It has what scripts reach for on a model: methods, a property, a buffer, parts, attributes that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 1)
        self.register_buffer("scale", torch.ones(1))
        self.config, self.temperature = Config(), 1.0

    @property
    def width(self) -> int:
        return self.config.width

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) * self.scale / self.temperature

    @torch.no_grad()
    def sample(self, x: Tensor, times: int = 1) -> Tensor:
        """Call the model, as generate() does."""
        return self(x).mean() * times

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    def loss_by_parts(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.head(torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))).square().mean()}


def made() -> tuple[Named, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Named()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


def prepared(strategy: str) -> tuple[Any, torch.optim.Optimizer]:
    return gz.prepare(*made(), strategy=strategy)


def data(step: int, micro: int) -> Tensor:
    """The rows of all ranks together."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    return torch.randn(2 * ROWS, 6, generator=generator)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }


# ---- the model under its own names --------------------------------------------------------------------------------------


def names(rank: int, strategy: str) -> None:
    plain, _ = made()
    model, _ = prepared(strategy)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert model.config is gz.unwrap(model).config and model.width == 6
    assert model.scale is gz.unwrap(model).scale and model.layers[1].bias.shape == (6,)
    assert model.get_parameter("layers.0.weight") is model.layers[0].weight
    assert issubclass(type(gz.unwrap(model)), Named) and gz.unwrap(gz.unwrap(model)) is gz.unwrap(model)
    assert [n for n, _ in model.named_children()] == ["layers", "head"] and bool(model)
    seen: list[nn.Module] = []
    assert model.apply(seen.append) is model and {*seen} == {*model.modules()}
    assert not any(part.training for part in (model.eval(), *model.modules())) and not gz.unwrap(model).training
    assert all(part.training for part in (model.train(), *model.modules())) and gz.unwrap(model).training
    assert "sample" in dir(model) and "generate()" in model.sample.__doc__
    with pytest.raises(AttributeError, match=r"Named' object has no attribute 'smaple'"):
        _ = model.smaple
    x = data(0, 0)
    torch.testing.assert_close(model.sample(x, times=3), plain(x).mean() * 3)
    model.temperature, model.new = 2.0, "mine"
    torch.testing.assert_close(model(x), plain(x) / 2)
    assert gz.unwrap(model).new == "mine"
    del model.new
    assert not hasattr(gz.unwrap(model), "new")
    model.temperature = 1.0
    other = {name: value + 0.5 for name, value in plain.state_dict().items()}
    if strategy not in DIVIDED:
        twin = copy.deepcopy(model)
        assert type(twin) is Named and whole(twin).keys() == whole(model).keys()
        again = pickle.loads(pickle.dumps(model))
        assert type(again) is Named and torch.equal(again.head.weight, model.head.weight)
        if rank == 0 and strategy not in WEIGHTS_ARE_EXCHANGED:
            torch.save(model.state_dict(), io.BytesIO())
        assert model.load_state_dict(other).missing_keys == []
        plain.load_state_dict(other)
        torch.testing.assert_close(model.sample(x), plain(x).mean())
        assert not torch.equal(twin.head.weight, model.head.weight)
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "layers.0.bias"'):
            model.load_state_dict({name: value for name, value in other.items() if name != "layers.0.bias"})
        parent = nn.ModuleDict({"inner": model})
        assert list(parent.state_dict()) == [f"inner.{name}" for name in plain.state_dict()]
        assert [n for n, _ in parent.named_parameters()] == [f"inner.{n}" for n, _ in plain.named_parameters()]
        parent.load_state_dict({f"inner.{name}": value * 2 for name, value in other.items()})
        torch.testing.assert_close(whole(model)["head.bias"], other["head.bias"] * 2)


WEIGHTS_ARE_EXCHANGED = (
    "local-sgd",
    "overlapped-local-sgd",
    "node-local-sgd",
    "diloco",
    "decentralized",
    "decentralized-pairs",
    "low-precision-decentralized",
    "async-parameter-server",
    "async-model-average",
    "qadam",
    "onebit-adam",
)


def one_rank_alone(rank: int, strategy: str) -> None:
    """With divided weights, what rank 0 does alone raises on every rank, and the training can go on."""
    model, optimizer = prepared(strategy)
    x = data(0, 0)
    for alone, name in (
        (model.state_dict, r"0 +state_dict\(\)"),
        (lambda: model.sample(x), "0 +a forward without grad"),
    ):
        with pytest.raises(MismatchError, match=rf"(?s)not on rank 0 alone.*gz.save.*{name}.*1 +a training forward"):
            alone() if rank == 0 else model(x)
    model(x).mean().backward()
    optimizer.step()
    assert len(model.state_dict()) == 7


# ---- steps, compared with one process on the whole batch ------------------------------------------------------------------


def by_forward(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "forward": by_forward,
    "method": lambda model, x: model.loss(x),
    "parts": lambda model, x: model.loss_by_parts(x)["loss"],
    "evaluated-parts": lambda model, x: model.eval().loss_by_parts(x)["loss"],
}


def one_process(max_norm: float) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = made()
    norms = []
    for step in range(STEPS):
        by_forward(model, torch.cat([data(step, micro) for micro in range(MICRO)])).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return whole(model), norms


def steps(rank: int, size: int, strategy: str, loss_of: str, form: str, scaled: bool) -> None:
    model, optimizer = prepared(strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    norms = []

    def micro_batch(step: int, number: int) -> None:
        rows = data(step, number).chunk(size)[rank]
        scaler.scale(LOSSES[loss_of](model, rows) / MICRO).backward()

    for step in range(STEPS):
        if form == "loop":
            for micro in gz.accumulate(model, steps=MICRO):
                micro_batch(step, micro)
        else:
            for micro in range(MICRO):
                with gz.accumulate(model, steps=MICRO) as is_last:
                    micro_batch(step, micro)
                assert is_last == (micro == MICRO - 1)
        scaler.unscale_(optimizer)
        norms.append(float(gz.clip_grad_norm_(model.parameters(), 0.3)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if not get(strategy).exact:
        assert all(torch.isfinite(value).all() for value in whole(model).values())
        return
    expected, expected_norms = one_process(0.3)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms), rtol=1e-4, atol=1e-6)
    for name, value in whole(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=2e-4, msg=lambda text, n=name: f"{n}: {text}")


# By partition: the numbers of tokens of each rank's micro-batches. The same tokens in all, so the same step.
PARTITIONS = (((1, 1), (4, 4)), ((1, 4), (1, 4)), ((0, 5), (5, 0)))


def tokens(step: int, partition: tuple[tuple[int, ...], ...], rank: int) -> list[Tensor]:
    """The tokens of each micro-batch of a rank."""
    sizes = [count for counts in partition for count in counts]
    first = len(partition[0]) * rank
    rows = torch.randn(sum(sizes), 6, generator=torch.Generator().manual_seed(step)).split(sizes)
    return list(rows[first : first + len(partition[rank])])


def token_means(rank: int, strategy: str) -> None:
    expected, expected_optimizer = made()
    for step in range(STEPS):
        by_forward(expected, torch.cat([*tokens(step, PARTITIONS[0], 0), *tokens(step, PARTITIONS[0], 1)])).backward()
        expected_optimizer.step()
        expected_optimizer.zero_grad()
    for partition in PARTITIONS:
        model, optimizer = prepared(strategy)
        for step in range(STEPS):
            mine, losses = tokens(step, partition, rank), []
            num_tokens = sum(map(len, mine))
            for micro in gz.accumulate(model, steps=2, weight=num_tokens):
                losses.append(gz.global_mean(model(mine[micro]).square().sum(), torch.tensor(len(mine[micro]))))
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        for step in range(STEPS):  # one batch in a step needs no accumulation
            rows = tokens(step, partition, rank)[1]
            loss = gz.global_mean(model(rows).square().sum(), len(rows))
            everyones = torch.cat([tokens(step, partition, r)[1] for r in range(2)])
            if get(strategy).exact:  # else each rank has weights of its own
                torch.testing.assert_close(gz.reduce(loss.detach()), by_forward(model, everyones).detach())
        if get(strategy).exact:
            for name, value in whole(model).items():
                torch.testing.assert_close(value, whole(expected)[name], rtol=1e-3, atol=2e-4)


def contrast(model: Any, x: Tensor, gather: Callable[[Tensor], Tensor], own: slice = slice(None)) -> Tensor:
    """A loss of each row against all others."""
    features = model(x).tanh()
    everyones = gather(features)
    scores = (everyones[own] + everyones.T).square()
    return nn.functional.cross_entropy(scores, torch.arange(len(everyones))[own])


def contrasts(rank: int, strategy: str) -> None:
    """All ranks compute the loss of all rows, or of their own; in the last case ranks have different numbers of rows."""
    expected, expected_optimizer = made()
    lengths = ((2, 2), (2, 2), (1, 3))
    for step, _ in enumerate(lengths):
        contrast(expected, data(step, 0), lambda features: features).backward()
        expected_optimizer.step()
        expected_optimizer.zero_grad()
    model, optimizer = prepared(strategy)
    for step, sizes in enumerate(lengths):
        rows = data(step, 0).split(list(sizes))[rank]
        own = slice(2 * rank, 2 * rank + 2) if step == 1 else slice(None)
        contrast(model, rows, gz.all_gather, own).backward()
        optimizer.step()
        optimizer.zero_grad()
    if get(strategy).exact:
        for name, value in whole(model).items():
            torch.testing.assert_close(value, whole(expected)[name], rtol=1e-3, atol=2e-4)
    with pytest.raises(MismatchError, match=r"rows of different shapes or dtypes"):
        gz.all_gather(torch.ones(2, 3 + rank))


class Searching(torch.optim.SGD):
    """An optimizer of another author, which takes the closure by name and goes back where the loss has grown."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            before = float(closure())
        kept = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        super().step()
        with torch.enable_grad():
            after = closure()
        if float(after) > before:
            with torch.no_grad():
                for p, old in zip((p for group in self.param_groups for p in group["params"]), kept, strict=True):
                    p.copy_(old)
        return after


def searches(rank: int, strategy: str) -> None:
    """Optimizers that decide by the loss of a closure decide alike, by the mean of all ranks."""
    makes = (
        lambda ps: torch.optim.LBFGS(ps, lr=0.5, max_iter=6, line_search_fn="strong_wolfe"),
        lambda ps: Searching(ps, lr=20.0),
    )
    for make in makes:

        def trained(model: Any, optimizer: Any, rows: Callable[[Tensor], Tensor]) -> list[float]:
            def closure() -> Tensor:
                optimizer.zero_grad()
                x = rows(data(step, 0)).double()
                loss: Tensor = (model(x) - x[:, :1] ** 2).square().mean()
                loss.backward()
                return loss

            found = []
            for step in range(3):
                found.append(float(optimizer.step(closure=closure) if step else optimizer.step(closure)))
            return found

        expected, model = made()[0].double(), made()[0].double()
        losses = trained(expected, make(expected.parameters()), lambda x: x)
        prepared_model, optimizer = gz.prepare(model, make(model.parameters()), strategy=strategy)
        found = trained(prepared_model, optimizer, lambda x: x.chunk(2)[rank])
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=1e-7)
        for name, value in whole(prepared_model).items():
            torch.testing.assert_close(value, whole(expected)[name], rtol=1e-5, atol=1e-7)


def refuses_a_step_too_early(strategy: str) -> None:
    model, optimizer = prepared(strategy)
    with gz.accumulate(model, steps=2):
        model(data(0, 0)).mean().backward()
    with pytest.raises(UsageError, match="after micro-batch 1 of 2"):
        optimizer.step()
    with gz.accumulate(model, steps=2):
        model(data(0, 0)).mean().backward()
    with pytest.raises(UsageError, match="another number of steps"):
        gz.accumulate(model, steps=3)
    with gz.accumulate(model, steps=2):
        model(data(0, 0)).mean().backward()
    optimizer.step()


def drops_a_cut_step(strategy: str) -> None:
    """Gradients of micro-batches that a `break` has cut and zero_grad() has dropped are not in the next step."""
    found = []
    for is_cut in (False, True):
        model, optimizer = prepared(strategy)
        if is_cut:
            for micro in gz.accumulate(model, steps=3):
                by_forward(model, data(9, micro)).backward()
                if micro == 1:
                    break
            optimizer.zero_grad()
        for micro in gz.accumulate(model, steps=2):
            by_forward(model, data(0, micro)).backward()
        optimizer.step()
        found.append(whole(model))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, msg=lambda text, n=name: f"{n}: {text}")


def refuses_parts_that_the_script_calls(strategy: str) -> None:
    model, optimizer = prepared(strategy)
    for _ in range(2):
        model(data(0, 0)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.head(model.layers[1](data(0, 0))).mean().backward()
        with pytest.raises(
            UsageError, match=r"gradients of no forward of the prepared model.*model\(x\), not model.head"
        ):
            optimizer.step()
        optimizer.zero_grad()


def reductions(strategy: str) -> list[int]:
    """How many collectives reduce in four steps of one micro-batch, and in two of several."""
    model, optimizer = prepared(strategy)
    counts = []
    for num_micro in (1, 1, 1, 1, MICRO, MICRO):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for micro in gz.accumulate(model, steps=num_micro):
                by_forward(model, data(0, micro)).backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(sum(e.count for e in profile.key_averages() if e.key.startswith("gloo:") and "reduce" in e.key))
    return counts


def run_strategies(rank: int, size: int, chosen: list[str], parts: list[str]) -> list[str]:
    """Run parts under each strategy; return what failed."""
    warnings.simplefilter("ignore")
    failed = []
    gz.init(timeout_s=GROUP_TIMEOUT_S)
    for strategy in chosen:
        for each in parts:
            try:
                if each == "names":
                    names(rank, strategy)
                elif each == "too early":
                    refuses_a_step_too_early(strategy)
                    if strategy in DIVIDED or strategy == "ddp":
                        drops_a_cut_step(strategy)
                elif each == "called-parts":
                    if strategy in ("ddp", "torch-ddp"):
                        refuses_parts_that_the_script_calls(strategy)
                elif each == "tokens":
                    token_means(rank, strategy)
                elif each == "searches":
                    searches(rank, strategy)
                elif each == "contrasts":
                    contrasts(rank, strategy)
                elif each == "alone":
                    one_rank_alone(rank, strategy)
                elif strategy not in DIVIDED or "parts" not in each:  # their parts are whole only inside a forward
                    loss_of, form = each.split()
                    steps(rank, size, strategy, loss_of, form.removesuffix("+scaler"), form.endswith("+scaler"))
            except Exception:
                failed.append(f"{strategy}, {each}: {traceback.format_exc()[-1500:]}")
    gz.shutdown()
    return failed


def check(size: int, chosen: Sequence[str], parts: list[str], **options: Any) -> None:
    for failed in run_ranks(run_strategies, size, list(chosen), parts, init=False, **options):
        assert not failed, "\n".join(failed)


QUICK = ("ddp", "torch-ddp", "horovod", "sharded", "sharded-weights", "parameter-server", "diloco")


def test_one_script_under_several_strategies() -> None:
    check(2, QUICK, ["names", "method with+scaler", "too early", "called-parts", "evaluated-parts loop"])
    check(2, ["sharded-weights"], ["alone"])


MEANS = ("ddp", "torch-ddp", "sharded", "sharded-gradients", "sharded-weights")


def test_means_over_tokens_and_rows_of_all_ranks() -> None:
    check(2, MEANS, ["tokens", "contrasts"])
    check(2, ["ddp", "torch-ddp"], ["searches"])


@pytest.mark.slow
def test_means_under_every_strategy() -> None:
    check(2, SEVERAL, ["tokens", "contrasts"], timeout_s=3 * LIMIT_S)


@pytest.mark.slow
def test_names_are_the_models_own() -> None:
    check(1, ["single", "dp", "ddp"], ["names"])
    check(2, SEVERAL, ["names"], timeout_s=3 * LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["forward loop", "parts with+scaler"])
def test_accumulated_steps_are_those_of_one_big_batch(part: str) -> None:
    check(1, ["single", "dp", "ddp"], [part])
    check(2, SEVERAL, [part], timeout_s=3 * LIMIT_S)


def early_loaders(rank: int, size: int) -> list[Any]:
    """Loaders that are made before the world, and used in another order than they were made in, next to a later one."""
    train = gz.loader(range(10), 1, shuffle=False)
    divided = gz.loader(range(12), global_batch_size=4, shares=[3, 1], shuffle=False)
    odd = gz.loader(range(4), global_batch_size=3, shuffle=False)
    with pytest.raises(UsageError, match="is not known"):  # what is wrong for any rank is said at once
        gz.loader(range(4), ends="never")  # type: ignore[arg-type]
    assert not train.is_settled
    gz.prepare(*made(), strategy="ddp")
    later = gz.loader(range(6 + rank), 1, shuffle=False, ends="drop")
    found = [[batch.tolist() for batch in each] for each in ((divided, train) if rank else (train, divided))]
    with pytest.raises(UsageError, match="`global_batch_size` is no multiple"):
        next(iter(odd))
    used_too_early = gz.loader(range(4), num_replicas=1, rank=0)
    assert len(later) == 3 and len(train) == 5 and len(used_too_early) == 4
    gz.shutdown()
    early = gz.loader(range(4))
    assert len(early) == 4
    gz.init(timeout_s=GROUP_TIMEOUT_S)
    with pytest.raises(UsageError, match=r"gz\.loader\(\) was used before gz\.init\(\)"):
        gz.prepare(*made(), strategy="ddp")
    gz.shutdown()
    return found[:: -1 if rank else 1]


def test_loaders_made_before_the_world_take_their_share_at_their_first_use() -> None:
    found = run_ranks(early_loaders, 2, init=False)
    assert found[0] == [[[0], [2], [4], [6], [8]], [[0, 1, 2], [4, 5, 6], [8, 9, 10]]]
    assert found[1] == [[[1], [3], [5], [7], [9]], [[3], [7], [11]]]


def count_exchanges(rank: int, size: int) -> dict[str, list[int]]:
    gz.init(backend="gloo", timeout_s=GROUP_TIMEOUT_S)
    found = {name: reductions(name) for name in ("ddp", "torch-ddp", "sharded", "sharded-gradients", "bf16")}
    gz.shutdown()
    return found


@pytest.mark.slow
def test_accumulated_gradients_are_exchanged_once() -> None:
    for found in run_ranks(count_exchanges, 2, init=False):
        for strategy, counts in found.items():
            # In steps 0, 1, 2 and 4 some also compare what the ranks do.
            assert counts[3] == counts[5] > 0, f"{strategy}: {counts}"
