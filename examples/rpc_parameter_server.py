"""A parameter server over torch.distributed.rpc: rank 0 holds the model, the other ranks train it.

Remote references, distributed autograd and DistributedOptimizer. It never imports Guozhuang, and is told its rank on its
command line, as scripts that are started by hand on each machine are::

    guozhuang run -np 3 --no-python bash -c 'exec python examples/rpc_parameter_server.py --rank $RANK --world-size $WORLD_SIZE'

Trainers take turns: autograd on the server refuses a backward if another trainer's step has changed weights since its
forward.
"""

import argparse
import os
import threading
import time

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

SERVER = "server"
_server = None
_making = threading.Lock()


class Server(nn.Module):
    """The whole model, in the memory of the server's process."""

    def __init__(self, hidden):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 2))
        self.turn = threading.Lock()

    def begin_turn(self):
        self.turn.acquire()

    def end_turn(self):
        self.turn.release()  # in another thread of the agent than the one that took it, as a Lock allows

    def forward(self, inputs):
        return self.model(inputs)

    def gradients(self, context):
        """Return the gradients of a trainer's backward, by parameter name; its context holds them, not ``.grad``."""
        found = dist_autograd.get_gradients(context)
        return {name: found[p] for name, p in self.model.named_parameters() if p in found}

    def parameter_references(self):
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]


def the_server(hidden):
    """Return the one server of this process; trainers ask at the same time, in threads of the RPC agent."""
    global _server
    with _making:
        if _server is None:
            _server = Server(hidden)
    return _server


class RemoteModel(nn.Module):
    """What a trainer calls as its model: the forward is computed on the server."""

    def __init__(self, hidden):
        super().__init__()
        self.server = rpc.remote(SERVER, the_server, args=(hidden,))

    def forward(self, inputs):
        return self.server.rpc_sync().forward(inputs)

    def parameter_references(self):
        return self.server.rpc_sync().parameter_references()


def train(rank, options):
    """Train from this worker; return the first and last loss, and samples per second."""
    generator = torch.Generator().manual_seed(rank)
    model = RemoteModel(options.hidden)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_references(), lr=options.lr)
    losses, begin_s = [], 0.0
    for step in range(options.steps):
        if step == options.warmup_steps:
            begin_s = time.perf_counter()
        inputs = torch.randn(options.batch_size, 20, generator=generator)
        labels = (inputs[:, :4].sum(1) > 0).long()
        if not options.no_turns:
            model.server.rpc_sync().begin_turn()
        with dist_autograd.context() as context:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            dist_autograd.backward(context, [loss])
            if step == 0:
                names = sorted(model.server.rpc_sync().gradients(context))
                print(f"trainer {rank}: gradients of {', '.join(names)} lie on the server", flush=True)
            optimizer.step(context)
        if not options.no_turns:
            model.server.rpc_sync().end_turn()
        losses.append(loss.item())
        if step == 0:
            print(f"trainer {rank}: under way", flush=True)
    took_s = time.perf_counter() - begin_s
    return losses[0], losses[-1], options.batch_size * (options.steps - options.warmup_steps) / took_s


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--master-addr", default="localhost")
    parser.add_argument("--master-port", default="29500")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--no-turns", action="store_true", help="for one trainer, which has the server for itself")
    options = parser.parse_args()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = options.master_addr, options.master_port
    rpc.init_rpc(
        SERVER if options.rank == 0 else f"trainer{options.rank}", rank=options.rank, world_size=options.world_size
    )
    if options.rank == 0:
        print(f"server: process {os.getpid()}", flush=True)
    else:
        first, last, speed = train(options.rank, options)
        print(f"trainer {options.rank}: first loss {first:.3f}", flush=True)
        print(f"trainer {options.rank}: last loss {last:.3f}, {speed:.1f} samples/s", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
