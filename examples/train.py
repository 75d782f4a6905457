"""The whole of a training script. Start it any way:

python examples/train.py                                          one process
guozhuang run --nproc-per-node 2 examples/train.py                 two ranks, gradients averaged (ddp)
guozhuang run --nproc-per-node 2 --strategy torch-ddp examples/train.py
torchrun --nproc-per-node 2 examples/train.py
"""

import torch
from torch.utils.data import TensorDataset

import guozhuang as gz

gz.init()

torch.manual_seed(0)
inputs = torch.randn(4096, 20)
labels = (inputs[:, :4].sum(1) > 0).long()
dataset = TensorDataset(inputs, labels)

model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = gz.prepare(model, optimizer)
batches = gz.loader(dataset, global_batch_size=64)

for epoch in gz.epochs(3):
    for x, y in batches:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    gz.print(f"epoch {epoch}: loss {gz.reduce(loss).item():.3f}")

gz.shutdown()
