"""The text workload: options, the cache, batches, loss and metrics, checkpoints."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from guozhuang import workloads
from guozhuang.errors import UsageError
from guozhuang.workloads import bert, classify, load, text
from guozhuang.workloads.arguments import OPTIONS, SIZE_NAMES, add_arguments
from guozhuang.workloads.tokens import ragged

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def data(tmp_path) -> str:
    path = tmp_path / "data.csv"
    lines = ["label,text"]
    for i in range(40):
        word = ("good fine great lovely" if i % 2 else "bad poor awful dreadful").split()[i % 4]
        lines.append(f"{'pos' if i % 2 else 'neg'},{'really ' * (i % 5)}{word} thing number {i}")
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def transformers_is_imported() -> None:
    """Before the first test is watched: torch's compiler, which it imports, sets an environment variable."""
    pytest.importorskip("transformers.models.bert.modeling_bert")


def parse(*words: str, name: str = "text") -> dict[str, object]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)  # as the command that trains has
    add_arguments(parser)
    return workloads.options_from(name, parser.parse_args(words))


def test_help_names_the_models_there_are() -> None:
    assert tuple(bert.SIZES) == SIZE_NAMES and set(workloads.WORKLOADS) == set(OPTIONS)


def test_options_travel_as_json(data) -> None:
    told = parse(
        "--data", data, "--text", "text", "--lr", "1e-3", "--fused", "--batch-size", "4", "--model", "bert-mini"
    )
    assert json.loads(json.dumps(told)) == told
    assert told == {
        "data": data, "text": ["text"], "lr": 1e-3, "fused": True, "batch_size": 4, "model": "bert-mini", "seed": 0,
    }  # fmt: skip
    assert parse() == {"seed": 0}
    assert parse("--no-fused", "--seq-len", "9", name="synthetic") == {"fused": False, "seq_len": 9, "seed": 0}
    assert parse("--option", "a=1=2", "--option", "b=", name="my:own") == {"a": "1=2", "b": ""}


@pytest.mark.parametrize(
    ("words", "name", "message"),
    [
        (["--lr", "fast"], "text", "--lr is not a number"),
        (["--lr", "nan"], "text", "--lr is not a number"),
        (["--lr=-1"], "text", "--lr is out of range .*at least 0"),
        (["--batch-size", "0"], "text", "at least 1"),
        (["--batch-size", "2.5"], "text", "not a whole number"),
        (["--dropout", "1"], "text", "at least 0 and below 1"),
        (["--optimizer", "lion"], "text", "use adamw, sgd"),
        (["--seq-len", "9"], "text", "workload text has no option --seq-len"),
        (["--data", "x"], "synthetic", "workload synthetic has no option --data"),
        (["--option", "a=1"], "text", "--option is for a workload of your own"),
        (["--option", "a"], "my:own", "KEY=VALUE"),
        (["--option", "a=1", "--option", "a=2"], "my:own", "twice"),
        (["--model", "bert-tiny"], "my:own", "has no option --model"),
        (["--model", "bert-huge"], "text", "no such model or folder .*nothing is downloaded"),
    ],
)
def test_options_that_cannot_work(words, name, message) -> None:
    with pytest.raises(UsageError, match=message):
        parse(*words, name=name)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"colour": 1}, "no such workload option"),
        ({"max_length": 513}, "beyond the 512 positions"),
        ({"label": "a"}, "--label is about a file"),
        ({"eval_data": "a"}, "--eval-data is about a file"),
        ({"data": "a.csv", "eval_data": "b.csv", "eval_fraction": 0.2}, "nothing is held out"),
        ({"data": "nowhere.csv"}, "no such file"),
        ({"momentum": 0.5}, "adamw has no momentum"),
        ({"fused": "maybe"}, "--fused is yes or no"),
        ({"model": "."}, "no config.json|no such model"),
    ],
)
def test_loads_that_cannot_work(told, message) -> None:
    with pytest.raises(UsageError, match=message):
        load("text", told)


def test_the_workload_learns(data) -> None:
    work = load("text", {"data": data, "batch_size": 8, "max_length": 16, "eval_fraction": 0.25})
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(model)
    before = work.evaluate(model)
    for step in range(40):
        batch = work.collate([work.train[(8 * step + i) % len(work.train)] for i in range(8)])
        work.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = work.evaluate(model)
    assert after["accuracy"] == 1.0 and after["loss"] < 0.3 * before["loss"]
    assert work.evaluate(model) == after
    assert model.training
    assert work.details["classes"] == "2: neg, pos"
    assert (work.details["training samples"], work.details["evaluation samples"]) == (30, 10)
    assert work.details["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_the_cache_is_made_once_and_gives_the_same(data, tmp_path, monkeypatch) -> None:
    cache = tmp_path / "cache"
    fresh = load("text", {"data": data})
    made = load("text", {"data": data}, cache)
    assert [path.name.startswith("text-") for path in cache.iterdir()] == [True]

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(text, "_prepare", refuse)
        # What has nothing to do with the data finds the same folder.
        found = load("text", {"data": data, "lr": 0.1, "model": "bert-mini", "batch_size": 3}, cache)
        with pytest.raises(AssertionError, match="read again"):
            load("text", {"data": data, "max_length": 9}, cache)
    assert isinstance(found.train.sequences.tokens, np.memmap)
    for work in (made, found):
        assert len(work.train) == len(fresh.train)
        assert all(
            np.array_equal(work.train[i][0], fresh.train[i][0]) and work.train[i][1] == fresh.train[i][1]
            for i in range(len(fresh.train))
        )
    Path(data).write_text(Path(data).read_text() + "\npos,one more good thing")
    assert len(load("text", {"data": data}, cache).train) == len(fresh.train) + 1
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_a_failure_leaves_nothing_in_the_cache(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,x\na,y\na,z\n")
    with pytest.raises(UsageError, match="single class"):
        load("text", {"data": str(path)}, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_evaluation_files(data, tmp_path) -> None:
    other = tmp_path / "eval.tsv"
    other.write_text("pos\tgood thing\nneg\tbad thing\npos\tgreat\n")
    work = load("text", {"data": data, "eval_data": str(other)})
    assert (work.details["training samples"], work.details["evaluation samples"]) == (40, 3)
    assert load("text", {"data": data, "eval_data": str(other), "eval_limit": 2}).details["evaluation samples"] == 2
    other.write_text("pos\tgood thing\nneutral\tthing\npos\tgreat\nneutral\tx\n")
    with pytest.raises(
        UsageError, match=r"eval.tsv:2: no row of .*data.csv has this label \(got 'neutral'\).*neg, pos"
    ):
        load("text", {"data": data, "eval_data": str(other)})


def test_skipped_rows_are_told(data) -> None:
    Path(data).write_text(Path(data).read_text() + "\npos,\nneg\n")
    with pytest.raises(UsageError, match=r"data\.csv:42: bad row: it has no text; 2 of 42 rows are bad: lines 42, 43"):
        load("text", {"data": data})
    work = load("text", {"data": data, "bad_rows": "skip"})
    assert work.details["data, bad rows skipped"] == "2 (lines 42, 43)"
    assert work.details["training samples"] + work.details["evaluation samples"] == 40


@pytest.mark.parametrize("size", ["bert-tiny", "bert-mini"])
def test_sizes_and_determinism(size) -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        made.append(bert.build(bert.find(size), num_classes=3, vocabulary_size=50, pad_id=0, dropout=0.0, max_length=9))
    for a, b in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(a, b) and a.dtype == torch.float32
    assert sum(p.numel() for p in made[0].parameters()) == bert.num_parameters(bert.SIZES[size], 50, 3)
    assert not any(m.p for m in made[0].modules() if isinstance(m, nn.Dropout))
    config = made[0].config
    assert config.intermediate_size == 4 * config.hidden_size
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == {
        "bert-tiny": (2, 128, 2), "bert-mini": (4, 256, 4)}[size]  # fmt: skip


def test_padding_changes_nothing_and_shares_join_to_the_batch() -> None:
    draw = np.random.default_rng(0)
    samples = [(draw.integers(5, 50, n, dtype=np.int32), int(n % 3)) for n in (3, 9, 5, 17)]
    torch.manual_seed(0)
    model = bert.build(bert.SIZES["bert-tiny"], num_classes=3, vocabulary_size=50, pad_id=0, dropout=0.0, max_length=32)

    def gradients(*batches: classify.Batch) -> list[torch.Tensor]:
        model.zero_grad()
        for batch in batches:
            (classify.loss(model, batch) / len(batches)).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    joined = gradients(classify.collate(samples, 0))
    assert all(gradient.abs().sum() > 0 for gradient in joined)  # every parameter takes part
    padded = gradients(classify.collate(samples, 0, 32))
    shares = gradients(classify.collate(samples[0::2], 0), classify.collate(samples[1::2], 0))
    for a, b, c in zip(joined, padded, shares, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-6)


def test_collate() -> None:
    batch = classify.collate([(np.array([5, 6], np.int32), 1), (np.array([7], np.int32), 0)], pad_id=9, length=3)
    assert batch["input_ids"].tolist() == [[5, 6, 9], [7, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert batch["labels"].tolist() == [1, 0]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


class Fixed(nn.Module):
    """Says that every text is of the class of its first token, as a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(5.0))
        self.inner = nn.Dropout(0.5).eval()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        assert not torch.is_grad_enabled() or self.training
        return {"logits": self.scale * nn.functional.one_hot(input_ids[:, 0], 3).half()}


def test_evaluate_against_a_twin() -> None:
    model = Fixed()
    sequences = ragged([[i % 3] * (1 + i % 4) for i in range(150)])
    truth = np.array([i % 2 for i in range(150)], dtype=np.int64)
    data = classify.TokenDataset(sequences, truth)
    metrics = classify.evaluate(model, data, pad_id=0)
    logits = 5.0 * torch.eye(3)[torch.arange(150) % 3]
    assert metrics["accuracy"] == pytest.approx(float((logits.argmax(1) == torch.tensor(truth)).float().mean()))
    assert metrics["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, torch.tensor(truth))), rel=1e-5)
    assert model.training and not model.inner.training  # each module as it was
    loss = classify.loss(model, classify.collate([data[i] for i in range(4)], 0))
    assert loss.dtype == torch.float32 and loss.ndim == 0


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "checkpoint"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "really", "good", "bad", "thing", "number", "fine"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=40,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.BertModel(config).half().save_pretrained(folder)
    return folder


def test_a_checkpoint_is_fine_tuned(checkpoint, data, tmp_path, monkeypatch) -> None:
    told = {"data": data, "model": str(checkpoint), "max_length": 20, "batch_size": 4}
    with pytest.raises(UsageError, match="knows 40 positions"):
        load("text", {**told, "max_length": 41})
    with pytest.raises(UsageError, match="brings its own vocabulary"):
        load("text", {**told, "vocab_size": 900})
    work = load("text", told, tmp_path / "cache")
    assert work.details["learning rate"] == 2e-5
    torch.manual_seed(0)
    model = work.model()
    assert model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    assert work.details["parameters"] == sum(p.numel() for p in model.parameters())
    assert not any(m.p for m in model.modules() if isinstance(m, nn.Dropout))
    assert model.config.attention_probs_dropout_prob == 0.0
    import transformers

    saved = transformers.BertModel.from_pretrained(checkpoint, dtype=torch.float32)
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, saved.embeddings.word_embeddings.weight)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(checkpoint))
    texts = [line.split(",")[1] for line in Path(data).read_text().splitlines()[1:]]
    assert work.train[0][0].tolist() in [tokenizer(line)["input_ids"] for line in texts]
    work.loss(model, work.collate([work.train[i] for i in range(4)])).backward()
    loaded = load("text", {**told, "dropout": 0.25}).model()
    assert {m.p for m in loaded.modules() if isinstance(m, nn.Dropout)} == {0.25}


def test_a_checkpoint_like_gpt2_takes_its_end_token_as_padding(data, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator([Path(data).read_text()], trainer)
    folder = tmp_path / "gpt2"
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=learner, eos_token="<|endoftext|>")
    made.save_pretrained(folder)
    config = transformers.GPT2Config(vocab_size=len(made), n_embd=16, n_layer=1, n_head=2, n_positions=40)
    torch.manual_seed(3)
    transformers.GPT2Model(config).save_pretrained(folder)

    told = {"data": data, "model": str(folder), "max_length": 20}
    work = load("text", told)
    assert work.details["padding token"] == "<|endoftext|> (its end token)"
    torch.manual_seed(0)
    model = work.model()
    samples = sorted((work.train[i] for i in range(4)), key=lambda sample: len(sample[0]))
    batch = work.collate(samples)
    assert not batch["attention_mask"].all() and model.config.pad_token_id == made.eos_token_id
    work.loss(model, batch).backward()
    # Padding changes nothing: the shortest text alone gets the same logits.
    shortest = work.collate(samples[:1])
    in_batch, alone = (model(**{k: v for k, v in b.items() if k != "labels"}).logits[0] for b in (batch, shortest))
    assert torch.allclose(in_batch, alone, atol=1e-5)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(UsageError, match="neither a padding nor an end token"):
        load("text", told)


def test_a_checkpoint_without_tokenizer(checkpoint, data) -> None:
    for path in checkpoint.iterdir():
        if path.name.startswith(("tokenizer", "vocab", "special")):
            path.unlink()
    with pytest.raises(UsageError, match="has no tokenizer"):
        load("text", {"data": data, "model": str(checkpoint), "max_length": 20})


def test_a_tokenizer_of_another_model(checkpoint, data) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "vocab_size": 7}))
    with pytest.raises(UsageError, match="has 11 entries, more than its model's 7"):
        load("text", {"data": data, "model": str(checkpoint), "max_length": 20})


def test_random_tokens_for_a_checkpoint(checkpoint) -> None:
    work = load("synthetic", {"model": str(checkpoint), "seq_len": 6})
    model = work.model()
    assert work.details["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert work.loss(model, work.collate([work.train[0]])).isfinite()


@pytest.mark.slow
def test_loading_imports_no_transformers(data, tmp_path) -> None:
    program = (
        "import sys, json; from pathlib import Path; from guozhuang.workloads import load\n"
        f"load('text', {{'data': {data!r}}}, Path({str(tmp_path / 'cache')!r}))\n"
        "print(json.dumps([name for name in ('transformers', 'tokenizers', 'pyarrow') if name in sys.modules]))"
    )
    said = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
            ).stdout
        )
        for _ in range(2)
    ]
    assert said == [["tokenizers"], []]
