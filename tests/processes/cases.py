"""Many small cases in one set of ranks, each reported as a test of its own; and the boring twin they are compared with.

def case_mean(rank, world_size): ...        # at the top level of the test module; asserts

test_cases = as_tests(globals(), (2,), slow=(3,))
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guozhuang import DistributedDataParallel
from guozhuang.exchange.weights import WeightExchange
from guozhuang.lab.measure import tcp_sent_bytes
from guozhuang.weights.flat import Named
from tests.ranks import run_ranks
from tests.threads.ranks import GENERATOR, run_threads, this_rank
from tests.waiting import LIMIT_S

# Of all cases of a module together, of which some take seconds on an idle machine; below the limit that pytest has for a test.
CASES_LIMIT_S = 3.5 * LIMIT_S


def names_of_cases(namespace: Mapping[str, Any], prefix: str = "case_") -> list[str]:
    return [name for name in namespace if name.startswith(prefix)]


def run_cases(rank: int, world_size: int, module_name: str, names: Sequence[str]) -> dict[str, str]:
    """Run cases one after the other on this rank; return the tracebacks of those that failed."""
    module, failures = importlib.import_module(module_name), {}
    for name in names:
        torch.manual_seed(0)
        started_s = time.monotonic()
        try:
            getattr(module, name)(rank, world_size)
        except Exception:
            failures[name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - started_s:.2f} s", flush=True)
        try:
            dist.barrier()
        except RuntimeError as error:  # ranks went apart in this case; none of those that follow can run
            failures.setdefault(name, f"the other ranks did not come to the end of the case: {error}")
            rest = names[list(names).index(name) + 1 :]
            return failures | dict.fromkeys(rest, f"not run, after {name} failed")
    return failures


def results_of_cases(
    module_name: str,
    num_ranks: int,
    names: Sequence[str],
    run: Callable[..., dict[str, str]] = run_cases,
    timeout_s: float = CASES_LIMIT_S,
    **options: Any,
) -> Callable[[str], None]:
    """A function that raises what one case raised; the first call runs all of them in one set of ranks.

    Ranks call ``run`` as they would ``run_cases``; the options are those of ``run_ranks``.
    """

    @functools.cache
    def everything() -> list[dict[str, str]]:
        try:
            return run_ranks(run, num_ranks, module_name, list(names), timeout_s=timeout_s, **options)
        except AssertionError as error:  # once, not once for each case
            return [dict.fromkeys(names, str(error))]

    def check(name: str) -> None:
        found = {rank: failures[name] for rank, failures in enumerate(everything()) if name in failures}
        assert not found, "\n".join(f"---- rank {rank}:\n{text}" for rank, text in found.items())

    return check


def as_tests(
    namespace: Mapping[str, Any],
    sizes: Sequence[int],
    slow: Sequence[int] = (),
    on: str = "processes",
    in_processes: Sequence[Callable[..., None]] = (),
    not_slow: Sequence[Callable[..., None]] = (),
) -> Callable[..., None]:
    """A test of each case of a module, ``case_*``, for each number of ranks.

    Args:
        namespace: the module's ``globals()``.
        sizes: numbers of ranks.
        slow: numbers of ranks in tests that are marked slow.
        on: "processes"; or "threads", where no case needs processes.
        in_processes: cases that need processes all the same, for example because they change the filters of warnings.
        not_slow: cases that are not marked slow on any number of ranks: there another rank makes a difference.
    """
    names, module = names_of_cases(namespace), namespace["__name__"]
    quick = [case.__name__ for case in not_slow]
    forked = names if on == "processes" else [case.__name__ for case in in_processes]
    tests, results = [], {}
    for size in (*sizes, *slow):
        for part in (quick, [name for name in names if name not in quick]) if size in slow else (names,):
            result = results_of_cases(module, size, [name for name in part if name in forked])
            marks = [] if part is quick or part is names else [pytest.mark.slow]
            tests += [pytest.param(name, size, marks=marks) for name in part]
            results |= {(name, size): result for name in part}

    @pytest.mark.parametrize(("name", "size"), tests)
    def test_cases(name: str, size: int) -> None:
        if name in forked:
            results[name, size](name)
        else:
            run_threads(namespace[name], size)

    return test_cases


def as_table(
    namespace: Mapping[str, Any], methods: Mapping[str, Any], long: Callable[..., None]
) -> Callable[..., None]:
    """A test of each ``case_*(method, rank, size)`` of a module for each method and number of ranks, in threads.

    On 2, 4 and 8 ranks all are marked slow: 3 ranks differ from 1 in the same ways, and in more. So is the case ``long``, which
    trains.
    """
    rows = [
        pytest.param(asked, size, marks=[pytest.mark.slow] if size in (2, 4, 8) or asked == long.__name__ else [])
        for asked in names_of_cases(namespace)
        for size in (1, 2, 3, 4, 8)
    ]

    @pytest.mark.parametrize(("asked", "size"), rows, ids=lambda value: str(value).removeprefix("case_"))
    @pytest.mark.parametrize("name", methods)
    def test_holds(name: str, asked: str, size: int) -> None:
        run_threads(lambda rank, _: namespace[asked](methods[name], rank, size), size)

    return test_holds


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of torch's generator from this seed; ranks that are threads draw one after the other.

    No collective may be called inside: the other ranks could not come to it. So a model is made here, and wrapped outside.
    """
    with GENERATOR:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also takes a stack trace for each kind of device
        yield


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """What the package logs on this rank meanwhile, also where ranks are threads."""
    texts: list[str] = []
    handler, own = logging.Handler(), this_rank()

    def emit(record: logging.LogRecord) -> None:
        if this_rank() is own:
            texts.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("guozhuang").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("guozhuang").removeHandler(handler)


def batch(rank: int, step: int = 0, rows: int = 4, width: int = 6) -> Tensor:
    """The rows of one rank in one step; every rank can make those of all ranks."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def local_loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(batch(rank, step)).pow(2).mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def mlp(width: int = 6, seed: int = 1) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def normed(seed: int = 2) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def twin_of(module: nn.Module) -> nn.Module:
    """A copy with the same values, for the single-process run on the joined batch."""
    return copy.deepcopy(module)


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name.removeprefix("module."): None if p.grad is None else p.grad.detach().clone()
        for name, p in module.named_parameters()
    }


def assert_same_grads(
    actual: nn.Module | Mapping[str, Tensor | None],
    expected: nn.Module | Mapping[str, Tensor | None],
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    actual = grads(actual) if isinstance(actual, nn.Module) else actual
    expected = grads(expected) if isinstance(expected, nn.Module) else expected
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        wanted = expected[name]
        assert (value is None) == (wanted is None), f"{name}: {value} where {wanted} was expected"
        if value is not None and wanted is not None:
            dense, wanted = (t.to_dense() if t.is_sparse else t for t in (value, wanted))
            torch.testing.assert_close(dense, wanted, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def flat(module: nn.Module) -> Tensor:
    """All weights in one row."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def everybodys(tensor: Tensor) -> list[Tensor]:
    """The tensors of all ranks. Every rank must call it."""
    found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def assert_equal_everywhere(tensor: Tensor) -> None:
    """Bit-identical on all ranks."""
    found = everybodys(tensor.detach().reshape(-1).view(torch.uint8))
    assert all(torch.equal(one, found[0]) for one in found), "ranks differ"


def assert_equal_across_ranks(module: nn.Module, what: Callable[[Tensor], Tensor | None] = lambda p: p) -> None:
    """Bit-identical on all ranks: the parameters, or what a function takes from them."""
    values = [(name, what(p.detach() if what(p) is p else p)) for name, p in module.named_parameters()]
    rows = [
        (name, value.detach().contiguous().reshape(-1).view(torch.uint8)) for name, value in values if value is not None
    ]
    if not rows:
        return
    sizes = [row.numel() for _, row in rows]
    found = [together.split(sizes) for together in everybodys(torch.cat([row for _, row in rows]))]  # in one message
    for (name, row), *theirs in zip(rows, *found, strict=True):
        assert all(torch.equal(each, row) for each in theirs), f"{name} differs between ranks"


class Twins:
    """A wrapped module, and a copy that each process trains on the batches of all ranks."""

    def __init__(self, bare: nn.Module, **options: Any) -> None:
        self.twin = twin_of(bare)
        self.ddp = DistributedDataParallel(bare, **options)
        self.both = (self.ddp, self.twin)

    def steps(self, num_steps: int, zero_grad: bool = True, set_to_none: bool = True) -> Iterator[int]:
        """Begin each step without gradients, and compare gradients at its end: with the twin's, and bit by bit across ranks."""
        for step in range(num_steps):
            for model in self.both if zero_grad else ():
                model.zero_grad(set_to_none=set_to_none)
            yield step
            self.check()

    def train(self, num_steps: int, loss_of: Callable[..., Tensor] = local_loss) -> None:
        """Make steps of one forward and backward each, from ``loss_of(model, rank, step)``."""
        for step in self.steps(num_steps):
            self.backward(loss_of, step)

    def backward(self, loss_of: Callable[..., Tensor], *args: Any, scale: float = 1.0) -> None:
        """Run backward from ``loss_of(model, rank, *args)``: of this rank, and for the twin from the mean over all ranks."""
        (loss_of(self.ddp, dist.get_rank(), *args) * scale).backward()
        for rank in range(dist.get_world_size()):
            (loss_of(self.twin, rank, *args) * (scale / dist.get_world_size())).backward()

    def check(self) -> None:
        assert_same_grads(self.ddp, self.twin)
        assert_equal_across_ranks(
            self.ddp, lambda p: p.grad.to_dense() if getattr(p.grad, "is_sparse", False) else p.grad
        )

    def check_weights(self) -> None:
        for ours, theirs in zip(self.ddp.parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert_equal_across_ranks(self.ddp)


def halve_in_other_memory(module: nn.Module) -> None:
    """Give each gradient new storage through ``.data``: the tensor object in ``p.grad`` stays the same."""
    for p in module.parameters():
        p.grad.data = p.grad.data * 0.5


def mean_loss(module: Callable[[Tensor], Tensor], world_size: int, step: int = 0, rows: int = 4) -> Tensor:
    """What a single process minimizes: the mean over the ranks' losses."""
    return torch.stack([module(batch(r, step, rows)).pow(2).mean() for r in range(world_size)]).mean()


def sent_in(take_step: Callable[[int], object], num_steps: int) -> float:
    """Bytes that the kernel sent over TCP for this rank in so many steps, per step. Every rank must call it."""
    dist.barrier()
    before = tcp_sent_bytes()
    for step in range(num_steps):
        take_step(step)
    dist.barrier()
    after = tcp_sent_bytes()
    dist.barrier()  # nobody closes a socket before all have read
    assert before is not None and after is not None
    return (after - before) / num_steps


def sent_per_step(exchange: WeightExchange[Any], parameters: Named, num_steps: int) -> float:
    """Bytes that the kernel sent over TCP for this rank in so many steps of a weight exchange, per step."""
    state = exchange.prepare(parameters, dist.group.WORLD)

    def take_step(step: int) -> None:
        exchange.before_step(state, step)
        exchange.after_step(state, step)

    return sent_in(take_step, num_steps)
