"""Models of Hugging Face, as they are, divided into stages: losses inside the model, ties, encoders and decoders."""

from __future__ import annotations

import copy

import pytest
import torch

from guozhuang.parallel.axes import make_axes
from guozhuang.parallel.pipeline import divide_pipeline
from guozhuang.world.layout import Layout

from .ranks import run_threads

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:the model drew random numbers in code that drew none"),
]
BERT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 3, "num_heads": 2, "dropout_rate": 0.0}
VIT = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 16}
LLAMA = {**{key: BERT[key] for key in list(BERT)[:6]}, "num_key_value_heads": 1}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def words(rows, length=10):
    ids = torch.randint(1, 97, (rows, length))
    mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (rows, 1))).long()
    return {"input_ids": ids, "attention_mask": mask}


def masked(rows):
    given = words(rows)
    labels = given["input_ids"].masked_fill(torch.rand(rows, 10) < 0.7, -100)
    labels[0, :2] = 5
    return {**given, "labels": labels}


CASES = {
    "BertForSequenceClassification": ("BertConfig", BERT, lambda n: {**words(n), "labels": torch.randint(0, 2, (n,))}),
    "BertForMaskedLM": ("BertConfig", BERT, masked),
    "RobertaForMaskedLM": ("RobertaConfig", BERT | {"max_position_embeddings": 40}, masked),
    "DistilBertForSequenceClassification": (
        "DistilBertConfig",
        {
            "vocab_size": 97,
            "dim": 32,
            "n_layers": 4,
            "n_heads": 2,
            "hidden_dim": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        }
        | {"seq_classif_dropout": 0.0},
        lambda n: {**words(n), "labels": torch.randint(0, 2, (n,))},
    ),
    "GPT2LMHeadModel": ("GPT2Config", GPT2 | NO_DROPOUT, masked),
    "T5ForConditionalGeneration": (
        "T5Config",
        T5 | {"decoder_start_token_id": 0, "pad_token_id": 0},
        lambda n: {**words(n), "labels": torch.randint(1, 97, (n, 6))},
    ),
    "ViTForImageClassification": (
        "ViTConfig",
        VIT | {"patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        lambda n: {"pixel_values": torch.randn(n, 3, 16, 16).double(), "labels": torch.randint(0, 2, (n,))},
    ),
    "LlamaForCausalLM": ("LlamaConfig", LLAMA, masked),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_hugging_face_trains_as_one_process(name):
    transformers = pytest.importorskip("transformers")
    config, options, data = CASES[name]
    torch.manual_seed(11)
    one = getattr(transformers, name)(getattr(transformers, config)(**options)).double().train()
    if name == "BertForSequenceClassification":
        one.gradient_checkpointing_enable({"use_reentrant": False})
    batches = [data(rows) for rows in (7, 3)]
    models = [copy.deepcopy(one) for _ in range(2)]

    def train(model, call):
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for batch in batches:
            output = call(**batch, output_hidden_states=True)
            output.loss.backward()
            found.append((output.loss.detach(), output.logits.detach(), output.get("hidden_states", ())))
            optimizer.step()
            optimizer.zero_grad()
        return found

    expected = train(one, one)

    def rank_of(rank, size):
        return train(models[rank], divide_pipeline(models[rank], make_axes(Layout(pp=size)), num_microbatches=3))

    held = set()
    for model, found in zip(models, run_threads(rank_of, 2), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
        for parameter_name, parameter in model.named_parameters():
            if parameter.numel():
                held.add(parameter_name)
                whole = one.get_parameter(parameter_name)
                torch.testing.assert_close(parameter, whole, rtol=1e-6, atol=1e-9)
    assert held == {parameter_name for parameter_name, _ in one.named_parameters()}
