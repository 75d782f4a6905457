"""How lines of several ranks are put together, and how progress bars of one stay alive."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.launch.console import lines
from guozhuang.launch.console.escapes import is_plain, is_plain_begin, rows_up, without_escapes
from guozhuang.launch.console.lines import MAX_LINE, Lines, LiveText, WholeLines
from guozhuang.launch.console.screen import Screen, mark
from tests.drawing import examples
from tests.glass import Glass

M0, M1 = b"[0] ", b"[1] "


class Paper:
    """Collects what a screen writes; ``terminal`` also draws it as a terminal would."""

    def __init__(self, is_terminal: bool) -> None:
        self.data = b""
        self.screen = Screen(self.write, is_terminal)

    def write(self, data: bytes) -> None:
        self.data += data

    def drawn(self) -> list[str]:
        glass = Glass()
        glass.write(self.data)
        return glass.text


def test_marks() -> None:
    assert mark(3, False) == b"[3] "
    assert mark(3, True).startswith(b"\x1b[") and b"[3]" in mark(3, True)
    assert mark(1, True) != mark(2, True)


def test_lines_are_whole_however_they_are_cut() -> None:
    text = "erste Zeile\nGrüße 锅庄\r\n\nlast".encode()
    for cut in range(len(text)):
        lines = Lines()
        found = lines.feed(text[:cut]) + lines.feed(text[cut:])
        assert [line.decode() for line in found] == ["erste Zeile", "Grüße 锅庄", ""]
        assert lines.rest() == [b"last"] and lines.rest() == []


def test_of_a_line_that_was_drawn_over_the_last_state_remains() -> None:
    lines = Lines()
    assert lines.feed(b"\r 10%\r 20%") == []
    assert not lines.is_waiting(), "a progress bar is no unfinished line"
    assert lines.feed(b"\r100%\n") == [b"100%"]


def test_a_line_without_end_is_bounded() -> None:
    lines = Lines()
    found = [piece for _ in range(5) for piece in lines.feed(b"x" * MAX_LINE)]
    assert sum(map(len, found + lines.rest())) == 5 * MAX_LINE and max(map(len, found)) <= 2 * MAX_LINE
    bar = Lines()
    for step in range(MAX_LINE):
        assert bar.feed(b"\r%d" % step) == []
    assert bar.rest() == [b"%d" % (MAX_LINE - 1)]


# The parts in which output arrives, the seconds after each, and the lines that are shown.
ARRIVALS: dict[str, tuple[list[bytes], float, list[bytes]]] = {
    "reads that always end inside a line": (
        [b"x" * 9 + b"\n" + b"y" * 5, *[b"y" * 4 + b"\n" + b"y" * 5] * 9, b"y" * 4 + b"\n"], 0.3, [b"x" * 9, *[b"y" * 9] * 10],
    ),
    "dots of a slow progress": ([*[b"."] * 9, b"done\n"], 0.5, [b"." * 9 + b"done"]),
    "a prompt, and what is written a long time later": ([b"name? ", b"x\n"], 1.5, [b"name? ", b"x"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ARRIVALS)
def test_a_line_is_cut_only_where_a_rank_paused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, pause_s, shown = ARRIVALS[case]
    now = [0.0]
    monkeypatch.setattr(lines, "time", SimpleNamespace(monotonic=lambda: now[0]))
    paper = Paper(is_terminal=False)
    stream = WholeLines(paper.screen, M1)
    for part in parts:
        stream.feed(part)
        for _ in range(10):
            now[0] += pause_s / 10
            stream.show_what_waits()
    assert paper.data.splitlines() == [M1 + line for line in shown]


def test_megabytes_without_a_line_end_take_little_time() -> None:
    """A pseudo terminal gives 4 KiB a read: what is held back must not be looked through again and again."""
    paper = Paper(is_terminal=True)
    stream = LiveText(paper.screen, M0)
    begin = time.process_time()
    for _ in range(256):
        stream.feed(b"x" * 4096)
    stream.finish()
    assert time.process_time() - begin < 3
    assert paper.data == M0 + b"x" * (256 * 4096)


@pytest.mark.parametrize(
    ("text", "is_beginning"),
    [
        (b"", True),
        (b"text", True),
        (b"\x1b[31mred\x1b[0m " * 1000, True),
        (b"\x1b[31mred\x1b[0m " * 1000 + b"\x1b[3", True),
        (b"\x1b[1" + b";1" * 1000, True),
        (b"red\x1b", True),
        (b"\x1b[31mred\x1b[0m " * 1000 + b"\x1b[2K", False),
        (b"\x1b]0;title", False),
        (b"text\r", False),
    ],
)
def test_the_beginning_of_a_plain_line(text: bytes, is_beginning: bool) -> None:
    is_cut = text.endswith((b"\x1b", b"[3", b";1"))
    assert is_plain_begin(text) is is_beginning and is_plain(text + b"\n") is (is_beginning and not is_cut)
    assert is_plain((text + b"\n") * 2) is (is_beginning and not is_cut)


# What is written to a screen, and the bytes that it shows: bytes are of rank 0, a list is lines of rank 1, None is the end.
SHOWN: dict[str, tuple[bool, list[bytes | list[bytes] | None], bytes]] = {
    "as it comes": (False, [b"load", b"ing\nnext\n\n", b"a\0b\r\n"], b"[0] loading\n[0] next\n[0] \n[0] a\0b\r\n"),
    "an unfinished line is shown": (False, [b"load"], b"[0] load"),
    "cut characters": (False, [b"\xe2", b"\x96", b"\x88\xc3", b"\xa9\n"], "[0] █é\n".encode()),
    "what another screen has erased is gone": (True, [b"\r10%\r   \x1b[K", b"\r", None], b"\r[0] 10%\r   \x1b[K\x1b[K\r"),
    "an unfinished line is ended once": (True, [b"bye", None, None], b"[0] bye\n"),
    "a cursor that was sent back is there again": (
        True, [b"one\r", [b"hello"], b"two\n"], b"[0] one\r\r\x1b[J[1] hello\n[0] one\r[0] two\n",
    ),
    "colours do not run into the next line": (True, [[b"\x1b[31mred"]], b"[1] \x1b[31mred\x1b[0m\n"),
    "others cannot move the cursor": (True, [[b"\x1b[2A\x1b[2K\x1b[1mbold"]], b"[1] \x1b[1mbold\x1b[0m\n"),
    "the end of a line that was cut is no empty line": (
        False, [b"one", [b"hello"], b"\ntwo\n\n"], b"[0] one\n[1] hello\n[0] two\n[0] \n",
    ),
    "colours go on behind the mark": (True, [b"\x1b[31mred\nstill\x1b[0m\n"], b"[0] \x1b[31mred\n[0] \x1b[31mstill\x1b[0m\n"),
    "a stream has the whole screen": (
        True, [b"\x1b[?25l\x1b[?1049h\x1b[H\x1b[2Jfull", [b"hello"], b"\x1b[5;5Hmore\n", b"\x1b[?1049l"],
        b"\x1b[?25l\x1b[?1049h\x1b[H\x1b[2Jfull\x1b[5;5Hmore\n\x1b[?1049l[1] hello\n",
    ),
    "it is killed while it has it": (
        True, [b"\x1b[?25l\x1b[?1049h", [b"again"], None], b"\x1b[?25l\x1b[?1049h\x1b[?1049l[1] again\n\x1b[?25h",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHOWN)
def test_what_is_shown(case: str) -> None:
    is_terminal, writes, shown = SHOWN[case]
    paper = Paper(is_terminal)
    for each in writes:
        if each is None:
            paper.screen.end()
        elif isinstance(each, list):
            paper.screen.lines(M1, each)
        else:
            paper.screen.live(1, M0, each)
    assert paper.data == shown


def test_a_progress_bar_updates_in_its_place() -> None:
    paper = Paper(is_terminal=True)
    for percent in (0, 50, 100):
        paper.screen.live(1, M0, b"\r%3d%%" % percent)
    paper.screen.live(1, M0, b"\ndone\n")
    assert paper.drawn() == ["[0] 100%", "[0] done"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_of_others_do_not_break_into_a_bar(is_terminal: bool) -> None:
    paper = Paper(is_terminal)
    paper.screen.live(1, M0, b"\r 50%")
    paper.screen.lines(M1, [b"hello"])
    paper.screen.live(1, M0, b"\r 60%")
    paper.screen.live(2, M0, b"from its other stream\n")
    paper.screen.live(1, M0, b"\r100%\n")
    rows = paper.drawn()
    assert "[1] hello" in rows and "[0] from its other stream" in rows and "[0] 100%" in rows
    if is_terminal:
        assert rows == ["[1] hello", "[0] from its other stream", "[0] 100%"], "the bar moved down each time"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_two_streams_that_both_draw_take_turns(is_terminal: bool) -> None:
    paper = Paper(is_terminal)
    for percent in (b"10%", b"20%"):
        paper.screen.live(1, M0, b"\rout " + percent)
        paper.screen.live(2, M0, b"\rerr " + percent)
    assert paper.drawn() == ["[0] out 10%", "[0] err 10%", "[0] out 20%", "[0] err 20%"]


def rich_frames(num_frames: int, width: int) -> list[bytes]:
    """What rich writes for two bars that are drawn again and again, with a line above them now and then."""
    import io

    from rich.console import Console
    from rich.live import Live

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=24, color_system="standard")
    frames = []
    with Live("[red]epoch 0[/]\nstep 0", console=console, auto_refresh=False, redirect_stdout=False) as live:
        for number in range(1, num_frames):
            if number % 5 == 0:
                console.print(f"said {number}")
            live.update(f"[red]epoch {number // 10}[/]\nstep {number}", refresh=True)
            frames.append(out.getvalue())
            out.seek(0)
            out.truncate()
    return [frame.encode() for frame in [*frames, out.getvalue()]]


def tqdm_frames(num_frames: int, width: int) -> list[bytes]:
    """The same of tqdm: two bars, the inner one is gone at its end."""
    import io

    from tqdm import tqdm

    out = io.StringIO()
    frames = []

    def take() -> None:
        frames.append(out.getvalue().encode())
        out.seek(0)
        out.truncate()

    with tqdm(total=num_frames // 10, desc="epoch", file=out, ncols=width, mininterval=0, miniters=1) as outer:
        for epoch in range(num_frames // 10):
            with tqdm(total=10, desc="step", leave=False, file=out, ncols=width, mininterval=0, miniters=1) as inner:
                for _ in range(10):
                    inner.update()
                    take()
            outer.update()
            tqdm.write(f"said {epoch}", file=out)
            take()
    take()
    return frames


@pytest.mark.parametrize("cut", ["whole", "anywhere"])
@pytest.mark.parametrize("frames_of", [rich_frames, tqdm_frames])
def test_blocks_of_several_rows_are_drawn_as_if_alone(
    frames_of: Callable[[int, int], list[bytes]], cut: str, seed: int = 5
) -> None:
    """Lines of others, also long ones, come at any time, between any two bytes. Every row of the block is where it is alone."""
    chance = random.Random(seed)
    width, is_whole = 60, cut == "whole"
    frames = frames_of(60, width - len(M0))
    pieces = frames if is_whole else [frame[i : i + 7] for frame in frames for i in range(0, len(frame), 7)]
    alone, glass = Glass(width - len(M0), 24), Glass(width, 24)
    written = b""
    said: list[str] = []

    def write(data: bytes) -> None:
        nonlocal written
        written += data
        if is_whole:
            glass.write(data)

    screen = Screen(write, True, lambda: (width, 24))
    for number, piece in enumerate(pieces):
        if chance.random() < 0.3:
            line = f"[1] line {number}" + "x" * chance.choice([0, 0, 100])
            said += [line[i : i + width] for i in range(0, len(line), width)]
            screen.lines(M1, [line[4:].encode()])
        screen.live(1, M0, piece)
        if is_whole:
            alone.write(piece)
            block = [f"[0] {row}" for row in alone.text if row][-2:]
            assert [row for row in glass.text if row][-len(block) :] == block, "nothing in the block or below it"
    screen.end()
    if not is_whole:
        alone.write(b"".join(frames))
        glass.write(written)
    assert [row[4:] for row in glass.text if row.startswith("[0]")] == [row for row in alone.text if row]
    assert [row for row in glass.text if row and not row.startswith("[0]")] == said
    assert glass.cursor_is_shown


def test_a_line_of_others_that_came_before_the_block_was_known_is_put_above_it() -> None:
    paper, glass = Paper(is_terminal=True), Glass()
    paper.screen.live(1, M0, b"log\nepoch 1\nstep 1")
    paper.screen.lines(M1, [b"hello"])
    glass.write(paper.data)
    assert glass.text == ["[0] log", "[0] epoch 1", "[1] hello", "[0] step 1"], (
        "nobody knows yet that two rows are alive"
    )
    paper.data = b""
    paper.screen.live(1, M0, b"\r\x1b[2K\x1b[1A\x1b[2Kepoch 1\nstep 2")
    paper.screen.lines(M1, [b"again"])
    glass.write(paper.data)
    assert glass.text == ["[0] log", "[1] hello", "[1] again", "[0] epoch 1", "[0] step 2"]


def test_the_lines_of_a_read_are_one_write() -> None:
    for is_terminal in (True, False):
        writes: list[bytes] = []
        screen = Screen(writes.append, is_terminal)
        screen.lines(M1, [b"a", b"b", b"c"])
        assert writes == [b"[1] a\n[1] b\n[1] c\n"]


def test_what_was_drawn_over_by_going_up_is_told() -> None:
    lines = Lines(moves=True)
    assert lines.feed(b"one\ntwo\r\x1b[2K\x1b[1A\x1b[2Kone again\n") == [b"one", b"\x1b[2K\x1b[1A\x1b[2Kone again"]
    assert lines.feed(b"inner\x1b[A\router\n") == [b"\x1b[1Aouter"]
    assert rows_up(b"\x1b[2K\x1b[1A\x1b[2Kone") == 1 and rows_up(b"\x1b[A\x1b[3A") == 4 and rows_up(b"A") == 0
    assert without_escapes(b"\x1b[1;31mKey\x1b[0mError \x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\") == b"KeyError link"


def test_numbers_that_are_no_numbers_are_drawn() -> None:
    many = b"\x1b[" + b"9" * 5000
    assert rows_up(many + b"A") > 1000
    paper = Paper(is_terminal=True)
    paper.screen.live(1, M0, b"one\n" + many + b"A" + many + b"B" + many + b"C" + many + b"Gtwo\n")
    paper.screen.lines(M1, [b"three"])
    assert b"two" in paper.data and b"[1] three\n" in paper.data


SOUP = [b"~word>", b" ", b"\r", b"\n", b"\x1b", b"\x1b[", b"A", b"\xff", b"\x1b7", b"\x1b]8;;u\x1b\\"]
SOUP += [b"\x1b[" + end for end in b"A 3F 2K K J 2J H 31m 0m 5G G 2C ?25l ?1049h ?1049l".split()]


@pytest.mark.parametrize("is_terminal", [True, False])
@examples(200)
@given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.lists(st.sampled_from(SOUP), max_size=6)), max_size=12))
def test_whatever_is_written_no_line_of_others_is_lost(
    is_terminal: bool, writes: list[tuple[int, list[bytes]]]
) -> None:
    paper = Paper(is_terminal)
    for number, (owner, pieces) in enumerate(writes):
        if owner:
            paper.screen.live(owner, M0, b"".join(pieces))
        else:
            paper.screen.lines(M1, [b"<%d>" % number])
    paper.screen.end()
    for number, (owner, _) in enumerate(writes):
        assert owner or b"[1] <%d>\n" % number in paper.data
    shown = paper.data.replace(M0, b"")
    assert shown.count(b"word>") >= sum(pieces.count(b"~word>") for owner, pieces in writes if owner)


def test_lines_that_wait_for_the_whole_screen_are_bounded() -> None:
    paper = Paper(is_terminal=True)
    paper.screen.live(1, M0, b"\x1b[?1049h")
    for number in range(1000):
        paper.screen.lines(M1, [b"%d" % number + b"x" * 9990] * 10)
    paper.screen.live(1, M0, b"\x1b[?1049l")
    assert len(paper.data) < 5_000_000 and paper.data.endswith(b"999" + b"x" * 9990 + b"\n")
    left_out = int(paper.data.partition(b"guozhuang run: ")[2].split()[0])
    assert left_out + paper.data.count(b"[1] ") == 10_000
