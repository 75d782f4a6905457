"""Messages and payloads between ranks in shared memory: two ends in one process, with rings so short that all wraps around."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator

import pytest
import torch

from guozhuang.groups.shared_memory import _engine
from guozhuang.groups.shared_memory.engine import Mail, mail_ring_bytes
from guozhuang.groups.shared_memory.point_to_point import messages
from guozhuang.groups.shared_memory.segments import Segment

Ends = tuple[Mail, Mail, socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The mail of ranks 0 and 1 with rings of 1024 and 4096 bytes, and the sockets that wake them."""
    segments = [Segment.create(1 << 16, "mail") for _ in range(2)]
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in sockets:
        each.setblocking(False)
    areas = [segment.address for segment in segments]
    first = _engine.Mail(0, areas, [-1, sockets[0].fileno()], 1024, 4096, [os.getpid()] * 2, 10.0)
    second = _engine.Mail(1, areas, [sockets[1].fileno(), -1], 1024, 4096, [os.getpid()] * 2, 10.0)
    yield first, second, *sockets
    for each in sockets:
        each.close()
    for segment in segments:
        segment.close()


def is_woken(end: socket.socket) -> bool:
    try:
        return end.recv(8) == b"!"
    except BlockingIOError:
        return False


def test_messages_arrive_whole_and_in_order_and_a_full_ring_takes_no_more(ends: Ends) -> None:
    first, second, at_first, at_second = ends
    values = torch.arange(256, dtype=torch.uint8)
    sent = taken = 0
    for turn in range(40):
        while first.put(1, 3, 7, sent, -turn, 1 << 62, values.data_ptr(), sent % 250):
            sent += 1
        assert sent > taken and not is_woken(at_first)
        while (message := second.take(-1)) is not None:
            assert message[:4] == (0, 3, 7, taken) and message[5] == 1 << 62
            assert message[6] == bytes(range(taken % 250))
            taken += 1
        assert taken == sent and is_woken(at_first)  # there is room again
    assert not is_woken(at_second)
    assert not second.arm() and first.put(1, 0, 0, 0, 0, 0, 0, 0) and first.put(1, 0, 0, 1, 0, 0, 0, 0)
    assert is_woken(at_second) and not is_woken(at_second) and second.arm()
    for wrong in ((0, 0), (2, 0), (1, 1000)):
        with pytest.raises(ValueError, match="no such rank, or too long"):
            first.put(wrong[0], 0, 0, 0, 0, 0, values.data_ptr(), wrong[1])


def test_payloads_move_while_both_look_and_what_was_given_up_is_skipped(ends: Ends) -> None:
    first, second, _, _ = ends
    given, got = torch.arange(20_000, dtype=torch.uint8), torch.zeros(20_000, dtype=torch.uint8)
    for turn, number in enumerate(range(1, 8)):
        position = first.push(1, number, given.data_ptr(), given.numel())
        if turn % 3 == 2:  # the sender gives up in the middle; the receiver has not begun, or is in the middle too
            if turn == 5:
                second.pull(0, number, got.data_ptr(), got.numel(), position)
            first.spin(0.0)
            second.spin(0.0)
            first.stop(1, 1, number)
            second.stop(0, 0, number)
            continue
        got.zero_()
        second.pull(0, number, got.data_ptr(), got.numel(), position)
        told = None
        for _ in range(1000):
            first.spin(0.0)
            if (told := second.take(-1)) is not None:
                break
        assert told is not None and told[:4] == (0, messages.PULLED, 0, number)
        assert got.equal(given) and second.take(-1) is None


def test_bytes_of_the_next_payload_are_not_taken_for_one_that_was_given_up(ends: Ends) -> None:
    first, second, _, _ = ends
    lost, given = torch.zeros(5000, dtype=torch.uint8), torch.arange(20_000, dtype=torch.uint8)
    half, got = torch.zeros(5000, dtype=torch.uint8), torch.zeros(20_000, dtype=torch.uint8)
    second.pull(0, 1, half.data_ptr(), half.numel(), first.push(1, 1, lost.data_ptr(), lost.numel()))
    first.spin(0.0)
    first.stop(1, 1, 1)
    position = first.push(1, 2, given.data_ptr(), given.numel())
    for _ in range(50):  # the reader has not been told yet
        first.spin(0.0)
        assert second.take(-1) is None
    second.stop(0, 0, 1)
    second.pull(0, 2, got.data_ptr(), got.numel(), position)
    for _ in range(50):
        first.spin(0.0)
        second.spin(0.0)
    assert second.take(-1) == (0, messages.PULLED, 0, 2, 0, 0, b"") and got.equal(given) and not half.any()


def test_one_message_is_received_if_it_is_the_one(ends: Ends) -> None:
    first, second, _, at_second = ends
    given, got = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)

    def receive(tag: int = 5, dtype: int = 7, num: int = 64) -> bool:
        return second.receive(0, tag, dtype, num, got.data_ptr(), num, 0.0)

    assert not receive()  # nothing is there
    assert first.put(1, messages.OFFER, 7, 11, 5, 64, given.data_ptr(), 64)
    assert not receive(tag=6) and not receive(dtype=8) and not receive(num=63) and not got.any()
    assert receive() and got.equal(given)
    assert not receive() and not first.confirm(1, messages.DONE, 12, 0.0)  # it is another one's answer
    assert first.confirm(1, messages.DONE, 11, 0.0) and not first.confirm(1, messages.DONE, 11, 0.0)
    assert first.put(1, messages.GIVEN_UP, 0, 11, 1, 0, 0, 0) and not receive()
    assert second.take(-1) is not None and not is_woken(at_second)


def test_a_payload_is_read_from_the_sender_unless_it_was_given_up(ends: Ends) -> None:
    first, second, _, _ = ends
    given, got = torch.arange(20_000, dtype=torch.uint8), torch.zeros(20_000, dtype=torch.uint8)
    place = bytearray(messages.PLACE.pack(given.data_ptr(), first.retracted(1)))
    note = (ctypes.c_char * len(place)).from_buffer(place)

    def receive() -> bool:
        return second.receive(0, 5, 7, 20_000, got.data_ptr(), 20_000, 0.0)

    for is_given_up in (False, True):
        assert first.put(1, messages.APART, 7, 11, 5, 20_000, ctypes.addressof(note), len(place))
        if is_given_up:
            first.retract(1)
        assert receive() != is_given_up
        assert second.fetch(0, got.data_ptr(), 20_000, given.data_ptr(), 0) != is_given_up
        assert got.equal(given)
    assert second.fetch(0, got.data_ptr(), 20_000, given.data_ptr(), first.retracted(1))
    assert not second.fetch(0, got.data_ptr(), 20_000, 0, first.retracted(1))  # nothing lies there
    with pytest.raises(ValueError, match="no such rank"):
        first.retract(0)


def test_an_offer_goes_with_its_payload_or_where_that_lies_and_looks_for_the_answer(ends: Ends) -> None:
    first, second, _, _ = ends
    given, got = torch.arange(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)
    place = ctypes.create_string_buffer(messages.PLACE.pack(given.data_ptr(), first.retracted(1)), messages.PLACE.size)

    def offer(kind: int, number: int, num_bytes: int = 200) -> bool | None:
        along = given.data_ptr(), num_bytes
        if kind == messages.APART:
            along = ctypes.addressof(place), len(place)
        return first.offer(1, kind, 7, number, 5, 200, *along, 0.0)

    for number, kind in enumerate((messages.OFFER, messages.APART)):
        assert offer(kind, number) is False  # it was sent, and nobody has answered
        assert second.receive(0, 5, 7, 200, got.data_ptr(), 200, 0.0) and got.equal(given)
        assert first.confirm(1, messages.DONE, number, 0.0)
        got.zero_()
    assert second.put(0, messages.DONE, 0, 8, 0, 0, 0, 0) and second.put(0, messages.DONE, 0, 9, 0, 0, 0, 0)
    assert offer(messages.OFFER, 9) is False and offer(messages.OFFER, 8) is True and first.take(-1) is not None
    assert offer(messages.OFFER, 10) is False and offer(messages.OFFER, 11) is None  # there is no room
    kinds = []
    while (message := second.take(-1)) is not None:
        kinds.append(message[1:5])
    assert kinds == [(messages.OFFER, 7, number, 5) for number in (9, 8, 10)]
    with pytest.raises(ValueError, match="no such rank"):
        first.offer(0, messages.OFFER, 7, 1, 5, 1, given.data_ptr(), 1, 0.0)
    with pytest.raises(ValueError, match="too long a message"):
        offer(messages.OFFER, 12, 1000)


def test_rings_shrink_with_the_number_of_ranks() -> None:
    for size in (2, 20, 100, 500):
        messages, payloads = mail_ring_bytes(size)
        assert size * (messages + payloads) + 4096 <= 8 << 20 and messages >= 1024 and payloads >= 4096
