"""How many images a second: random ones through a small residual network, written for Horovod and left so.

guozhuang run -np 2 examples/horovod_synthetic.py
horovodrun -np 2 python examples/horovod_synthetic.py        # with the extra: pip install -e '.[horovod]'
python examples/horovod_synthetic.py                         # alone, with the extra
"""

import argparse
import timeit

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        self.around = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.around(x))


def network(widths: list[int]) -> nn.Module:
    """Blocks of these widths, each halving the image, and a classifier of 1000 classes."""
    blocks = [Block(before, after, 2) for before, after in zip([3, *widths], widths, strict=False)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000))


MODELS = {"tiny": [8, 16], "small": [16, 32, 64], "medium": [32, 64, 128, 256]}


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--model", choices=MODELS, default="small", help="which network")
    parser.add_argument("--batch-size", type=int, default=32, help="images of a rank and step")
    parser.add_argument("--image-size", type=int, default=64, help="pixels of a side")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="steps before anything is measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="steps of a measurement")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    args = parser.parse_args()
    args.cuda = not args.no_cuda and torch.cuda.is_available()

    hvd.init()
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank())
        torch.backends.cudnn.benchmark = True

    model = network(MODELS[args.model])
    # Adasum needs no larger learning rate, but where NCCL averages inside a node first.
    lr_scaler = hvd.size() if not args.use_adasum else 1
    if args.cuda:
        model.cuda()
        if args.use_adasum and hvd.nccl_built():
            lr_scaler = hvd.local_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    data = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    target = torch.randint(1000, (args.batch_size,))
    if args.cuda:
        data, target = data.cuda(), target.cuda()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()

    def log(text: str) -> None:
        if hvd.rank() == 0:
            print(text, flush=True)

    device = "GPU" if args.cuda else "CPU"
    log(f"Model: {args.model}")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of {device}s: {hvd.size()}")
    timeit.timeit(step, number=args.num_warmup_batches)
    rates = []
    for number in range(args.num_iters):
        seconds = timeit.timeit(step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iter #{number}: {rates[-1]:.1f} img/sec per {device}")
    mean, spread = np.mean(rates), 1.96 * np.std(rates)
    log(f"Img/sec per {device}: {mean:.1f} +-{spread:.1f}")
    log(f"Total img/sec on {hvd.size()} {device}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")


if __name__ == "__main__":
    main()
