"""Segments, the arena over them, and the matching of sends and receives: one process, no sockets."""

from __future__ import annotations

import gc
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.errors import UsageError, WorldError
from guozhuang.groups.shared_memory import segments
from guozhuang.groups.shared_memory.arena import Arena
from guozhuang.groups.shared_memory.point_to_point.matching import Offer, UnderWay
from guozhuang.groups.shared_memory.point_to_point.transfers import Transfer
from guozhuang.groups.shared_memory.segments import Segment
from tests.drawing import examples

HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor.view(10, 100)[3, 5:],
    "storage": lambda tensor: tensor.untyped_storage(),
    "parameter": lambda tensor: torch.nn.Parameter(tensor).detach().view(10, 100).t(),
    "numpy": lambda tensor: tensor.numpy()[5:],
}
DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint8)


def num_maps(name: str) -> int:
    return sum(f"/memfd:{name}" in line for line in Path("/proc/self/maps").read_text().splitlines())


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_two_mappings_show_the_same_bytes() -> None:
    mine = Segment.create(1 << 20, "both")
    other = Segment.adopt(os.dup(mine.fd), mine.num_bytes)
    for at, dtype in enumerate(DTYPES):
        written, read = (each.tensor(4096 * at, 100, dtype) for each in (mine, other))
        assert read.dtype == dtype and not read.any()
        written.fill_(1)
        assert read.equal(torch.ones(100, dtype=dtype))
        assert written.data_ptr() == mine.address + 4096 * at != read.data_ptr()
    mine.close()
    other.close()


def test_a_storage_is_just_its_part() -> None:
    segment = Segment.create(1 << 20, "part")
    tensor = segment.tensor(64, 10, torch.float32)
    assert tensor.untyped_storage().nbytes() == 40
    file = io.BytesIO()
    torch.save(tensor, file)
    assert len(file.getvalue()) < 4096
    assert segment.tensor(0, 0, torch.float32).shape == (0,)
    segment.close()


@pytest.mark.parametrize("kept", HOLDERS)
def test_the_last_user_of_the_memory_unmaps_it(kept: str) -> None:
    """Whatever keeps the storage keeps the mapping, though the tensor's own Python object is gone; then nothing is left."""
    fds = num_fds()
    segment = Segment.create(1 << 20, "life")
    gone: list[str] = []
    tensor = segment.tensor(0, 1000, torch.float32, when_gone=lambda: gone.append("gone")).fill_(7)
    holder = HOLDERS[kept](tensor)
    del tensor
    segment.close()
    segment.close()
    gc.collect()
    assert (num_fds(), num_maps("life"), gone) == (fds, 1, [])
    last = float(holder[-1] if kept == "storage" else holder.reshape(-1)[-1])  # it can still be read
    assert last == (0x40 if kept == "storage" else 7.0)
    del holder
    assert (num_fds(), num_maps("life"), gone) == (fds, 0, ["gone"])


def test_nobody_can_shrink_or_grow_a_segment() -> None:
    segment = Segment.create(8192, "sealed")
    for num_bytes in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, num_bytes)
    assert not os.get_inheritable(segment.fd)
    segment.close()


@pytest.mark.parametrize("kind", ["unsealed", "short"])
def test_what_could_end_the_process_is_not_adopted(kind: str) -> None:
    fds = num_fds()
    fd = os.memfd_create("odd", os.MFD_CLOEXEC)
    if kind == "short":
        os.close(fd)
        good = Segment.create(4096, "odd")
        fd = os.dup(good.fd)
        good.close()
    else:
        os.ftruncate(fd, 8192)
    with pytest.raises(WorldError, match="8192"):
        Segment.adopt(fd, 8192)
    assert (num_fds(), num_maps("odd")) == (fds, 0)


def test_too_much_is_refused_before_it_is_touched() -> None:
    fds = num_fds()
    with pytest.raises(UsageError, match=f"{1 << 50} bytes cannot be had.*left on this machine.*Fix:"):
        Segment.create(1 << 50, "huge")
    assert (num_fds(), num_maps("huge")) == (fds, 0)


def test_memory_that_runs_out_is_an_error_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answers to a touch that finds no memory."""
    fds = num_fds()
    for number in (12, 14, 28):  # ENOMEM, EFAULT (the touch would have been SIGBUS), ENOSPC

        def fail(self: Segment, number: int = number) -> None:
            raise OSError(number, "no")

        monkeypatch.setattr(Segment, "_commit", fail)
        with pytest.raises(UsageError, match="8192 bytes cannot be had"):
            Segment.create(8192, "full", committed=True)
    monkeypatch.undo()
    gc.collect()
    assert (num_fds(), num_maps("full")) == (fds, 0)


def test_memory_is_committed_when_it_is_used_or_asked_to_be() -> None:
    for committed in (False, True):
        segment = Segment.create(4 << 20, "lazy", committed=committed)
        assert (os.fstat(segment.fd).st_blocks * 512 >= 4 << 20) == committed
        segment.close()


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("always within_size [advise] never deny force", True),
        ("always [within_size] advise never deny force", True),
        ("always within_size advise [never] deny force", False),
        ("always within_size advise never [deny] force", False),
        (None, False),
    ],
)
def test_huge_pages_are_asked_for_where_the_kernel_has_them(
    text: str | None, offered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "enabled").write_text(text)
    monkeypatch.setattr(segments, "_SHMEM_HUGE_PAGES", tmp_path / "enabled")
    assert segments.huge_pages_offered() == offered
    segment = Segment.create(4 << 20, "pages")  # whatever the kernel really does about the wish
    assert segment.tensor(0, 1 << 20, torch.float32).fill_(1).sum() == 1 << 20
    segment.close()


class FakePeers:
    """What the arena asks of the peers, written down."""

    def __init__(self) -> None:
        self.rank = 0
        self.sent: list[int] = []
        self.freed: list[int] = []

    def send_segment(self, number: int, segment: Segment, timeout_s: float) -> None:
        assert segment.fd >= 0
        self.sent.append(number)

    def tell_freed(self, number: int) -> None:
        self.freed.append(number)

    def drain(self) -> None: ...


def make_arena() -> tuple[Arena, FakePeers]:
    peers = FakePeers()
    return Arena(peers), peers  # type: ignore[arg-type]


def test_a_private_view_follows_its_segment_also_where_memory_is_locked() -> None:
    """mlockall(MCL_FUTURE) makes the kernel copy each private page that may be written as soon as it is mapped."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 77 if segments.LIBC.mlockall(2) else 2
            segment = Segment.create(4 * 4096, "locked")
            view = segments.PrivateView(segment)
            first, seen = segment.tensor(0, 8, torch.uint8), view.tensor(0, 8, torch.uint8)
            first.numpy()[:] = 7
            if code == 2 and seen.numpy().tolist() == [7] * 8 and view.follows(segment, 4096):
                code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 77:
        pytest.skip("this system lets no process lock its memory")
    assert code == 0


def where(arena: Arena, tensor: torch.Tensor) -> tuple[int, int] | None:
    return arena.locate(tensor.data_ptr(), tensor.nbytes)


def test_located_is_what_lies_wholly_inside() -> None:
    arena, _ = make_arena()
    large = arena.empty(100_000, torch.float32)
    small = [arena.empty(n, dtype) for n, dtype in ((1, torch.int8), (33, torch.float64), (7, torch.bfloat16))]
    for tensor in (large, *small):
        assert tensor.data_ptr() % 64 == 0
        place = where(arena, tensor)
        assert place is not None
        assert arena.address_at(0, *place) == tensor.data_ptr()
    assert len({where(arena, tensor) for tensor in small}) == 3
    base = where(arena, large)
    assert base is not None
    assert where(arena, large[10:20]) == (base[0], base[1] + 40)
    assert where(arena, large.view(100, 1000)) == base
    assert where(arena, large[:0]) is None
    assert arena.locate(torch.empty(10).data_ptr(), 4) is None
    assert arena.empty(0, torch.float32).shape == (0,)
    with pytest.raises(UsageError, match="must not be negative"):
        arena.empty(-1, torch.float32)
    arena.close()
    assert where(arena, large) is None
    assert large.fill_(3).sum() == 300_000  # it outlives the arena
    with pytest.raises(UsageError, match="destroyed"):
        arena.empty(1, torch.float32)


def test_a_segment_is_sent_once_and_freed_with_its_last_tensor() -> None:
    fds = num_fds()
    arena, peers = make_arena()
    tensor, unsent = arena.empty(100_000, torch.float32), arena.empty(100_000, torch.float32)
    place = where(arena, tensor)
    assert place is not None
    arena.announce(place[0])
    arena.announce(place[0])
    assert peers.sent == [place[0]]
    assert num_fds() == fds + 1  # the peers hold the sent one
    storage = tensor.untyped_storage()
    del tensor
    assert peers.freed == []
    del storage, unsent
    assert peers.freed == peers.sent
    assert (num_fds(), num_maps("guozhuang-arena")) == (fds, 0)
    arena.close()


def test_small_tensors_share_memory_that_is_used_again() -> None:
    arena, peers = make_arena()
    for _ in range(3):
        tensors = [arena.empty(1000, torch.float32).fill_(at) for at in range(1000)]  # 4 slabs
        assert all((tensor == at).all() for at, tensor in enumerate(tensors))
        numbers = {place[0] for tensor in tensors if (place := where(arena, tensor)) is not None}
        assert len(numbers) == num_maps("guozhuang-arena") == 4
        for number in numbers:
            arena.announce(number)
        del tensors
        assert num_maps("guozhuang-arena") == 1
    assert len(peers.freed) == len(set(peers.freed)) >= 3 * 3
    arena.close()
    assert num_maps("guozhuang-arena") == 0


def test_a_tensor_may_die_under_the_arenas_lock() -> None:
    """Garbage collection does that. Nothing waits, and the memory is freed when the lock is let go."""
    arena, _ = make_arena()
    tensor = arena.empty(100_000, torch.float32)
    with arena._changing():
        del tensor
        assert num_maps("guozhuang-arena") == 1
    assert num_maps("guozhuang-arena") == 0
    arena.close()


def test_threads_allocate_and_free_at_once() -> None:
    arena, peers = make_arena()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(150):
                sizes = torch.randint(1, 40_000, (3,), generator=generator).tolist()
                tensors = [arena.empty(size, torch.float32).fill_(seed) for size in sizes]
                assert all((tensor == seed).all() for tensor in tensors)
                place = where(arena, tensors[0])
                assert place is not None
                arena.announce(place[0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(peers.sent) == len(set(peers.sent)) and len(peers.freed) == len(set(peers.freed))
    assert num_maps("guozhuang-arena") <= 1  # the one for small tensors
    arena.close()
    assert num_maps("guozhuang-arena") == 0


def test_a_tensor_that_dies_in_a_forked_process_is_not_freed_here() -> None:
    arena, peers = make_arena()
    tensor = arena.empty(100_000, torch.float32).fill_(5)
    place = where(arena, tensor)
    assert place is not None
    arena.announce(place[0])
    pid = os.fork()
    if pid == 0:
        last = float(tensor[-1])  # no torch operation that may need threads: they are not there after a fork
        del tensor
        os._exit(0 if last == 5 and not peers.freed and arena.locate(torch.empty(1).data_ptr(), 4) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert where(arena, tensor) == place and float(tensor.sum()) == 500_000
    arena.close()


class Twin:
    """Matching by looking through everything in order."""

    def __init__(self) -> None:
        self.offers: list[Offer] = []
        self.posted: list[Transfer] = []

    def post(self, receive: Transfer) -> Offer | None:
        for offer in self.offers:
            if offer.tag == receive.tag and receive.peer in (None, offer.source):
                self.offers.remove(offer)
                return offer
        self.posted.append(receive)
        return None

    def offer(self, offer: Offer) -> Transfer | None:
        for receive in self.posted:
            if offer.tag == receive.tag and receive.peer in (None, offer.source):
                self.posted.remove(receive)
                return receive
        self.offers.append(offer)
        return None


@examples(200)
@given(st.lists(st.tuples(st.sampled_from("prow"), st.integers(0, 3), st.integers(0, 2)), max_size=60))
def test_matching_equals_a_search_in_order(events: list[tuple[str, int, int]]) -> None:
    matcher, twin = UnderWay(9, 10), Twin()
    tensor = torch.empty(1)
    for number, (event, source, tag) in enumerate(events):
        if event == "p":
            receive = Transfer(
                tensor, tensor, (tensor.data_ptr(), 1, 4), 9, source or None, tag, is_send=False, limit_s=0.0
            )
            assert matcher.post(receive) is twin.post(receive)
        elif event == "o":
            offer = Offer(source + 1, number, tag, 0, 1, b"")
            assert matcher.offer(offer) is twin.offer(offer)
        elif event == "r" and twin.posted:
            matcher.withdraw(twin.posted.pop(source % len(twin.posted)))
        elif event == "w":
            matcher.forget_offers(source + 1, unless=lambda offer: offer.number % 2 == 0)
            twin.offers = [o for o in twin.offers if o.source != source + 1 or o.number % 2 == 0]
        assert sorted(map(id, matcher.all())) == sorted(map(id, twin.posted))
