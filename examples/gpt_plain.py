"""A small GPT on one process, as such scripts are written; examples/gpt.py is the same on any number, with six lines changed.

python examples/gpt_plain.py [TEXT_FILE] [--checkpoint gpt.pt]
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

MICRO_BATCHES = 4


class Text(torch.utils.data.Dataset):
    """Windows of a text's bytes, each with the bytes that follow."""

    def __init__(self, path, context):
        self.data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
        self.context = context

    def __len__(self):
        return (len(self.data) - 1) // self.context

    def __getitem__(self, i):
        window = self.data[i * self.context : (i + 1) * self.context + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, context, width, depth, heads=4):
        super().__init__()
        self.context = context
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def sample(self, start, length):
        tokens = torch.tensor([list(start.encode())], device=self.head.weight.device)
        for _ in range(length):
            logits = self(tokens[:, -self.context :])[:, -1].float()
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


parser = argparse.ArgumentParser()
parser.add_argument("text", nargs="?", default=argparse.__file__, help="a text file; by default the source of argparse")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--context", type=int, default=64)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--depth", type=int, default=2)
parser.add_argument("--checkpoint", default="gpt.pt")
args = parser.parse_args()

torch.manual_seed(0)
model = GPT(args.context, args.width, args.depth)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
batches = torch.utils.data.DataLoader(Text(args.text, args.context), args.batch_size, shuffle=True, drop_last=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.epochs * len(batches))

begin = 0
if os.path.exists(args.checkpoint):
    saved = torch.load(args.checkpoint)
    begin = saved["epoch"]
    for each, name in ((model, "model"), (optimizer, "optimizer"), (scheduler, "scheduler")):
        each.load_state_dict(saved[name])

for epoch in range(begin, args.epochs):
    for x, y in batches:
        for micro in range(MICRO_BATCHES):
            inputs, targets = x[micro::MICRO_BATCHES], y[micro::MICRO_BATCHES]
            with torch.autocast(inputs.device.type, torch.bfloat16):
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            (loss / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.4f}, learning rate {scheduler.get_last_lr()[0]:.2e}")
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**states, "epoch": epoch + 1}, args.checkpoint)

model.eval()
print(model.sample("def parse", 60))
