"""The threads of DataParallel: errors, what they take over from the caller, how long they live; copies; refusals."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from guozhuang.data_parallel import DataParallel, MisplacedModuleError, data_parallel
from guozhuang.errors import UsageError
from tests.threads.test_data_parallel import CPUS, Nested, mlp
from tests.waiting import LIMIT_S


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What `pytest.raises` caught refers to itself, and would keep a wrapper and its threads for a while."""
    yield
    gc.collect()


class _Failing(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] >= 2:
            raise self.error
        return x


class _OddError(Exception):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(code)
        self.detail = detail


@pytest.mark.parametrize(
    "make",
    [lambda: ValueError("bad"), lambda: KeyError("k"), lambda: _OddError(3, detail="why"), StopIteration],
    ids=["value", "key", "odd", "stop"],
)
def test_an_error_keeps_type_traceback_and_names_the_replica(make: Callable[[], Exception]) -> None:
    error = make()
    with pytest.raises(type(error)) as caught:
        DataParallel(_Failing(error), CPUS)(torch.arange(4.0).unsqueeze(1))
    assert caught.value is error
    assert caught.traceback[-1].name == "forward"
    assert caught.traceback[-1].path.name == Path(__file__).name
    assert error.__notes__ == ["Raised in replica 1 (of 2) on device cpu."]


def test_all_failing_replicas_are_named_and_the_next_forward_works() -> None:
    model = _Failing(ValueError("bad"))
    parallel = DataParallel(model, ["cpu"] * 3)
    with pytest.raises(ValueError, match="bad") as caught:
        parallel(torch.tensor([[1.0], [2.0], [3.0]]))
    assert "Replica 2 failed too: ValueError: bad" in caught.value.__notes__
    assert parallel(torch.zeros(3, 1)).shape == (3, 1)


def test_a_failed_forward_leaves_no_cycle() -> None:
    parallel = DataParallel(_Failing(ValueError("bad")), CPUS)
    alive = torch.full((2, 1), 5.0)
    before = sys.getrefcount(alive)
    try:
        parallel(alive)
    except ValueError as error:
        parallel.module.error = None
        error.__traceback__ = None
    assert sys.getrefcount(alive) == before


def _replica_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("guozhuang-replica")]


def test_threads_are_kept_while_in_use_and_end_with_the_object() -> None:
    before = set(_replica_threads())
    parallel = DataParallel(mlp(), CPUS)
    assert set(_replica_threads()) <= before
    for _ in range(5):
        parallel(torch.randn(4, 5))
    started = set(_replica_threads()) - before
    assert len(started) == 2
    del parallel
    for thread in started:
        thread.join(timeout=LIMIT_S)
        assert not thread.is_alive()


def test_intra_operation_threads_are_divided_and_restored() -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full_like(x, torch.get_num_threads())

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        parallel = DataParallel(Asking(), CPUS)
        assert parallel(torch.zeros(2)).tolist() == [2, 1]
        assert torch.get_num_threads() == 3
        fresh: list[int] = []
        thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert fresh == [3]
        torch.set_num_threads(1)
        assert parallel(torch.zeros(2)).tolist() == [1, 1]
    finally:
        torch.set_num_threads(before)


def test_modes_of_the_caller_reach_the_replicas() -> None:
    seen: list[tuple[Any, ...]] = []

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(
                (
                    torch.is_grad_enabled(),
                    torch.is_inference_mode_enabled(),
                    torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
                    torch.get_default_device().type,
                )
            )
            return x

    parallel = DataParallel(Asking(), CPUS)

    def asked() -> list[tuple[Any, ...]]:
        seen.clear()
        parallel(torch.zeros(2, device="cpu"))
        return list(seen)

    plain = (True, False, False, "cpu")
    assert asked() == [plain] * 2
    with torch.no_grad():
        assert asked() == [(False, False, False, "cpu")] * 2
    with torch.inference_mode():
        assert asked() == [(False, True, False, "cpu")] * 2
    with torch.autocast("cpu", dtype=torch.float16):
        assert asked() == [(True, False, torch.float16, "cpu")] * 2
    with torch.device("meta"):
        assert asked() == [(True, False, False, "meta")] * 2
    assert asked() == [plain] * 2


def test_autocast_trains_as_the_plain_module() -> None:
    model = mlp()
    x = torch.randn(6, 5)
    grads = []
    for module in (model, DataParallel(model, CPUS)):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(x).float().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-2, atol=2e-2)


def test_checkpointed_blocks() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = mlp(), reentrant

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)

    for reentrant in (False, True):
        model = Checkpointed(reentrant)
        x = torch.randn(6, 5, requires_grad=True)
        grads = []
        for module in (model.inner, DataParallel(model, CPUS)):
            model.zero_grad()
            module(x).square().sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-6)


def test_wrappers_inside_wrappers_and_calls_from_several_threads() -> None:
    model = mlp()
    parallel = DataParallel(nn.Sequential(DataParallel(model, CPUS), nn.Identity()), CPUS)
    x = torch.randn(9, 5)
    expected = model(x)
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(parallel(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def test_a_replica_may_call_its_own_wrapper() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrapper: list[nn.Module] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.wrapper[0](x) + 1 if len(x) > 1 else x

    model = Again()
    parallel = DataParallel(model, CPUS)
    model.wrapper.append(parallel)
    assert parallel(torch.zeros(16)).tolist() == [3.0] * 16
    model.wrapper.clear()


def test_copies_pickles_and_state_dicts() -> None:
    torch.manual_seed(0)
    parallel = DataParallel(mlp(), CPUS)
    x = torch.randn(4, 5)
    expected = parallel(x)
    assert list(parallel.state_dict()) == [f"module.{k}" for k in parallel.module.state_dict()]
    saved = io.BytesIO()
    torch.save(parallel, saved)
    saved.seek(0)
    for twin in (
        copy.deepcopy(parallel),
        pickle.loads(pickle.dumps(parallel)),
        torch.load(saved, weights_only=False),
    ):
        assert twin.imbalance().num_forwards == 0
        assert twin.device_ids == parallel.device_ids == [torch.device("cpu")] * 2
        assert twin.output_device == torch.device("cpu")
        torch.testing.assert_close(twin(x), expected)
        with torch.no_grad():
            next(twin.parameters()).zero_()
        torch.testing.assert_close(parallel(x), expected)
    assert DataParallel(mlp(), CPUS).load_state_dict(parallel.state_dict()) is not None


def test_functional_call_swaps_the_weights_of_all_replicas() -> None:
    parallel = DataParallel(nn.Linear(3, 2), CPUS)
    weights = {"module.weight": torch.ones(2, 3, requires_grad=True), "module.bias": torch.zeros(2)}
    output = torch.func.functional_call(parallel, weights, (torch.ones(4, 3),))
    assert torch.equal(output, torch.full((4, 2), 3.0))
    output.sum().backward()
    assert torch.equal(weights["module.weight"].grad, torch.full((2, 3), 4.0))
    assert parallel.module.weight.grad is None


@pytest.mark.filterwarnings("ignore:.*an entry per replica:UserWarning")
def test_the_function() -> None:
    model = mlp()
    x = torch.randn(5, 5)
    before = set(_replica_threads())
    torch.testing.assert_close(data_parallel(model, x, CPUS), model(x))
    torch.testing.assert_close(data_parallel(model, (x,), CPUS, "cpu"), model(x))
    torch.testing.assert_close(data_parallel(Nested(), None, CPUS, module_kwargs={"x": x})["parts"][0][0], x)
    for thread in set(_replica_threads()) - before:
        thread.join(timeout=LIMIT_S)
        assert not thread.is_alive()


def test_imbalance_is_told() -> None:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            threading.Event().wait(float(x[0]))
            return x

    parallel = DataParallel(Slow(), ["cpu"] * 3)
    assert parallel.imbalance().main_share == 0
    parallel(torch.tensor([0.0, 0.2]))
    told = parallel.imbalance(reset=True)
    assert told.num_forwards == 1
    assert told.busy_s[1] >= 0.2 > told.busy_s[0] > told.busy_s[2] == 0
    assert told.apply_s >= told.busy_s[1]
    assert told.main_only_s == told.scatter_s + told.replicate_s + told.gather_s > 0
    assert 0 < told.main_share < 0.5
    assert told.main_share == told.main_only_s / (told.main_only_s + told.apply_s)
    assert parallel.imbalance().num_forwards == 0


def test_misplaced_modules_raise_as_torch_does() -> None:
    parallel = DataParallel(mlp().to("meta"), CPUS)
    with pytest.raises(MisplacedModuleError, match=r"on device cpu .*'0.weight' is on meta") as caught:
        parallel(torch.randn(4, 5))
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, UsageError)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    parallel = DataParallel(model)
    assert "calls the module as it is" in caplog.text
    assert parallel.device_ids == []
    x = torch.randn(2, 5)
    assert torch.equal(parallel(x), model(x))
    assert torch.equal(data_parallel(model, x), model(x))
    for device_ids in ([0, 1], ["cuda:0"], [torch.device("cuda")]):
        with pytest.raises(UsageError, match="accelerator"):
            DataParallel(model, device_ids)
    with pytest.raises(UsageError, match="no such device"):
        DataParallel(model, output_device="meta")


@pytest.mark.parametrize("device_ids", [[], "cpu", ["nowhere"], ["meta"], [-2]])
def test_bad_devices(device_ids: Any) -> None:
    with pytest.raises(UsageError):
        DataParallel(mlp(), device_ids)


def test_compiled_and_lazy_modules_are_refused() -> None:
    x = torch.randn(4, 5)
    compiled_inside = mlp()
    compiled_inside[0].compile(backend="eager")
    for model in (torch.compile(mlp(), backend="eager"), compiled_inside):
        with pytest.raises(UsageError, match="compiled"):
            DataParallel(model, CPUS)(x)
    lazy = DataParallel(nn.LazyLinear(2), CPUS)
    with pytest.raises(UsageError, match="lazy"):
        lazy(x)
    lazy.module(x)
    assert lazy(x).shape == (4, 2)


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_a_forked_process_starts_its_own_threads() -> None:
    import multiprocessing

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    try:
        parallel = DataParallel(mlp(), CPUS)
        x = torch.randn(4, 5)
        with torch.no_grad():
            expected = parallel(x).tolist()
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()

        def child() -> None:
            with torch.no_grad():
                queue.put(parallel(x).tolist())

        process = context.Process(target=child)
        process.start()
        process.join(timeout=LIMIT_S)
        alive = process.is_alive()
        if alive:
            process.kill()
        assert not alive
        assert queue.get() == expected
    finally:
        torch.set_num_threads(before)
