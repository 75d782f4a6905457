"""The commands that README and docs/ show are run, as far as one machine without hosts, Slurm and MPI can run them."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from tests.documented import ROOT, blocks, of_guozhuang
from tests.launching import guozhuang
from tests.waiting import LIMIT_S

# What a command needs that is not here. Its words are understood all the same: tests/pure/test_docs.py.
NEEDS_MORE = {
    "-H": "hosts (tests/hosts runs such commands)",
    "--hostfile": "hosts (tests/hosts runs such commands)",
    "--nnodes": "a second node (tests/processes/test_run.py starts two agents)",
    "--manifest": "a cluster",
    "run_glue.py": "a script of another project",
    "...": "the reader's own options",
}
# What makes a comparison short, in the place of the command's own values.
SHORT = {
    "--steps": "2",
    "--warmup-steps": "2",
    "--rounds": "1",
    "--strategies": "single,ddp",
    "--batch-size": "4",
    "--ranks": "2",
}
SCRIPT = """
import argparse, guozhuang as gz, torch
lr = argparse.ArgumentParser()
lr.add_argument("--lr", type=float, default=0.1)
world = gz.init()
layer = torch.nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2)
model, optimizer = gz.prepare(model, torch.optim.SGD(model.parameters(), lr=lr.parse_args().lr))
for _ in range(20):
    model(torch.ones(4, 3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
gz.shutdown()
"""


def runnable() -> list[list[str]]:
    """Each command once, but for those of a run with checkpoints, which is started twice on purpose."""
    found: list[list[str]] = []
    for _, words in of_guozhuang():
        words = shortened(words) if "compare" in words else words
        if not NEEDS_MORE.keys() & set(words) and (words not in found or "--checkpoint" in words):
            found.append(words)
    return found


def shortened(words: list[str]) -> list[str]:
    """A comparison with few steps of a small model."""
    kept = [word for before, word in zip(["", *words], words, strict=False) if not {before, word} & SHORT.keys()]
    names_model = {"./my-checkpoint", "examples.own_workload:two_moons", "my_workload:make", "--config"} & set(words)
    model = [] if names_model else ["--model", "bert-tiny"]
    return [*kept, *(word for pair in SHORT.items() for word in pair), *model, "--fresh"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files that the commands name."""
    transformers = pytest.importorskip("transformers")
    made = tmp_path_factory.mktemp("documented")
    shutil.copytree(ROOT / "examples", made / "examples")
    (made / "package").mkdir()
    for name in ("train.py", "package/train.py", "package/__init__.py"):
        (made / name).write_text(SCRIPT if name.endswith("train.py") else "")
    (made / "my_workload.py").write_text("from examples.own_workload import two_moons as make\n")
    (made / "program").write_text("#!/bin/sh\nexit 0\n")
    (made / "program").chmod(0o755)
    (config,) = [text for _, text in blocks("toml") if "compare.toml" in text]
    (made / "compare.toml").write_text(config)
    with open(made / "reviews.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["title", "body", "stars"])
        writer.writerows([f"number {i}", f"{'good' if i % 2 else 'bad'} words number {i}", i % 2] for i in range(200))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "number", "good", "bad", "words"]
    checkpoint = made / "my-checkpoint"
    checkpoint.mkdir()
    (checkpoint / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(checkpoint / "vocab.txt")).save_pretrained(checkpoint)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **size)).save_pretrained(checkpoint)
    return made


@pytest.mark.slow
@pytest.mark.timeout(7 * LIMIT_S)
@pytest.mark.parametrize("words", runnable(), ids=" ".join)
def test_the_command_runs(words: list[str], folder: Path) -> None:
    """Some go on with what those before them have made."""
    done = guozhuang(*words[1:], folder=folder, timeout_s=6 * LIMIT_S, PYTHONPATH=f"{folder}")
    assert done.returncode == 0, done


@pytest.mark.slow
def test_the_script_of_the_readme_trains_before_and_after_the_change(folder: Path) -> None:
    """Its lines, with and without the change, below the definitions that it leaves to the reader."""
    (change,) = [text for page, text in blocks("diff") if page == "README.md"]
    given = """
from torch.utils.data import DataLoader, TensorDataset
MyModel, loss_fn = lambda: torch.nn.Linear(2, 1), torch.nn.functional.mse_loss
dataset = TensorDataset(torch.randn(64, 2), torch.randn(64, 1))
"""
    for name, sign in (("plain", "-"), ("changed", "+")):
        lines = [line[1:] for line in change.splitlines() if line[:1] in (" ", sign, "")]
        imports, script = "\n".join(lines).split("model = MyModel()")
        (folder / f"{name}.py").write_text(f"{imports}{given}model = MyModel(){script}\nprint('samples:', len(x))\n")
    for name, num_ranks, share in (("plain", 1, 32), ("changed", 1, 32), ("changed", 2, 16)):
        done = guozhuang("run", "-np", num_ranks, f"{name}.py", folder=folder)
        assert done.returncode == 0, done
        assert done.stdout.count(f"samples: {share}") == num_ranks, done
