"""Text classification with Hugging Face Accelerate, as such scripts are written; nothing of Guozhuang is in it.

python examples/accelerate_text.py mails.tsv                                                     one process
torchrun --nproc-per-node 2 examples/accelerate_text.py mails.tsv                                Accelerate's own DDP, on gloo
GUOZHUANG_STRATEGY=sharded accelerate launch --cpu --num_processes 2 examples/accelerate_text.py mails.tsv

The data is a .csv or .tsv file, or .gz of one: a label in the first column, text in the others, no header. A tenth is held out.
Nothing is downloaded: the model is a BERT from scratch, or a checkpoint with its tokenizer in a folder (--model FOLDER).
"""

import argparse
import csv
import gzip
import random
import time
from collections import Counter
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

VOCABULARY = 30522
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Layers, width, attention heads, and a learning rate for training from scratch.
SIZES = {"tiny": (2, 128, 2, 1e-3), "mini": (4, 256, 4, 2.5e-4), "base": (12, 768, 12, 5e-5)}


def read(path):
    """Return the rows of the file as pairs of a label and a text."""
    whole = Path(path.removesuffix(".gz"))
    opened = gzip.open if path.endswith(".gz") else open
    how = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if whole.suffix == ".tsv" else {}
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        return [(label, " ".join(texts)) for label, *texts in csv.reader(file, **how)]


def make_tokenizer(texts):
    """Return a tokenizer whose tokens are the most frequent words of the texts; every process makes the same one."""
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    frequency = Counter(word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    words = sorted(frequency, key=lambda word: (-frequency[word], word))[: VOCABULARY - len(SPECIAL)]
    numbers = {word: number for number, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", numbers["[SEP]"]), ("[CLS]", numbers["[CLS]"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def make_loaders(args):
    """Return the loaders for training and for evaluation, the labels, and the tokenizer."""
    rows = read(args.data)
    random.Random(0).shuffle(rows)
    labels = sorted({label for label, _ in rows})
    held_out, train = rows[: len(rows) // 10], rows[len(rows) // 10 :]
    if args.model in SIZES:
        tokenizer = make_tokenizer([text for _, text in train])
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)

    def collate(some):
        padding = "max_length" if args.pad_to_max_length else "longest"
        told = {"padding": padding, "truncation": True, "max_length": args.max_length, "return_tensors": "pt"}
        batch = tokenizer([text for _, text in some], **told)
        batch["labels"] = torch.tensor([labels.index(label) for label, _ in some])
        return batch

    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    return train_loader, DataLoader(held_out, batch_size=32, collate_fn=collate), labels, tokenizer


def make_model(args, num_labels, pad_token_id):
    """Return a BERT of one of the sizes with new weights, or the model of a checkpoint."""
    if args.model not in SIZES:
        return AutoModelForSequenceClassification.from_pretrained(
            args.model, num_labels=num_labels, local_files_only=True
        )
    layers, width, heads, _ = SIZES[args.model]
    config = BertConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        pad_token_id=pad_token_id,
        num_labels=num_labels,
    )
    return BertForSequenceClassification(config)


def prepare(args):
    """Return Accelerate's object, and what it has prepared: model, optimizer, schedule, both loaders."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    train_loader, eval_loader, labels, tokenizer = make_loaders(args)
    model = make_model(args, len(labels), tokenizer.pad_token_id)
    lr = args.lr or (SIZES[args.model][-1] if args.model in SIZES else 2e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    num_steps = len(train_loader) * args.epochs // args.gradient_accumulation_steps
    scheduler = get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, train_loader, eval_loader)


def train(accelerator, model, optimizer, scheduler, batches):
    """Train on the batches, and return their number and the mean loss of all processes."""
    model.train()
    num, total = 0, torch.zeros(())
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        num, total = num + 1, total + loss.detach()
    return num, accelerator.reduce(total / max(num, 1), "mean").item()


def evaluate(accelerator, model, loader):
    """Return the share of right answers in the held-out part."""
    model.eval()
    right = count = 0
    for batch in loader:
        with torch.no_grad():
            found = model(**batch).logits.argmax(-1)
        found, expected = accelerator.gather_for_metrics((found, batch["labels"]))
        right, count = right + (found == expected).sum().item(), count + len(expected)
    return right / max(count, 1)


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="a .csv or .tsv file, or .gz of one: label, text")
    parser.add_argument("--model", default="tiny", help=f"{', '.join(SIZES)}, or the folder of a checkpoint")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8, help="samples of each process in a step")
    parser.add_argument("--max_length", type=int, default=64, help="tokens of a text at most")
    parser.add_argument("--pad_to_max_length", action="store_true", help="in place of the longest text of a batch")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def main():
    args = parse()
    accelerator, model, optimizer, scheduler, train_loader, eval_loader = prepare(args)
    for epoch in range(args.epochs):
        start = time.perf_counter()
        num, loss = train(accelerator, model, optimizer, scheduler, train_loader)
        rate = num * args.batch_size * accelerator.num_processes / (time.perf_counter() - start)
        accuracy = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch}: loss {loss:.6f}, accuracy {accuracy:.3f}, {rate:.1f} samples/s")
    # PyTorch's DDP on gloo may wait for ever where the model outlives the group.
    model, optimizer, scheduler = accelerator.free_memory(model, optimizer, scheduler)
    accelerator.end_training()


if __name__ == "__main__":
    main()
