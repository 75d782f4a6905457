"""The models of ``test_parallel_equal.py``, each with batches and a loss that couples samples and leaves some positions out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, TOKENS, PIXELS = 50, 12, 16
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Kind:
    """A model of the table.

    Attributes:
        make: makes it, given the probability of its dropout.
        batch: the keyword arguments and the targets of a number of rows.
        loss: of the model's outputs and the targets.
        separable_loss: the part of it that does not couple samples, which microbatches can compute.
        middle: the module at which the second of two stages begins.
    """

    make: Callable[[float], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Batch, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]
    separable_loss: Callable[[Any, Tensor], Tensor]
    middle: str


def contrastive(logits: Tensor) -> Tensor:
    """A loss in which each sample is told from all others of the batch."""
    ends = F.normalize(logits.flatten(2).mean(1) if logits.dim() > 2 else logits, dim=1)
    return F.cross_entropy(ends @ ends.detach().roll(1, 0).T / 0.5, torch.arange(len(ends)))


def token_mean(outputs: Any, labels: Tensor) -> Tensor:
    """The mean over the labels that are not left out, whose number differs between rows."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def token_loss(outputs: Any, labels: Tensor) -> Tensor:
    return token_mean(outputs, labels) + 0.1 * contrastive(outputs.logits)


def image_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels) + 0.1 * contrastive(outputs)


def segmentation_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels) + 0.1 * contrastive(outputs.mean((2, 3)))


def tokens(num_rows: int, generator: torch.Generator) -> tuple[Batch, Tensor]:
    ids = torch.randint(1, VOCABULARY, (num_rows, TOKENS), generator=generator)
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (num_rows, 1), generator=generator)
    mask = (torch.arange(TOKENS) < lengths).long()
    is_left_out = (torch.rand(ids.shape, generator=generator) < 0.6) | (mask == 0)
    is_left_out[0, 0] = False
    return {"input_ids": ids * mask, "attention_mask": mask}, ids.masked_fill(is_left_out, -100)


def encoded_and_decoded(num_rows: int, generator: torch.Generator) -> tuple[Batch, Tensor]:
    batch, _ = tokens(num_rows, generator)
    answers, labels = tokens(num_rows, generator)
    return batch | {"decoder_input_ids": answers["input_ids"][:, : TOKENS - 2]}, labels[:, : TOKENS - 2]


def images(num_rows: int, generator: torch.Generator) -> tuple[Batch, Tensor]:
    pixels = torch.randn(num_rows, 3, PIXELS, PIXELS, dtype=torch.float64, generator=generator)
    return {"pixels": pixels}, torch.randint(0, 7, (num_rows,), generator=generator)


def segmented(num_rows: int, generator: torch.Generator) -> tuple[Batch, Tensor]:
    batch, _ = images(num_rows, generator)
    labels = torch.randint(0, 4, (num_rows, PIXELS, PIXELS), generator=generator)
    return batch, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.4, -100)


def bert(p: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24}
    rates = {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=TOKENS, **sizes, **rates))


def gpt2(p: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": TOKENS, "vocab_size": VOCABULARY}
    rates = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), p)
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, use_cache=False))


def t5(p: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=p, use_cache=False, decoder_start_token_id=0))


class Residual(nn.Module):
    """A block of a residual network: two normalized convolutions beside a path that carries the input on."""

    def __init__(self, inner: int, outer: int, stride: int, p: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(outer)
        self.dropout = nn.Dropout(p)
        self.past = nn.Conv2d(inner, outer, 1, stride) if (inner, stride) != (outer, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second(self.dropout(self.norm(self.first(x)).relu()))
        return (self.last_norm(inner) + self.past(x)).relu()


class Residuals(nn.Module):
    """A residual network."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Residual(8, 8, 1, p), Residual(8, 12, 2, p), Residual(12, 12, 1, p))
        self.head = nn.Linear(12, 7)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(pixels)).mean((2, 3)))


def twice(inner: int, stride: int, p: float) -> nn.Module:
    """Two convolutions with what stands between them."""
    first = nn.Conv2d(inner, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(p)
    return nn.Sequential(*first, nn.Conv2d(8, 6, 3, stride, 1), nn.ReLU())


class UNet(nn.Module):
    """A network in the form of a U: images get smaller and larger again, and what was large is joined to what is."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.down = nn.ModuleList(twice(6, 2, p) for _ in range(2))
        self.up = nn.ModuleList(twice(12, 1, p) for _ in range(2))
        self.leave = nn.Conv2d(6, 4, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.enter(pixels)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), skips.pop()], 1))
        return self.leave(x)


def bart(p: float) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 16, "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 25}
    rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), p)
    return BartForConditionalGeneration(BartConfig(**sizes, **rates, use_cache=False, decoder_start_token_id=0))


KINDS: Mapping[str, Kind] = {
    "bert": Kind(bert, tokens, token_loss, token_mean, "bert.encoder.layer.1"),
    "gpt2": Kind(gpt2, tokens, token_loss, token_mean, "transformer.h.1"),
    "t5": Kind(t5, encoded_and_decoded, token_loss, token_mean, "decoder.block.0"),
    "bart": Kind(bart, encoded_and_decoded, token_loss, token_mean, "model.decoder.layers.0"),
    "resnet": Kind(Residuals, images, image_loss, F.cross_entropy, "blocks.1"),
    "unet": Kind(UNet, segmented, segmentation_loss, F.cross_entropy, "up.0"),
}
