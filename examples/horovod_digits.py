"""Learn to read digits, written for Horovod and left so. The digits are drawn: nothing is downloaded.

guozhuang run -np 2 examples/horovod_digits.py --epochs 2
horovodrun -np 2 python examples/horovod_digits.py --epochs 2      # with the extra: pip install -e '.[horovod]'
python examples/horovod_digits.py --epochs 2                       # alone, with the extra
python examples/horovod_digits.py --epochs 2 --num-proc 2          # starts its own processes, by horovod.run
"""

import argparse

import horovod
import horovod.torch as hvd
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

# A digit each: seven rows of five dots.
GLYPHS = """
01110 10001 10011 10101 11001 10001 01110   00100 01100 00100 00100 00100 00100 01110
01110 10001 00001 00110 01000 10000 11111   01110 10001 00001 00110 00001 10001 01110
00010 00110 01010 10010 11111 00010 00010   11111 10000 11110 00001 00001 10001 01110
00110 01000 10000 11110 10001 10001 01110   11111 00001 00010 00100 01000 01000 01000
01110 10001 10001 01110 10001 10001 01110   01110 10001 10001 01111 00001 00010 01100
"""


class Digits(Dataset):
    """Images (1, 28, 28), float32, of drawn digits, not all at the same place and with noise; and which digit it is.

    Args:
        length: how many.
        seed: what they are made from.
    """

    def __init__(self, length: int, seed: int) -> None:
        dots = torch.tensor([[int(dot) for dot in row] for row in GLYPHS.split()], dtype=torch.float32)
        glyphs = F.interpolate(dots.view(10, 1, 7, 5), scale_factor=3)[:, 0]  # 21 rows of 15
        made_from = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(10, (length,), generator=made_from)
        down = torch.randint(2, 6, (length,), generator=made_from).tolist()
        right = torch.randint(5, 9, (length,), generator=made_from).tolist()
        self.images = 0.3 * torch.randn(length, 1, 28, 28, generator=made_from)
        for image, target, y, x in zip(self.images, self.targets.tolist(), down, right, strict=True):
            image[0, y : y + 21, x : x + 15] += glyphs[target]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.targets[index]


class Net(nn.Module):
    """Two convolutions, two layers behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(F.dropout(x, training=self.training)), dim=1)


def main(args: argparse.Namespace) -> float:
    """Train and test on this rank; the mean accuracy of all ranks, each on its share of the test digits.

    Where the digits do not divide by the ranks, a few are in two shares.
    """
    hvd.init()
    torch.manual_seed(args.seed)
    device = torch.device("cuda", hvd.local_rank()) if args.cuda else torch.device("cpu")
    if args.cuda:
        torch.cuda.set_device(device)
        torch.cuda.manual_seed(args.seed)
    torch.set_num_threads(1)

    more = {"num_workers": 1, "pin_memory": True} if args.cuda else {"num_workers": args.workers}
    if more["num_workers"] and "forkserver" in mp.get_all_start_methods():
        more["multiprocessing_context"] = "forkserver"  # after hvd.init(), which has threads
    train, test = Digits(args.train_size, args.seed), Digits(args.train_size // 4, args.seed + 1)
    train_sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train, batch_size=args.batch_size, sampler=train_sampler, **more)
    test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test, batch_size=args.test_batch_size, sampler=test_sampler, **more)

    model = Net().to(device)
    lr_scaler = hvd.size() if not args.use_adasum else 1
    if args.cuda and args.use_adasum and hvd.nccl_built():
        lr_scaler = hvd.local_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    scaler = torch.amp.GradScaler(device.type) if args.use_mixed_precision else None

    def one_step(data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        if scaler is None:
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            return loss
        with torch.autocast(device.type):
            loss = F.nll_loss(model(data).float(), target)
        scaler.scale(loss).backward()
        optimizer.synchronize()  # all gradients are here before they are unscaled
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        return loss

    accuracy = 0.0
    for epoch in range(1, args.epochs + 1):
        model.train()
        train_sampler.set_epoch(epoch)
        for batch, (data, target) in enumerate(train_loader):
            loss = one_step(data.to(device), target.to(device))
            if batch % args.log_interval == 0 and hvd.rank() == 0:
                seen = batch * len(data)
                print(f"Train Epoch: {epoch} [{seen}/{len(train_sampler)}]\tLoss: {loss.item():.6f}", flush=True)
        accuracy = evaluate(model, test_loader, len(test_sampler), device)
    return accuracy


def metric_average(value: float, name: str) -> float:
    """The mean over all ranks."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, length: int, device: torch.device) -> float:
    model.eval()
    loss, right = 0.0, 0.0
    for data, target in loader:
        output = model(data.to(device))
        loss += F.nll_loss(output, target.to(device), reduction="sum").item()
        right += (output.argmax(1).cpu() == target).sum().item()
    loss = metric_average(loss / length, "avg_loss")
    accuracy = metric_average(right / length, "avg_accuracy")
    if hvd.rank() == 0:
        print(f"\nTest set: Average loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%\n", flush=True)
    return accuracy


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64, help="digits of a rank and step")
    parser.add_argument("--test-batch-size", type=int, default=1000, help="the same for the test")
    parser.add_argument("--epochs", type=int, default=10, help="how often all digits are seen")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one rank")
    parser.add_argument("--momentum", type=float, default=0.5, help="of SGD")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42, help="of all that is random")
    parser.add_argument("--log-interval", type=int, default=10, help="steps between two lines")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--use-mixed-precision", action="store_true", help="autocast, and scaled gradients")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    parser.add_argument(
        "--gradient-predivide-factor", type=float, default=1.0, help="split the mean: before and after the sum"
    )
    parser.add_argument("--train-size", type=int, default=8192, help="digits to learn from")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data, for each rank")
    parser.add_argument("--num-proc", type=int, help="start so many processes by horovod.run")
    parser.add_argument("--hosts", help="for --num-proc: host1:2,host2:2")
    parser.add_argument(
        "--communication", choices=["gloo", "mpi"], help="for --num-proc: taken as horovod.run takes it"
    )
    args = parser.parse_args()
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    return args


if __name__ == "__main__":
    args = arguments()
    if args.num_proc:
        accuracies = horovod.run(
            main,
            args=(args,),
            num_proc=args.num_proc,
            hosts=args.hosts,
            use_gloo=args.communication == "gloo",
            use_mpi=args.communication == "mpi",
        )
        print(f"Accuracy on every rank: {', '.join(f'{100 * each:.2f}%' for each in accuracies)}")
    else:
        main(args)
