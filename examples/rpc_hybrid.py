"""DistributedDataParallel and torch.distributed.rpc mixed: an embedding on a server, the rest of the model in all trainers.

Ranks 0 and 1 train and average the gradients of their part by DDP, rank 2 is the master that starts the training, rank 3
holds the embedding. Ranks come from the launcher, the two meeting points (of RPC, and of the trainers' process group) are the
script's own. It never imports Guozhuang::

    guozhuang run -np 4 examples/rpc_hybrid.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

NUM_TRAINERS, WORDS, WIDTH = 2, 100, 16


class HybridModel(nn.Module):
    """The embedding lies on the server; a layer of this process follows it."""

    def __init__(self, embedding):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = embedding, DistributedDataParallel(nn.Linear(WIDTH, 2))

    def forward(self, words, offsets):
        return self.layer(self.embedding.forward(words, offsets))

    def parameter_references(self):
        own = [rpc.RRef(parameter) for parameter in self.layer.parameters()]
        return [*self.embedding.remote_parameters(), *own]


def batch(generator, num_sentences=32, length=5):
    """Sentences of random words of one half of the vocabulary; the label says of which."""
    labels = torch.randint(0, 2, (num_sentences,), generator=generator)
    words = torch.randint(0, WORDS // 2, (num_sentences, length), generator=generator) + labels[:, None] * (WORDS // 2)
    return words.flatten(), torch.arange(0, words.numel(), length), labels


def train(embedding, rank, num_steps):
    """Run by a trainer when the master asks for it; return the first and last loss, and the sum of the layer's weights."""
    model = HybridModel(embedding)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_references(), lr=0.2)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(num_steps):
        words, offsets, labels = batch(generator)
        with dist_autograd.context() as context:
            loss = nn.functional.cross_entropy(model(words, offsets), labels)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
        if step == 0:
            print(f"trainer {rank}: under way", flush=True)
    return losses[0], losses[-1], model.layer.module.weight.sum().item()


def command(num_steps):
    """The master: put the embedding on the server, and let all trainers train on it."""
    embedding = RemoteModule("server", nn.EmbeddingBag, args=(WORDS, WIDTH), kwargs={"mode": "sum"})
    asked = [
        rpc.rpc_async(f"trainer{rank}", train, args=(embedding, rank, num_steps), timeout=0)
        for rank in range(NUM_TRAINERS)
    ]
    for rank, (first, last, weights) in enumerate(torch.futures.wait_all(asked)):
        print(f"trainer {rank}: first loss {first:.3f}", flush=True)
        print(f"trainer {rank}: last loss {last:.3f}, weights {weights:.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--port", type=int, default=29500, help="of RPC; the group of the trainers takes the next one")
    options = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    names = [f"trainer{i}" for i in range(NUM_TRAINERS)] + ["master", "server"]
    if size != len(names):
        parser.error(f"start {len(names)} ranks, not {size}")
    if rank < NUM_TRAINERS:
        where = f"tcp://localhost:{options.port + 1}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=NUM_TRAINERS)
    meeting = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://localhost:{options.port}")
    rpc.init_rpc(names[rank], rank=rank, world_size=size, rpc_backend_options=meeting)
    if names[rank] == "master":
        command(options.steps)
    rpc.shutdown()
    if rank < NUM_TRAINERS:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
