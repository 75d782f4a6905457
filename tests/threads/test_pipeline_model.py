"""Models divided into stages without a line of them changed: equal to one process, on ranks that are threads."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from guozhuang.errors import MismatchError, UsageError
from guozhuang.parallel.axes import make_axes
from guozhuang.parallel.division import division_of
from guozhuang.parallel.pipeline import divide_pipeline
from guozhuang.parallel.pipeline.microbatches import cut_batch
from guozhuang.strategies.divided import prepare_divided
from guozhuang.strategies.table import get
from guozhuang.strategies.ways import Setup
from guozhuang.world.layout import Layout

from .ranks import run_threads

# Ranks that are threads have one generator for all.
pytestmark = [
    pytest.mark.filterwarnings("ignore:the model drew random numbers in code that drew none"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True"),
]


class Block(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(num, num, 3, padding=1, bias=False), nn.BatchNorm2d(num)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None)
        self.layer1, self.layer2 = nn.Sequential(Block(8), Block(8)), nn.Sequential(Block(8), Block(8))
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.layer2(self.layer1(torch.relu_(self.norm(self.stem(x)))))
        return {"logits": self.fc(x.mean((2, 3))), "rows": x.shape[0]}


class Scaled(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1), nn.GroupNorm(2, num_out), nn.ReLU(True))

    def forward(self, x):
        return self.inside(x)


class UNet(nn.Module):
    """Outputs of the way down are inputs of the way up; a parameter of the model itself scales one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = Scaled(3, 8), Scaled(8, 16), Scaled(16, 16)
        self.up2, self.up1, self.out = Scaled(32, 8), Scaled(16, 8), nn.Conv2d(8, 2, 1)
        self.skip = nn.Parameter(torch.ones(1))

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.bottom(F.max_pool2d(second, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), second * self.skip], 1))
        return self.out(self.up1(torch.cat([F.interpolate(x, scale_factor=2), first], 1)))


class Glue(nn.Module):
    """Whatever a forward does between its parts: residuals, changes in place, a value read, several inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(50, 16), nn.Parameter(torch.randn(8, 16) * 0.1)
        self.mix, self.norm = nn.ModuleList(nn.Linear(16, 16) for _ in range(5)), nn.LayerNorm(16)
        self.head, self.scale = nn.Linear(16, 3), nn.Parameter(torch.ones(()))

    def forward(self, ids, *, mask, weights=None, flag="as it is"):
        x = self.embed(ids) + self.place[: ids.shape[1]]
        if weights is not None:
            x = x * weights
        for i, part in enumerate(self.mix):
            y = part(self.norm(x))
            if i == 2 and y.abs().max() > 1e9:
                y = y * 0
            x = x + torch.tanh(y) * self.scale
            if i == 1:
                x += 1
        logits = self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)) * self.scale
        return {"logits": logits, "best": logits.argmax(-1), "flag": flag, "rows": len(ids)}


class Tied(nn.Module):
    """One matrix at both ends, frozen parts, a list that is gone through twice, and activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.head.weight = self.embed.weight
        self.blocks[0][0].weight.requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(2):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Counted(nn.Module):
    """A buffer that the forward changes, and hooks that change outputs and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = sequence()
        self.register_buffer("num_calls", torch.zeros(()))
        for part in self.parts[0], self.parts[4]:
            part.register_forward_hook(lambda part, inputs, output: output * 1.5)
            part.register_full_backward_hook(lambda part, grads, _: tuple(g if g is None else g / 2 for g in grads))
        self.register_forward_hook(lambda model, inputs, output: output + 1)

    def forward(self, x):
        self.num_calls += 1
        return self.parts(x) * (2 + self.num_calls)


def sequence():
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(True), nn.Linear(16, 16), nn.Linear(16, 3)
    )


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 4)


def images(rows):
    return (torch.randn(rows, 3, 8, 8, dtype=torch.float64),), {}


def glued(rows):
    weights = torch.rand(rows, 1, 1, dtype=torch.float64, requires_grad=True)
    mask = (torch.rand(rows, 8) > 0.3).double() + 0.1
    return (torch.randint(0, 50, (rows, 8)),), {"mask": mask, "weights": weights}


def masked(rows):
    return (torch.randn(rows, 6, 16, dtype=torch.float64),), {
        "src_key_padding_mask": torch.arange(6).repeat(rows, 1) > 3
    }


def numbers(rows):
    return (torch.randn(rows, 8, dtype=torch.float64),), {}


def tokens(rows):
    return (torch.randint(0, 30, (rows, 5)),), {}


CASES = {
    "sequence": (sequence, numbers),
    "counted": (Counted, numbers),
    "encoder": (encoder, masked),
    "glue": (Glue, glued),
    "tied": (Tied, tokens),
    "unet": (UNet, images),
}


def loss_of(output):
    """A loss that couples the samples of a batch, as no sum over microbatches does."""
    logits = output["logits"] if isinstance(output, dict) else output
    return (logits * torch.arange(logits.numel(), dtype=logits.dtype).view_as(logits).sin()).mean() + logits.std()


def inputs_with_gradients(args, kwargs):
    return [each for each in (*args, *kwargs.values()) if each.requires_grad]


def whole_parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if division_of(p) is None or p.numel()}


def train(model, call, batches, num_backwards=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, gradients = [], []
    for i, (args, kwargs) in enumerate(batches):
        loss = loss_of(call(*args, **kwargs))
        loss.backward()
        losses.append(loss.item())
        gradients += [each.grad for each in inputs_with_gradients(args, kwargs)]
        if (i + 1) % num_backwards == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, gradients


def compare(make, data, num_ranks, num_microbatches, rows=(7, 2, 5), num_backwards=1, cut=None):
    torch.manual_seed(3)
    one = make().double()
    batches = [data(count) for count in rows]
    models = [copy.deepcopy(one) for _ in range(num_ranks)]
    given = [copy.deepcopy(batches) for _ in range(num_ranks)]
    expected, expected_gradients = train(one, one, batches, num_backwards)

    def rank_of(rank, size):
        pipe = divide_pipeline(models[rank], make_axes(Layout(pp=size)), cut=cut, num_microbatches=num_microbatches)
        return train(models[rank], pipe, given[rank], num_backwards)

    held = []
    for model, (losses, gradients) in zip(models, run_threads(rank_of, num_ranks), strict=True):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-9, atol=1e-12)
        assert getattr(model, "num_calls", 0) == getattr(one, "num_calls", 0)
        mine = whole_parameters(model)
        whole = dict(one.named_parameters())
        torch.testing.assert_close(mine, {name: whole[name].detach() for name in mine}, rtol=1e-9, atol=1e-12)
        held.append(set(mine))
    assert set().union(*held) == {name for name, _ in one.named_parameters()}
    return held


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=() if each in ("glue", "counted") else pytest.mark.slow) for each in CASES]
)
def test_a_divided_model_trains_as_one_process(case):
    compare(*CASES[case], num_ranks=2, num_microbatches=3)


@pytest.mark.slow
def test_gradients_of_two_pipelines_are_averaged():
    torch.manual_seed(9)
    one = Tied().double()
    models, ids = [copy.deepcopy(one) for _ in range(4)], tokens(8)[0][0]
    setup = Setup(SimpleNamespace(layout=Layout(pp=2, dp=2)))

    def rank_of(rank, size):
        model, optimizer = models[rank], torch.optim.SGD(models[rank].parameters(), lr=0.1)
        prepared, stepped = prepare_divided(model, optimizer, setup, get("hybrid"))
        for _ in range(3):
            stepped.zero_grad()
            with prepared.no_sync():
                prepared(ids[rank % 2 :: 2]).pow(2).mean().backward()
            prepared(ids[rank % 2 :: 2]).pow(3).mean().backward()
            stepped.step()

    run_threads(rank_of, 4)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (one(ids).pow(2).mean() + one(ids).pow(3).mean()).backward()
        optimizer.step()
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.numel():
                with torch._C.DisableTorchFunctionSubclass():  # of this rank's part, which scripts cannot read
                    torch.testing.assert_close(parameter, one.get_parameter(name), rtol=1e-9, atol=1e-12)


def test_hooks_of_the_script_see_the_batch():
    """A hook of a parameter is called once a backward, and one of an output is not lost where the output is replaced."""

    def hook(model):
        calls = []
        model.embed.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

        def double(parameter):
            calls.append(parameter)
            parameter.grad.mul_(2)

        model.blocks[1][0].weight.register_post_accumulate_grad_hook(double)

        def on_output(part, inputs, output):
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * 3)

        model.blocks[0][0].register_forward_hook(on_output)
        return calls

    torch.manual_seed(9)
    one = Tied().double()
    models, ids = [copy.deepcopy(one) for _ in range(4)], tokens(8)[0][0]
    setup = Setup(SimpleNamespace(layout=Layout(pp=2, dp=2)), wishes={"cut": ["blocks.0#2"], "num_microbatches": 2})

    def rank_of(rank, size):
        calls = hook(models[rank])
        optimizer = torch.optim.SGD(models[rank].parameters(), lr=0.1)
        prepared, _ = prepare_divided(models[rank], optimizer, setup, get("hybrid"))
        for _ in range(2):
            prepared(ids).pow(2).mean().backward()
        return len(calls)

    assert run_threads(rank_of, 4) == [2] * 4
    hook(one)
    for _ in range(2):
        one(ids).pow(2).mean().backward()
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                with torch._C.DisableTorchFunctionSubclass():  # of this rank's part, which scripts cannot read
                    torch.testing.assert_close(parameter.grad, one.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(3, 1), (4, 2), (3, 8)])
@pytest.mark.parametrize("case", CASES)
def test_with_more_ranks_and_any_number_of_microbatches(case, num_ranks, num_microbatches):
    compare(*CASES[case], num_ranks=num_ranks, num_microbatches=num_microbatches, rows=(7, 2, 5, 1), num_backwards=2)


def test_parameters_of_other_stages_are_freed_and_tied_ones_stay():
    first, last = compare(*CASES["tied"], num_ranks=2, num_microbatches=2, cut=["blocks.0#2"])
    assert first == last == {"embed.weight", *(f"blocks.{i}.0.{kind}" for i in (0, 1) for kind in ("weight", "bias"))}
    first, last = compare(*CASES["sequence"], num_ranks=2, num_microbatches=2, cut=["4"])
    assert first == {"0.weight", "0.bias", "2.weight", "2.bias"} and last == {
        "4.weight",
        "4.bias",
        "5.weight",
        "5.bias",
    }


def test_batch_norm_is_that_of_microbatches_with_one_update_of_its_running_statistics_a_batch():
    torch.manual_seed(5)
    one = ResNet().double()
    models, batches = [copy.deepcopy(one) for _ in range(2)], [images(count) for count in (8, 6)]
    statistics = {name: buffer.clone() for name, buffer in one.named_buffers()}
    for number, ((x,), _) in enumerate(batches, 1):
        parts, seen = cut_batch((x,), {}, 3), {}
        handles = [
            module.register_forward_pre_hook(
                lambda m, inputs, name=name, seen=seen: seen.setdefault(name, []).append(inputs[0].detach())
            )
            for name, module in one.named_modules()
            if isinstance(module, nn.BatchNorm2d)
        ]
        logits = torch.cat([one(*part.args)["logits"] for part in parts])
        (logits.std() + loss_of(logits)).backward()
        for handle in handles:
            handle.remove()
        for name, inputs in seen.items():
            variance, mean = torch.var_mean(torch.cat(inputs), (0, 2, 3))
            momentum = one.get_submodule(name).momentum or 1 / number
            for kind, found in (("running_mean", mean), ("running_var", variance)):
                statistics[f"{name}.{kind}"].lerp_(found, momentum)
            statistics[f"{name}.num_batches_tracked"] += 1

    def rank_of(rank, size):
        pipe = divide_pipeline(models[rank], make_axes(Layout(pp=size)), num_microbatches=3)
        for args, _ in batches:
            output = pipe(*args)
            assert output["rows"] == len(args[0])
            (output["logits"].std() + loss_of(output)).backward()
        return pipe

    run_threads(rank_of, 2)
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.numel():
                torch.testing.assert_close(parameter.grad, one.get_parameter(name).grad, rtol=1e-9, atol=1e-12)
        for name, buffer in model.named_buffers():
            division = division_of(buffer)
            if division.is_owned:
                torch.testing.assert_close(buffer, statistics[name], rtol=1e-9, atol=1e-12)


def test_evaluation_several_forwards_and_backwards_that_never_come():
    torch.manual_seed(7)
    one = sequence().double()
    models, x = [copy.deepcopy(one) for _ in range(2)], torch.randn(6, 8, dtype=torch.float64)

    def rank_of(rank, size):
        model = models[rank]
        pipe = divide_pipeline(model, make_axes(Layout(pp=size)), num_microbatches=3)
        with torch.no_grad():
            evaluated = pipe(x)
        assert not evaluated.requires_grad
        pipe(x)
        first, second = pipe(x), pipe(x[:4])
        second.add_(1.0)  # an output is the script's own
        (first.sum() * second.mean()).backward()
        outputs = pipe(x[:1])
        outputs.add_(1.0)
        again = pipe(x)
        again.sum().backward(retain_graph=True)
        with pytest.raises(UsageError, match="second backward"):
            again.sum().backward()
        with pytest.raises(UsageError, match="gradients of gradients"):
            pipe(x).sum().backward(create_graph=True)
        return evaluated

    found = run_threads(rank_of, 2)
    (one(x).sum() * (one(x[:4]) + 1.0).mean()).backward()
    one(x).sum().backward()
    for model, evaluated in zip(models, found, strict=True):
        torch.testing.assert_close(evaluated, one(x).detach())
        for name, parameter in model.named_parameters():
            if parameter.numel():
                torch.testing.assert_close(parameter.grad, one.get_parameter(name).grad)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, cache):
        cache.append(x)
        return self.linear(x)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caching() for _ in range(2))

    def forward(self, x):
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x


class Cache:
    def __init__(self):
        self.kept = []

    def append(self, x):
        self.kept.append(x)


class Reads(nn.Module):
    def forward(self, x):
        return x, float(x.sum())


class ReadsData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.reads, self.last = nn.Linear(8, 8), Reads(), nn.Linear(8, 8)

    def forward(self, x):
        x, total = self.reads(self.first(x))
        return self.last(x) * total


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean = nn.Linear(8, 8), Mean()

    def forward(self, x):
        return self.mean(self.first(x))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.second(self.first(x))
        return self.third(x) if x.sum() > 1e6 else x


class Sequences(nn.Module):
    """Steps of a sequence are the first dimension, and samples the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Linear(8, 8), nn.LSTM(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x.view(-1, 2, 4).repeat(1, 1, 2)))[0])


class OldCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x.requires_grad_(), use_reentrant=True)
        return x


@pytest.mark.parametrize(
    ("make", "cut", "told"),
    [
        (lambda: nn.Linear(8, 8), None, "0 parts between which it can be cut, for 2 stages"),
        (sequence, ["1", "2"], "1 for 2 stages"),
        (sequence, ["nothing"], "(?s)does not call after its first one.*'nothing'.*1, 2, 3, 4, 5"),
        (Cached, None, "blocks.0 changes an object that it was given.*'Cache'"),
        (ReadsData, None, "reads returns a value that depends on data and is no tensor.*'float'"),
        (Averages, None, "mean returns a tensor without a dimension for samples"),
        (Changing, ["second"], "forward called third where it was to end"),
        (Sequences, None, r"first dimension, where rnn has steps of a sequence.*'LSTM on \(3, 2, 8\)'"),
        (OldCheckpoint, None, "activation checkpoint of the old kind"),
        (
            lambda: nn.Sequential(nn.Embedding(2, 8, scale_grad_by_freq=True), nn.Linear(8, 8)),
            None,
            "scale_grad_by_freq",
        ),
    ],
)
def test_what_cannot_be_divided_is_named(make, cut, told):
    models = [make() for _ in range(2)]
    x = torch.full((6, 8), 1e9 if make is Changing else 1.0)
    if make is Changing:
        for model in models:
            for parameter in model.parameters():
                nn.init.constant_(parameter, 1.0)

    def rank_of(rank, size):
        with pytest.raises(UsageError, match=told):
            divide_pipeline(models[rank], make_axes(Layout(pp=size)), cut=cut, num_microbatches=2)(x)

    run_threads(rank_of, 2)


@pytest.mark.parametrize("layout", (Layout(pp=2), Layout(tp=2)), ids=str)
def test_batches_that_differ_between_the_ranks_of_one_copy_are_named_at_any_step(layout):
    models = [sequence() for _ in range(2)]
    setup = Setup(SimpleNamespace(layout=layout), wishes={"loss": nn.MSELoss()})

    def rank_of(rank, size):
        optimizer = torch.optim.SGD(models[rank].parameters(), lr=0.1)
        prepared, _ = prepare_divided(models[rank], optimizer, setup, get("hybrid"))
        rows, targets = torch.ones(4, 8), torch.ones(4, 3)
        told = r"of the model differs between ranks that hold one copy.*float32 \(4, .\).*rank +checksum"
        for _ in range(4):
            prepared(rows)
        with pytest.raises(MismatchError, match=f"(?s)input 0 {told}"):
            prepared(rows + rank)
        prepared.step(rows, targets)
        with pytest.raises(MismatchError, match=f"(?s)input 1 {told}"):
            prepared.step(rows, targets + rank)
        return prepared(rows)

    first, second = run_threads(rank_of, 2)
    assert torch.equal(first, second)
