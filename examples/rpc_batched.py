"""A parameter server over torch.distributed.rpc that answers all trainers at once, by futures and ``async_execution``.

One process starts the others by ``torch.multiprocessing.spawn``; the server starts the training on them by ``rpc_async``.
It never imports Guozhuang::

    guozhuang run -np 1 examples/rpc_batched.py --world-size 3

An update ends when all trainers have sent their gradients, so the weights are those of one process with the batches of all.
"""

import argparse
import os
import threading
import time

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc

SERVER = "server"


def make_model(hidden):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 2))


class BatchingServer:
    """The weights, and the sum of the gradients of this step."""

    def __init__(self, num_trainers, options):
        self.num_trainers = num_trainers
        self.model = make_model(options.hidden)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=options.lr)
        self.lock, self.arrived, self.updated = threading.Lock(), 0, torch.futures.Future()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def weights(self):
        return [parameter.detach() for parameter in self.model.parameters()]

    @staticmethod
    @rpc.functions.async_execution
    def update(reference, gradients):
        """Return a future of the weights after this step; the thread of the agent is free while others still compute."""
        server = reference.local_value()
        with server.lock:
            for parameter, gradient in zip(server.model.parameters(), gradients, strict=True):
                parameter.grad += gradient / server.num_trainers
            server.arrived += 1
            updated = server.updated
            if server.arrived == server.num_trainers:
                server.optimizer.step()
                server.optimizer.zero_grad(set_to_none=False)
                server.arrived, server.updated = 0, torch.futures.Future()
                updated.set_result(server.weights())
        return updated


def train(server, number, options):
    """Train on this worker; return the first and last loss, and samples per second."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(number)
    model = make_model(options.hidden)
    losses, begin_s = [], 0.0
    for step in range(options.steps):
        if step == options.warmup_steps:
            begin_s = time.perf_counter()
        inputs = torch.randn(options.batch_size, 20, generator=generator)
        labels = (inputs[:, :4].sum(1) > 0).long()
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        weights = rpc.rpc_sync(SERVER, BatchingServer.update, args=(server, gradients))
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)
        losses.append(loss.item())
        if step == 0:
            print(f"trainer {number}: under way", flush=True)
    took_s = time.perf_counter() - begin_s
    return losses[0], losses[-1], options.batch_size * (options.steps - options.warmup_steps) / took_s


def serve(options):
    trainers = range(1, options.world_size)
    server = rpc.RRef(BatchingServer(len(trainers), options))
    trained = [rpc.rpc_async(f"trainer{i}", train, args=(server, i, options), timeout=0) for i in trainers]
    for number, (first, last, speed) in zip(trainers, torch.futures.wait_all(trained), strict=True):
        print(f"trainer {number}: first loss {first:.3f}", flush=True)
        print(f"trainer {number}: last loss {last:.3f}, {speed:.1f} samples/s", flush=True)
    print(f"weights: {sum(w.sum().item() for w in server.local_value().weights()):.6f}", flush=True)


def work(rank, options):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", options.master_port
    torch.set_num_threads(1)
    rpc.init_rpc(f"trainer{rank}" if rank else SERVER, rank=rank, world_size=options.world_size)
    if rank == 0:
        print(f"server: process {os.getpid()}", flush=True)
        serve(options)
    rpc.shutdown()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=3, help="the server and the trainers")
    parser.add_argument("--master-port", default="29500")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.5)
    options = parser.parse_args()
    mp.spawn(work, args=(options,), nprocs=options.world_size)


if __name__ == "__main__":
    main()
