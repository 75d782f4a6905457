"""Tensor parallelism: divided models against the whole one, family by family."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from guozhuang.parallel.division import division_of, whole
from guozhuang.parallel.tensor import divide_tensors

from .ranks import run_threads


class OnlyTensor:
    """The axes of ranks that all divide tensors."""

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        return dist.group.WORLD if dist.get_world_size() > 1 else None


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradients, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        division = division_of(parameter)
        found[name] = parameter.grad if division is None else whole(parameter.grad, division)
    return found


def step(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), gradients(model)


def differences(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], num_ranks: int, plan: Any = None, least_share: float = 0.4
) -> float:
    """Compare one step of the divided model with the whole one's: the worst relative error of loss and gradients.

    The model's loss after a step of the optimizer that was made before it was divided is compared too.
    """
    model = model.double()
    once = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(once.parameters(), lr=0.01, fused=True)
    expected = step(once, loss_of)
    optimizer.step()
    after, buffers = loss_of(once).detach(), dict(once.named_buffers())
    models = [copy.deepcopy(model) for _ in range(num_ranks)]

    def of_rank(rank: int, _: int) -> tuple[float, float]:
        mine = models[rank]
        optimizer = torch.optim.AdamW(mine.parameters(), lr=0.01, fused=True)
        divide_tensors(mine, OnlyTensor(), plan)  # type: ignore[arg-type]
        share = sum(p.numel() for p in mine.parameters() if division_of(p)) / sum(p.numel() for p in mine.parameters())
        loss, found = step(mine, loss_of)
        assert found.keys() == expected[1].keys()
        errors = [error(loss, expected[0]), *(error(found[name], value) for name, value in expected[1].items())]
        optimizer.step()
        errors.append(error(loss_of(mine).detach(), after))
        for name, buffer in mine.named_buffers():
            division = division_of(buffer)
            errors.append(error(buffer if division is None else whole(buffer, division), buffers[name]))
        return max(errors), share

    results = run_threads(of_rank, num_ranks)
    assert results[0][1] >= least_share, results
    return max(worst for worst, _ in results)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    difference = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-6)
    assert not difference.isnan()
    return difference.item()


IDS = torch.randint(5, 90, (3, 8), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(5, 90, (3, 8), generator=torch.Generator().manual_seed(2)).masked_fill(IDS % 3 == 0, -100)
MASK = torch.ones_like(IDS).index_fill_(1, torch.tensor([7]), 0)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 20,
}
T5 = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def of_tokens(model: Any) -> Tensor:
    return model(input_ids=IDS, attention_mask=MASK, labels=LABELS).loss


def of_pixels(model: Any) -> Tensor:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3), dtype=torch.double)
    return model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss


FAMILIES: dict[str, tuple[str, str, dict[str, Any], Callable[[Any], Tensor]]] = {
    "bert": ("BertConfig", "BertForMaskedLM", NO_DROPOUT, of_tokens),
    "bert-eager": ("BertConfig", "BertForMaskedLM", {**NO_DROPOUT, "attn_implementation": "eager"}, of_tokens),
    "bert-decoder": ("BertConfig", "BertLMHeadModel", {**NO_DROPOUT, "is_decoder": True}, of_tokens),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", NO_DROPOUT, of_tokens),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {**NO_DROPOUT, "embedding_size": 16}, of_tokens),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**NO_DROPOUT, "embedding_size": 16}, of_tokens),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0},
        of_tokens,
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        of_tokens,
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        of_tokens,
    ),
    "t5-gated": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 4,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        }
        | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        of_tokens,
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", {**NO_DROPOUT, "image_size": 16, "patch_size": 8}, of_pixels),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
        of_tokens,
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}, of_tokens),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"num_key_value_heads": 2}, of_tokens),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 2}, of_tokens),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}, of_tokens),
    "gemma": (
        "GemmaConfig",
        "GemmaForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
        of_tokens,
    ),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
        }
        | {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0},
        of_tokens,
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32}, of_tokens),
}


def family(name: str) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    transformers = pytest.importorskip("transformers")
    config, model, extra, loss_of = FAMILIES[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **extra})), loss_of


def slow(names: Iterable[str], quick: set[str]) -> list[Any]:
    """The parameters of a test, of which only the ``quick`` ones are not slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow(FAMILIES, {"gpt2", "t5-gated", "qwen3"}))
def test_families(name: str) -> None:
    model, loss_of = family(name)
    assert differences(model, loss_of, 2) < 1e-6


class Gated(nn.Module):
    """Two layers that are multiplied, by a dropout and functions, between normalizations; and a head that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.gate, self.up = nn.LayerNorm(12), nn.Linear(12, 17), nn.Linear(12, 17)
        self.dropout, self.down = nn.Dropout(0.0), nn.Linear(17, 12, bias=False)
        self.after, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.before(x)
        return self.head(self.after(x + self.down(self.dropout(F.silu(self.gate(normal)) * self.up(normal)))))


class Calling(nn.Module):
    """A module of two layers that calls the function dropout between them."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.rate = nn.Linear(12, 18), nn.Linear(18, 12), rate

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.relu(self.up(x)), self.rate, self.training))


class Undecided(nn.Module):
    """A forward whose control flow depends on values, around a part that can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = Gated()
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return self.gated(x) if float(x.detach().sum()) < 1e9 else x


class Residual(nn.Module):
    """A residual block of two convolutions, and a depthwise one between two of size 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.second, self.norm2 = nn.ReLU(inplace=True), nn.Conv2d(8, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.wide, self.norm3 = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)
        self.apart, self.narrow = nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 3, 1)
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm2(self.second(self.relu(self.norm1(self.first(x)))))
        x = self.narrow(self.relu(self.apart(self.relu(self.norm3(self.wide(x))))))
        return self.head(x.mean((-2, -1)))


def transformer(**options: Any) -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 16, "nhead": 4, "dim_feedforward": 22, "dropout": 0.0, "batch_first": True}
    return nn.Transformer(num_encoder_layers=2, num_decoder_layers=2, **{**sizes, **options})


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4), dtype=torch.double)


def of_rows(model: Any) -> Tensor:
    return F.cross_entropy(model(random(7, 12)), torch.arange(7) % 5)


def of_image(model: Any) -> Tensor:
    return F.cross_entropy(model(random(4, 3, 6, 6)), torch.arange(4))


def of_sequences(model: Any) -> Tensor:
    source, target = random(3, 6, 16), random(3, 5, 16)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 5 + [True]])
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.double)
    first = model.encoder.layers[0].self_attn.batch_first
    given = (source, target) if first else (source.transpose(0, 1), target.transpose(0, 1))
    return model(*given, tgt_mask=mask, src_key_padding_mask=padding, tgt_is_causal=True).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "sequential": (lambda: nn.Sequential(nn.Linear(12, 9), nn.GELU(), nn.Linear(9, 5)), of_rows),
    "gated": (Gated, of_rows),
    "calling": (lambda: nn.Sequential(Calling(), Calling(), nn.Linear(12, 5)), of_rows),
    "undecided": (Undecided, of_rows),
    "convolutions": (Residual, of_image),
    "transformer": (transformer, of_sequences),
    "transformer-time-first": (
        lambda: transformer(batch_first=False, norm_first=True, activation="gelu"),
        of_sequences,
    ),
    "transformer-no-bias": (lambda: transformer(bias=False), of_sequences),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", slow(MODELS, {"gated", "calling", "convolutions", "transformer"}))
def test_found_by_structure(name: str) -> None:
    make, loss_of = MODELS[name]
    for num_ranks in (2, 4):
        torch.manual_seed(0)
        assert differences(make(), loss_of, num_ranks) < 1e-6


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 6, "vdim": 10}, {"bias": False}]
)
def test_multihead_attention(options: dict[str, Any], batch_first: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=batch_first, **options).double()
    query, key = random(5, 5, 16), random(5, 5, options.get("kdim", 16))
    value = random(5, 5, options.get("vdim", 16))
    masks = [None, torch.ones(5, 5).triu(1).bool(), random(20, 5, 5)]
    cases: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        (
            (query, key, value),
            {"attn_mask": mask, "need_weights": needs, "average_attn_weights": averages, "key_padding_mask": pads},
        )
        for mask in masks
        for needs, averages in [(True, True), (True, False), (False, True)]
        for pads in (None, torch.tensor([[False] * 3 + [True] * 2] * 5))
    ]
    cases.append(((query[:, 0], key[:, 0], value[:, 0]), {}))
    expected = [attention(*given, **told) for given, told in cases]
    copies = [copy.deepcopy(attention) for _ in range(2)]

    def of_rank(rank: int, _: int) -> list[tuple[Tensor, Tensor | None]]:
        divide_tensors(copies[rank], OnlyTensor())  # type: ignore[arg-type]
        return [copies[rank](*given, **told) for given, told in cases]

    for found in run_threads(of_rank, 2):
        for mine, wanted in zip(found, expected, strict=True):
            assert error(mine[0], wanted[0]) < 1e-6
            assert (
                mine[0].stride() == wanted[0].stride()
            )  # the mask of a dropout behind it is drawn in the order of memory
            assert (mine[1] is None) == (wanted[1] is None)
            assert mine[1] is None or error(mine[1], wanted[1]) < 1e-6


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_evaluation_takes_no_fast_path() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 22, batch_first=True).double()
    encoder = nn.TransformerEncoder(layer, 2).double().eval()
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with torch.no_grad():
        expected = encoder(random(2, 6, 16), src_key_padding_mask=padding)[~padding]
    copies = [copy.deepcopy(encoder) for _ in range(2)]

    def of_rank(rank: int, _: int) -> Tensor:
        divide_tensors(copies[rank], OnlyTensor())  # type: ignore[arg-type]
        with torch.no_grad():
            return copies[rank](random(2, 6, 16), src_key_padding_mask=padding)[~padding]  # type: ignore[no-any-return]

    assert all(error(found, expected) < 1e-6 for found in run_threads(of_rank, 2))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 12)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(12, 7), "down": nn.Linear(7, 12)}) for _ in range(2))
        self.head = nn.Linear(12, 10, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        found = self.tokens(x.abs().sum(1).long() % 10)
        for block in self.blocks:
            found = found + block["down"](torch.tanh(block["up"](found)))
        return self.head(found)


PLAN = {"blocks.*.up": "columns", "blocks.*.down": "rows", "tokens": "rows", "head": "gathered"}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_by_hand(num_ranks: int) -> None:
    torch.manual_seed(0)
    assert differences(Plain(), of_rows, num_ranks, PLAN) < 1e-6
