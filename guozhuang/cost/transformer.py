"""Transformers by their shape: parameters, floating-point operations, and the share of a device's peak that a rate is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType

from guozhuang.errors import UsageError, explain

#: What recomputes activations in backward: nothing, the scores of attention alone, or whole layers.
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Transformer:
    """A transformer by its shape: a decoder like GPT's, or an encoder like BERT's, which costs the same.

    Attributes:
        layers: number of layers.
        hidden: width of the residual stream.
        heads: attention heads; their width is ``hidden / heads``.
        sequence: tokens of one sample.
        vocabulary: rows of the embedding.
        feed_forward: inner width of the feed-forward part; 0 is four times ``hidden``.
        key_value_heads: heads of keys and values (grouped-query attention); 0 is as many as ``heads``.
        gated: the feed-forward part multiplies by a gate (SwiGLU): three matrices without biases, RMS norms, and no table of
            positions, as in Llama.
        tied: the logits are computed with the embedding's own weights.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    feed_forward: int = 0
    key_value_heads: int = 0
    gated: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise UsageError(
                    explain(f"A transformer needs a positive number for {name}", value=getattr(self, name))
                )
        if self.hidden % self.heads:
            raise UsageError(
                explain(
                    "The hidden width is divided evenly among the heads of attention",
                    value={"hidden": self.hidden, "heads": self.heads},
                    fix="give a number of heads that divides the hidden width",
                )
            )

    @property
    def inner(self) -> int:
        """The inner width of the feed-forward part."""
        return self.feed_forward or 4 * self.hidden

    @property
    def matrix_parameters(self) -> int:
        """Parameters of the matrices of one layer: each takes part in two operations a token and forward."""
        key_values = (self.key_value_heads or self.heads) * self.hidden // self.heads
        attention = 2 * self.hidden * (self.hidden + key_values)
        return attention + (3 if self.gated else 2) * self.hidden * self.inner

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        if self.gated:
            return self.matrix_parameters + 2 * self.hidden
        key_values = (self.key_value_heads or self.heads) * self.hidden // self.heads
        biases = self.hidden + 2 * key_values + self.hidden + self.inner + self.hidden
        return self.matrix_parameters + biases + 4 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the tables of words and positions, and of the logits where they have weights of their own."""
        words = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return words if self.gated else words + self.sequence * self.hidden

    def stage_parameters(self, pipeline: int) -> list[float]:
        """Return the parameters of each of so many equal stages: the first has the tables, the last the weights of the logits.

        Where these are tied to the words, the last one has a copy of them.
        """
        found = [self.layers / pipeline * self.layer_parameters] * pipeline
        if pipeline == 1:
            return [found[0] + self.embedding_parameters]
        words = self.vocabulary * self.hidden
        found[0] += self.embedding_parameters - (0 if self.tied else words)
        found[-1] += words
        return found

    @property
    def parameters(self) -> int:
        """All parameters. For GPT's shape 12·L·h²·(1 + 13/12h + (V + s)/12Lh), without the last norm, as is usual."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    def layer_flops(self, samples: float) -> float:
        """Floating-point operations of one layer's forward: its matrices, and every token's attention to all of its sample."""
        tokens = samples * self.sequence
        return 2 * tokens * self.matrix_parameters + 4 * tokens * self.sequence * self.hidden

    def logits_flops(self, samples: float) -> float:
        """Floating-point operations of the forward of the logits."""
        return 2 * samples * self.sequence * self.hidden * self.vocabulary

    def flops(self, samples: float, recompute: str = "none") -> float:
        """Floating-point operations of a training step.

        A backward is two forwards; what is recomputed is one more. For GPT's shape without recomputation the sum is
        72·B·s·L·h²·(1 + s/6h + V/12Lh), the numerator of the model's FLOP utilization (MFU); with ``"full"`` it is what the
        hardware computes, 96 in place of 72 (HFU). Attention counts in full, also where half of it is masked.

        Args:
            samples: samples of the step, on all ranks together.
            recompute: one of ``RECOMPUTE``.
        """
        layer = self.layer_flops(samples)
        again = {"none": 0.0, "selective": 4 * samples * self.sequence**2 * self.hidden, "full": layer}[recompute]
        return self.layers * (3 * layer + again) + 3 * self.logits_flops(samples)

    def mfu(self, samples_per_s: float, num_ranks: int, peak_flops: float) -> float:
        """Return which share of the peak of all devices the model's own operations are.

        Args:
            samples_per_s: rate of the whole training.
            num_ranks: number of devices.
            peak_flops: dense peak of one device in FLOP/s, for the type that it computes in.
        """
        return self.flops(samples_per_s) / (num_ranks * peak_flops)

    @classmethod
    def parse(cls, text: str) -> Transformer:
        """Return the transformer of this name (``SHAPES``), or of a description: ``"L24,h1024,a16,s512,V30522"``.

        A description may go on with ``f4096`` (inner width), ``k8`` (heads of keys and values), ``gated`` and ``untied``. A
        name may be followed by what differs: ``"gpt3-175b,s4096"``.

        Raises:
            UsageError: a word is not understood, or a size is missing.
        """
        name, _, rest = text.strip().partition(",")
        shape: dict[str, int | bool] = {}
        words = [word.strip() for word in (rest if name.lower() in SHAPES else text).split(",") if word.strip()]
        for word in words:
            match = re.fullmatch(r"([LhasVfk])=?(\d+)", word)
            if match:
                shape[_LETTERS[match[1]]] = int(match[2])
            elif word in ("gated", "untied"):
                shape |= {"gated": True} if word == "gated" else {"tied": False}
            else:
                raise UsageError(
                    explain(
                        f"A part of the model {text!r} was not understood",
                        value=word,
                        fix="give a name ("
                        + ", ".join(SHAPES)
                        + ") or sizes, such as L24,h1024,a16,s512,V30522 (layers, "
                        "hidden width, heads, tokens of a sample, vocabulary; f4096, k8, gated, untied may follow)",
                    )
                )
        if name.lower() in SHAPES:
            return cls(**{**SHAPES[name.lower()], **shape})  # type: ignore[arg-type]
        missing = [letter for letter in "LhasV" if _LETTERS[letter] not in shape]
        if missing:
            what = ", ".join(f"{letter} ({_LETTERS[letter]})" for letter in missing)
            raise UsageError(
                explain(f"The model lacks {what}", value=text, fix="write it like L24,h1024,a16,s512,V30522")
            )
        return cls(**shape)  # type: ignore[arg-type]


_LETTERS = {
    "L": "layers",
    "h": "hidden",
    "a": "heads",
    "s": "sequence",
    "V": "vocabulary",
    "f": "feed_forward",
    "k": "key_value_heads",
}


def _shape(
    layers: int, hidden: int, heads: int, sequence: int, vocabulary: int, **more: int
) -> MappingProxyType[str, int]:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence, "vocabulary": vocabulary}
    return MappingProxyType(sizes | more)


_LLAMA2 = {"gated": True, "tied": False}
#: Shapes of well-known models, as their papers or configurations give them.
SHAPES: MappingProxyType[str, MappingProxyType[str, int]] = MappingProxyType(
    {
        "bert-base": _shape(12, 768, 12, 512, 30522),
        "bert-large": _shape(24, 1024, 16, 512, 30522),
        "gpt2": _shape(12, 768, 12, 1024, 50257),
        "gpt2-xl": _shape(48, 1600, 25, 1024, 50257),
        "gpt3-175b": _shape(96, 12288, 96, 2048, 51200),
        "megatron-3.6b": _shape(30, 3072, 32, 2048, 51200),
        "megatron-18.4b": _shape(40, 6144, 48, 2048, 51200),
        "megatron-22b": _shape(48, 6144, 64, 2048, 51200),
        "megatron-39.1b": _shape(48, 8192, 64, 2048, 51200),
        "megatron-145.6b": _shape(80, 12288, 96, 2048, 51200),
        "megatron-530b": _shape(105, 20480, 128, 2048, 51200),
        "megatron-1t": _shape(128, 25600, 160, 2048, 51200),
        "llama2-7b": _shape(32, 4096, 32, 4096, 32000, feed_forward=11008, **_LLAMA2),
        "llama2-70b": _shape(80, 8192, 64, 4096, 32000, feed_forward=28672, key_value_heads=8, **_LLAMA2),
        "llama3-8b": _shape(32, 4096, 32, 8192, 128256, feed_forward=14336, key_value_heads=8, **_LLAMA2),
        "llama3-70b": _shape(80, 8192, 64, 8192, 128256, feed_forward=28672, key_value_heads=8, **_LLAMA2),
        "llama3-405b": _shape(126, 16384, 128, 8192, 128256, feed_forward=53248, key_value_heads=8, **_LLAMA2),
    }
)
