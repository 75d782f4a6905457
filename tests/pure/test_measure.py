from __future__ import annotations

import socket
import sys
import threading

import pytest
import torch
from torch import nn

from guozhuang.lab import measure
from tests.waiting import LIMIT_S

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads what the Linux kernel tells")


@linux
def test_sent_bytes_are_those_written_to_tcp_sockets() -> None:
    def drain(connection: socket.socket) -> None:
        with connection:
            while connection.recv(1 << 20):
                pass

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        reader = threading.Thread(target=drain, args=(server.accept()[0],))
        reader.start()
        before = measure.tcp_sent_bytes()
        sender.sendall(bytes(5_000_000))
        after = measure.tcp_sent_bytes()
        sender.shutdown(socket.SHUT_WR)
        reader.join(LIMIT_S)
    assert before is not None and after is not None
    assert after - before == 5_000_000


@linux
def test_other_sockets_are_not_counted() -> None:
    one, two = socket.socketpair()
    with one, two:
        before = measure.tcp_sent_bytes()
        one.sendall(b"x" * 1000)
        assert measure.tcp_sent_bytes() == before


@linux
def test_peak_memory_falls_when_it_is_reset_and_rises_with_use() -> None:
    hill = torch.ones(32 << 18)
    high = measure.peak_memory_bytes()
    del hill
    if not measure.reset_peak_memory(torch.device("cpu")):
        pytest.skip("this kernel does not let the mark be reset")
    low = measure.peak_memory_bytes()
    assert high is not None and low is not None
    assert low < high
    kept = torch.ones(64 << 18)
    top = measure.peak_memory_bytes()
    assert top is not None and top - low > 48 << 20
    assert measure.pss_bytes() is not None
    del kept


def test_the_last_gradient_is_found_and_only_it_keeps_a_hook() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1, bias=False))
    clock = measure.Clock(torch.device("cpu"))
    last = measure.LastGradient(model, clock)
    model(torch.ones(2, 3)).sum().backward()
    last.keep_last()
    assert last.name in ("0.weight", "0.bias")
    before = clock.now()
    model(torch.ones(2, 3)).sum().backward()
    assert clock.seconds(before, last.mark) > 0
    hooked = [name for name, p in model.named_parameters() if p._post_accumulate_grad_hooks]
    assert hooked == [last.name]


def test_a_shared_parameter_is_last_only_when_its_whole_gradient_is_there() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), shared)
    last = measure.LastGradient(model, measure.Clock(torch.device("cpu")))
    model(torch.ones(2, 3)).sum().backward()
    assert last.name in ("0.weight", "0.bias")


def test_a_step_without_the_last_parameter_has_no_mark_and_starts_the_search_again() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    last = measure.LastGradient(nn.Sequential(first, second), measure.Clock(torch.device("cpu")))
    second(first(torch.ones(2, 3))).sum().backward()
    last.keep_last()
    assert last.take() is not None and last.name.startswith("0.")
    second(torch.ones(2, 3)).sum().backward()
    assert last.take() is None
    second(torch.ones(2, 3)).sum().backward()
    assert last.take() is not None and last.name.startswith("1.")


def test_a_loss_without_the_model_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="does not depend on the model"):
        measure.LastGradient(nn.Linear(1, 1), measure.Clock(torch.device("cpu"))).keep_last()


def test_digest_sees_single_bits_and_any_dtype() -> None:
    one = [torch.zeros(3), torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(1.0), torch.empty(0)]
    two = [tensor.clone() for tensor in one]
    assert measure.digest(one) == measure.digest(two)
    two[0][1] = -0.0
    assert measure.digest(one) != measure.digest(two)
