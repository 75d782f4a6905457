"""DataParallel over CPU threads against the plain module: outputs, gradients, weights, modules with state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from guozhuang.data_parallel import DataParallel
from guozhuang.data_parallel.replicas import replicate

CPUS = ["cpu", "cpu"]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


class _Conv(nn.Module):
    """Channels-last weights, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(torch.relu(self.first(x))).mean((2, 3)))


class _Shared(nn.Module):
    """One weight used in two places, under two names; one submodule registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.block = nn.Linear(5, 5)
        self.same = self.block
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.same(torch.tanh(self.block(self.embed(x)))).mean(1))


class _Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(5, 5) for _ in range(2)])
        self.biases = nn.ParameterDict({"in": torch.randn(5), "out": torch.randn(5)})
        self.plain = [nn.Linear(5, 3)]  # not registered: the replicas use this very module

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.weights[0] + self.biases["in"]
        return self.plain[0](torch.tanh(hidden) @ self.weights[1] + self.biases["out"])


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 6, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0].mean(1)


class _Rebound(nn.Module):
    """An attribute holds a method bound to the module, as some libraries replace `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.calls: list[int] = []
        self.run = self._run

    def _run(self, x: Tensor) -> Tensor:
        self.calls.append(id(self))
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def _parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    return model.eval()


def _old_weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 3))


def _graph() -> nn.Module:
    return torch.fx.symbolic_trace(mlp())


def _script() -> nn.Module:
    return torch.jit.script(mlp())


def _floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (mlp, _floats(5)),
    "conv": (_Conv, _floats(2, 6, 6)),
    "shared": (_Shared, lambda rows: torch.randint(7, (rows, 4))),
    "lists": (_Lists, _floats(5)),
    "recurrent": (_Recurrent, _floats(4, 5)),
    "rebound": (_Rebound, _floats(5)),
    "parametrized": (_parametrized, _floats(5)),
    "old_weight_norm": (_old_weight_norm, _floats(5)),
    "graph": (_graph, _floats(5)),
    "script": (_script, _floats(5)),
    "double": (lambda: mlp().double(), lambda rows: torch.randn(rows, 5, dtype=torch.double)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("rows", [8, 7, 1], ids=["even", "uneven", "one_row"])
@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_the_plain_module(name: str, rows: int) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    parallel = DataParallel(make(), ["cpu"] * 3)
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1, momentum=0.9) for m in (plain, parallel)
    ]
    for _ in range(4):
        x = batch(rows)
        outputs = [plain(x), parallel(x)]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-6, atol=1e-6)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.square().mean().backward()
        for expected, parameter in zip(plain.parameters(), parallel.parameters(), strict=True):
            assert (expected.grad is None) == (parameter.grad is None)
            if expected.grad is not None:
                torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    for expected, parameter in zip(plain.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in MODELS if name != "lists"])
def test_replicas_on_another_device_have_one_differentiable_copy(name: str) -> None:
    make, batch = MODELS[name]
    module = make()
    here, there = torch.device("cpu"), torch.device("meta")
    twins = replicate(module, [here, there, there])
    for twin in twins[1:]:
        assert twin(batch(4).to(there)).device == there
    if name == "script":
        return  # torch keeps the copies of a ScriptModule as attributes in C++
    named = [dict(twin.named_parameters()) for twin in twins]
    for key, parameter in module.named_parameters():
        assert named[0][key] is parameter
        assert named[1][key].device == there
        assert named[1][key] is named[2][key]
        assert (named[1][key].grad_fn is not None) == parameter.requires_grad
    for key, buffer in module.named_buffers():
        assert twins[0].get_buffer(key) is buffer
        assert twins[1].get_buffer(key) is not twins[2].get_buffer(key)


def test_inputs_get_gradients_and_higher_orders_work() -> None:
    model = mlp()
    x = torch.randn(5, 5, requires_grad=True)
    results = []
    for module in (model, DataParallel(model, CPUS)):
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        results.append((slope, *torch.autograd.grad(slope.square().sum(), list(model.parameters()))))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_replicas_on_one_device_share_the_weights_and_list_them() -> None:
    seen: list[list[Tensor]] = []

    class Asking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(list(self.parameters()))
            return super().forward(x)

    model = Asking(3, 3)
    DataParallel(model, CPUS)(torch.randn(4, 3))
    assert [[id(p) for p in ps] for ps in seen] == [[id(p) for p in model.parameters()]] * 2


def test_batch_norm_keeps_the_statistics_of_replica_0() -> None:
    x = torch.randn(8, 4)
    parallel = DataParallel(nn.BatchNorm1d(4), CPUS)
    first = nn.BatchNorm1d(4)
    second = nn.BatchNorm1d(4)
    for _ in range(3):
        output = parallel(x)
        expected = torch.cat([first(x[:4]), second(x[4:])])
        torch.testing.assert_close(output, expected)
    torch.testing.assert_close(dict(parallel.module.named_buffers()), dict(first.named_buffers()))
    assert parallel.module.num_batches_tracked == 3


def test_buffers_that_need_gradients_get_them() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(3, requires_grad=True))
            self.register_buffer("nothing", None)

        def forward(self, x: Tensor) -> Tensor:
            assert self.nothing is None
            return x * self.scale

    parallel = DataParallel(Scaled(), CPUS)
    x = torch.randn(4, 3)
    parallel(x).sum().backward()
    torch.testing.assert_close(parallel.module.scale.grad, x.sum(0))


def test_attributes_assigned_in_forward_are_lost_and_flags_are_seen() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x + self.training

    parallel = DataParallel(Counting(), CPUS)
    assert torch.equal(parallel(torch.zeros(2)), torch.ones(2))
    assert torch.equal(parallel.eval()(torch.zeros(2)), torch.zeros(2))
    assert parallel.module.calls == 0


def test_methods_bound_to_the_module_act_on_the_replica() -> None:
    model = _Rebound()
    DataParallel(model, CPUS)(torch.randn(4, 5))
    assert len(set(model.calls)) == 2
    assert id(model) not in model.calls


def test_hooks_run_once_per_replica() -> None:
    model = mlp()
    shapes: list[tuple[int, ...]] = []
    grads: list[tuple[int, ...]] = []
    model[0].register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    model[2].register_full_backward_hook(lambda module, gin, gout: grads.append(tuple(gout[0].shape)))
    DataParallel(model, CPUS)(torch.randn(5, 5)).sum().backward()
    assert sorted(shapes) == [(2, 8), (3, 8)]
    assert sorted(grads) == [(2, 3), (3, 3)]


@dataclass
class _Out:
    y: Tensor
    loss: Tensor
    name: str = "out"


class Nested(nn.Module):
    def forward(self, x: Tensor, *, scale: Any = None, note: str = "") -> dict[str, Any]:
        scaled = x if scale is None else x * scale
        return {"out": _Out(scaled, scaled.mean()), "parts": [(x, None), note], "rows": torch.tensor(x.shape[0])}


def test_nested_outputs_and_keyword_inputs() -> None:
    x, scale = torch.randn(5, 2), torch.randn(5, 1)
    with pytest.warns(UserWarning, match="an entry per replica"):
        output = DataParallel(Nested(), ["cpu"] * 3)(x=x, scale=scale, note="hi")
    torch.testing.assert_close(output["out"].y, x * scale)
    torch.testing.assert_close(output["out"].loss, torch.stack([(x * scale)[i : i + 2].mean() for i in (0, 2, 4)]))
    assert output["out"].name == "out"
    assert torch.equal(output["parts"][0][0], x)
    assert output["parts"][0][1] is None
    assert output["parts"][1] == "hi"
    assert output["rows"].tolist() == [2, 2, 1]


@pytest.mark.filterwarnings("ignore:.*an entry per replica:UserWarning")
def test_few_rows_with_shared_keywords_run_few_replicas() -> None:
    # torch's own calls the second replica without its positional input here.
    assert DataParallel(Nested(), CPUS)(torch.ones(1, 2), note="x")["parts"][1] == "x"


def test_another_dimension() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 5, 3)
    torch.testing.assert_close(DataParallel(model, CPUS, dim=1)(x), model(x))


def test_without_inputs_one_replica_runs() -> None:
    class Source(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

        def forward(self) -> Tensor:
            return self.weight * 2

    parallel = DataParallel(Source(), CPUS)
    output = parallel()
    assert output.shape == (2, 3)
    output.sum().backward()
    assert torch.equal(parallel.module.weight.grad, torch.full((2, 3), 2.0))


def test_one_device_calls_the_module_itself() -> None:
    model = mlp()
    outputs: list[Any] = []
    model.register_forward_hook(lambda module, args, output: outputs.append(module))
    x = torch.randn(3, 5)
    torch.testing.assert_close(DataParallel(model, ["cpu"])(x), model(x))
    assert outputs[0] is model


def test_a_tiny_bert_that_returns_its_loss() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config)
    encoding = transformers.BatchEncoding(
        {"input_ids": torch.randint(50, (6, 7)), "attention_mask": torch.ones(6, 7, dtype=torch.long)}
    )
    labels = torch.randint(3, (6,))
    expected = model(**encoding, labels=labels)
    expected.loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with pytest.warns(UserWarning, match="an entry per replica"):
        output = DataParallel(model, CPUS)(**encoding, labels=labels)
    assert type(output) is type(expected)
    assert output.loss.shape == (2,)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-6)
    output.loss.mean().backward()  # shares are even, so the mean of means is the mean
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-6)
