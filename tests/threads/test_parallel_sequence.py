"""The tokens of a sequence divided over ranks: outputs and gradients are those of one process, or the model is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from guozhuang.errors import UsageError
from guozhuang.parallel.axes import make_axes
from guozhuang.parallel.sequence.divide import divide_sequence
from guozhuang.parallel.spans import SpansOfRanks
from guozhuang.world.layout import Layout

from .ranks import run_threads
from .test_parallel_space import Doubled

LENGTH, SHORT, ROWS, WIDTH, HEADS = 23, 17, 3, 24, 4
Inputs = Callable[[torch.Generator], dict[str, Tensor]]


def padding(left: bool = True) -> Tensor:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, 15:] = 0
    if left:
        mask[2, :4] = 0
    return mask


def ids(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(1, 50, (ROWS, length), generator=generator)


def hugging_face(kind: str, attention: str) -> nn.Module:
    import transformers as t

    common = {"vocab_size": 50, "attn_implementation": attention}
    usual = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "bert":
        return t.BertForMaskedLM(t.BertConfig(**common, **usual, **no_dropout, max_position_embeddings=64))
    if kind == "gpt2":
        gpt2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
        return t.GPT2LMHeadModel(t.GPT2Config(**common, **gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**common, **usual, num_key_value_heads=2))
    if kind == "t5":
        t5 = {"d_model": WIDTH, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": HEADS, "dropout_rate": 0.0}
        return t.T5ForConditionalGeneration(t.T5Config(**common, **t5, decoder_start_token_id=0))
    assert kind == "vit"
    vit = {"image_size": 28, "patch_size": 4, "attn_implementation": attention}
    return t.ViTForImageClassification(t.ViTConfig(**usual, **no_dropout, **vit))


class Encoder(nn.Module):
    """torch's own layers; tokens come first or second."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=batch_first)
        self.layers, self.batch_first = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), batch_first

    def forward(self, x: Tensor, mask: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        result: Tensor = self.layers(x, mask=mask, src_key_padding_mask=pad)
        return result


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(WIDTH, HEADS, 2, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=y.dtype)
        result: Tensor = self.model(x, y, tgt_mask=mask, tgt_is_causal=True)
        return result


class Block(nn.Module):
    """Attention as people write it by hand, with ``mix`` for what else happens to the hidden states."""

    def __init__(self, way: str, mix: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.way, self.mix = way, mix
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.linspace(-1, 1, LENGTH).expand(HEADS, LENGTH, LENGTH).clone())
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) if way == "weights" else None
        self.mixing = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if way == "convolution" else None

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        if self.attention is not None:
            result, weights = self.attention(x, x, x, need_weights=True, average_attn_weights=False)
            return result + weights.sum((1, 3)).unsqueeze(-1)  # type: ignore[no-any-return]
        if self.mixing is not None:
            return self.mixing(x.mT).mT  # type: ignore[no-any-return]
        if self.way == "bmm":
            q, k, v = (
                each.view(batch, length, HEADS, -1).transpose(1, 2).reshape(batch * HEADS, length, -1)
                for each in self.qkv(x).chunk(3, dim=-1)
            )
            scores = torch.baddbmm(self.bias.repeat(batch, 1, 1), q, k.mT, beta=0.5, alpha=0.3)
            out = torch.bmm(F.softmax(scores, dim=-1), v).view(batch, HEADS, length, -1)
            return self.out(out.permute(0, 2, 1, 3).reshape(batch, length, width))  # type: ignore[no-any-return]
        q, k, v = self.qkv(x).reshape(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        if self.way == "einsum":
            distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
            scores = torch.einsum("bhid, bhjd -> bhij", q, k) - 0.1 * distance.abs() + self.bias
            scores.masked_fill_(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
            out = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
        else:  # an additive bias that learns
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.to(q.dtype))
        return self.out(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(F.layer_norm(x, (WIDTH,)))
        return self.mix(x)


class Blocks(nn.Module):
    def __init__(
        self, way: str, mix: Callable[[Tensor], Tensor] = lambda x: x, checkpoints: bool | None = None
    ) -> None:
        super().__init__()
        self.before, self.checkpoints = nn.Linear(WIDTH, WIDTH), checkpoints
        self.blocks = nn.ModuleList(Block(way, mix) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.before(x)
        for block in self.blocks:
            x = block(x) if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
        # Tokens meet behind the blocks: the pooled ones, and a loss inside of the model.
        return {
            "logits": self.head(x.mean(1)),
            "first": x[:, 0],
            "loss": F.mse_loss(x, torch.ones_like(x)),
            "all": (x,),
        }


def tokens(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, LENGTH, WIDTH, generator=generator)}


def causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


CASES: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "GPT-2, causal": (lambda: hugging_face("gpt2", "sdpa"), lambda g: {"input_ids": ids(g)}),
    "T5, relative bias, two lengths": (
        lambda: hugging_face("t5", "sdpa"),
        lambda g: {"input_ids": ids(g), "attention_mask": padding(), "labels": ids(g, SHORT)},
    ),
    "Llama, grouped heads, padded at both ends": (
        lambda: hugging_face("llama", "sdpa"),
        lambda g: {"input_ids": ids(g), "attention_mask": padding(), "labels": ids(g)},
    ),
    "BERT, eager": (
        lambda: hugging_face("bert", "eager"),
        lambda g: {"input_ids": ids(g), "attention_mask": padding(left=False)},
    ),
    "layers of torch, tokens first": (lambda: Encoder(False), lambda g: {**tokens(g), "pad": padding(left=False) == 0}),
    "einsum": (lambda: Blocks("einsum"), tokens),
    "a learned bias, checkpoints": (lambda: Blocks("bias", checkpoints=False), tokens),
}
MORE: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "BERT": (lambda: hugging_face("bert", "sdpa"), lambda g: {"input_ids": ids(g)}),
    "BERT, padded": (
        lambda: hugging_face("bert", "sdpa"),
        lambda g: {"input_ids": ids(g), "attention_mask": padding(), "labels": ids(g)},
    ),
    "GPT-2, eager": (lambda: hugging_face("gpt2", "eager"), lambda g: {"input_ids": ids(g), "labels": ids(g)}),
    "GPT-2, padded": (
        lambda: hugging_face("gpt2", "sdpa"),
        lambda g: {"input_ids": ids(g), "attention_mask": padding(), "labels": ids(g)},
    ),
    "Llama": (lambda: hugging_face("llama", "sdpa"), lambda g: {"input_ids": ids(g)}),
    "Llama, eager": (lambda: hugging_face("llama", "eager"), lambda g: {"input_ids": ids(g)}),
    "T5, eager": (
        lambda: hugging_face("t5", "eager"),
        lambda g: {"input_ids": ids(g), "attention_mask": padding(), "labels": ids(g, SHORT)},
    ),
    "ViT": (lambda: hugging_face("vit", "sdpa"), lambda g: {"pixel_values": torch.randn(ROWS, 3, 28, 28, generator=g)}),
    "ViT, eager": (
        lambda: hugging_face("vit", "eager"),
        lambda g: {"pixel_values": torch.randn(ROWS, 3, 28, 28, generator=g)},
    ),
    "layers of torch, causal and padded": (
        lambda: Encoder(True),
        lambda g: {**tokens(g), "mask": causal(), "pad": padding(left=False) == 0},
    ),
    "encoder and decoder of torch": (
        Both,
        lambda g: {**tokens(g), "y": torch.randn(ROWS, SHORT, WIDTH, generator=g)},
    ),
    "bmm": (lambda: Blocks("bmm"), tokens),
    "weights of attention": (lambda: Blocks("weights"), tokens),
    "a learned bias": (lambda: Blocks("bias"), tokens),
}


def result_of(outputs: Any) -> tuple[Tensor, list[Tensor]]:
    """A loss of everything that a model returns, and all its tensors."""
    found = list(outputs.values()) if isinstance(outputs, Mapping) else [outputs]
    flat = [each for value in found for each in (value if isinstance(value, tuple) else (value,))]
    tensors = [each for each in flat if isinstance(each, Tensor)]
    loss = sum(
        (each * torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view_as(each)).pow(2).mean() + each.sum() / 100
        for each in tensors
    )
    return loss, [each.detach() for each in tensors]  # type: ignore[return-value]


def made(inputs: Inputs) -> dict[str, Tensor]:
    found = inputs(torch.Generator().manual_seed(1))
    return {name: value.double() if value.is_floating_point() else value for name, value in found.items()}


def on_ranks(rank: int, size: int, model: nn.Module, inputs: Inputs, way: str) -> list[Tensor]:
    model = copy.deepcopy(model)
    around = divide_sequence(model, make_axes(Layout(sequence=size)), way)
    tensors: list[Tensor] = []
    for _ in range(2):  # a ring that has seen a causal mask divides in another order
        model.zero_grad()
        args, kwargs = around.inputs((), made(inputs))
        loss, tensors = result_of(around.outputs(model(*args, **kwargs)))
        assert all(type(each) is Tensor for each in tensors)
        loss.backward()
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(gradient)
        tensors.append(gradient / size)
    return tensors


def check_equal(case: tuple[Callable[[], nn.Module], Inputs], size: int, way: str) -> None:
    torch.manual_seed(0)
    model = case[0]().double()
    alone = copy.deepcopy(model)
    loss, expected = result_of(alone(**made(case[1])))
    loss.backward()
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in alone.parameters()]
    largest = max(float(each.norm()) for each in gradients)
    for found in run_threads(on_ranks, size, model, case[1], way):
        for one, other in zip(found, expected + gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7 * largest)


@pytest.mark.parametrize("way", ["auto", "ring"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_one_process(name: str, way: str) -> None:
    if way == "ring" and ("eager" in name or "einsum" in name):
        pytest.skip("products of matrices know one way")
    check_equal(CASES[name], 2, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "ring"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_every_model_on_more_ranks(name: str, size: int, way: str) -> None:
    check_equal({**CASES, **MORE}[name], size, way)


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return x


class Embedded(nn.Module):
    """Embeddings that look at all tokens, beside an input that comes from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.limited, self.counted = (
            nn.Embedding(50, WIDTH, **each) for each in ({"max_norm": 1.0}, {"scale_grad_by_freq": True})
        )
        self.blocks = nn.ModuleList(Block("bias", lambda x: x + torch.frexp(x)[0]) for _ in range(2))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        ranks = ids.argsort(1)
        x = x + self.limited(ids) + self.counted(ids) + F.one_hot(ranks)[..., :1].to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return x


def embeds(rank: int, size: int, model: nn.Module) -> list[Tensor]:
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    found = ids(generator), torch.randn(ROWS, LENGTH, WIDTH, generator=generator).double().requires_grad_()
    if size == 1:
        model(*found).square().mean().backward()
    else:
        around = divide_sequence(model, make_axes(Layout(sequence=size)))
        args, kwargs = around.inputs(found, {})
        outputs = model(*args, **kwargs)
        assert type(outputs) is Tensor  # whole already for data parallelism around it, which hangs hooks on it
        around.outputs(outputs).square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
    return [found[1].grad, *model.parameters(), *(each.grad for each in model.parameters() if each.grad is not None)]  # type: ignore[list-item]


def test_embeddings_that_look_at_all_tokens_and_gradients_of_inputs() -> None:
    torch.manual_seed(0)
    model = Embedded().double()
    expected = embeds(0, 1, model)
    for found in run_threads(embeds, 2, model):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def images() -> nn.Module:
    return nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2)))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "convolution": (lambda: Blocks("convolution"), r"'conv1d'.*'blocks\.0\.mixing', a Conv1d"),
    "mean of tokens": (lambda: Blocks("bias", lambda x: x - x.mean(1, keepdim=True)), r"'mean'.*'blocks\.0', a Block"),
    "cumsum": (lambda: Blocks("bias", lambda x: x.cumsum(1)), r"'cumsum'.*blocks\.0"),
    "tokens shifted": (lambda: Blocks("bias", lambda x: x + x.roll(1, 1)), "'roll'"),
    "a part of the tokens": (lambda: Blocks("bias", lambda x: x + x[:, :1]), "'getitem'"),
    "BatchNorm": (lambda: Blocks("bias", lambda x: F.batch_norm(x.mT, None, None, training=True).mT), "'batch_norm'"),
    "keys times values": (lambda: Blocks("bias", lambda x: x + x @ (x.mT @ x)), "'matmul'"),
    "an own autograd function": (lambda: Blocks("bias", Doubled.apply), "Doubled"),
    "reentrant checkpoints": (lambda: Blocks("bias", checkpoints=True), "CheckpointFunction.*use_reentrant=False"),
    "numpy": (lambda: Blocks("bias", lambda x: x + torch.from_numpy(x.detach().numpy())), "'numpy'"),
    "answers for all tokens": (lambda: Blocks("bias", lambda x: x if torch.equal(x, x + 1) else x * 2), "'equal'"),
    "hook": (lambda: Blocks("bias", hooked), "register_hook of an activation"),
    "a gradient inside": (
        lambda: Blocks("bias", lambda x: torch.autograd.grad(x, x, torch.ones_like(x))[0]),
        "grad of an activation",
    ),
    "no blocks": (lambda: nn.Linear(WIDTH, WIDTH), "no list of blocks.*Linear"),
    "images": (images, r"0 a tensor of shape \(3, 3, 8, 8\).*space"),
    "heads": (lambda: Encoder(True), "3 ranks .got '4 heads'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_joins_tokens_otherwise_is_refused_by_name(name: str) -> None:
    build, text = REFUSED[name]
    size, way = (3, "ulysses") if name == "heads" else (2, "auto")
    x = torch.randn(3, 3, 8, 8) if name == "images" else torch.randn(ROWS, LENGTH, WIDTH)
    model = build()

    def refused(rank: int, num_ranks: int) -> None:
        mine = copy.deepcopy(model)
        with pytest.raises(UsageError, match=text):
            around = divide_sequence(mine, make_axes(Layout(sequence=num_ranks)), way)
            args, kwargs = around.inputs((x,), {})
            result_of(around.outputs(mine(*args, **kwargs)))[0].backward()

    run_threads(refused, size)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("divide", [SpansOfRanks.in_order, SpansOfRanks.zigzag])
def test_spans_are_the_whole_sequence(divide: Callable[[int, int], SpansOfRanks], num_ranks: int) -> None:
    for length in (2 * num_ranks, 23, 64):
        spans = divide(length, num_ranks)
        whole = torch.arange(length)
        parts = [spans.part(whole, 0, rank) for rank in range(num_ranks)]
        assert tuple(map(len, parts)) == spans.counts and max(spans.counts) - min(spans.counts) <= 2
        assert spans.joined(parts, 0).equal(whole)
        if divide is SpansOfRanks.zigzag and length % (2 * num_ranks) == 0:  # of a causal mask all have equally much
            assert len({int(part.sum()) for part in parts}) == 1
