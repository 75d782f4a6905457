"""How lines of several ranks are put together, and how progress bars of one stay alive."""

from __future__ import annotations

import pytest

from guozhuang.launch.screen import MAX_LINE, Lines, Screen, mark

M0, M1 = b"[0] ", b"[1] "


class Paper:
    """Collects what a screen writes; ``terminal`` also draws it as a terminal would."""

    def __init__(self, is_terminal: bool) -> None:
        self.data = b""
        self.screen = Screen(self.write, is_terminal)

    def write(self, data: bytes) -> None:
        self.data += data

    def drawn(self) -> list[str]:
        rows, column = [""], 0
        text = self.data.decode()
        index = 0
        while index < len(text):
            if text.startswith("\x1b[K", index):
                rows[-1], index = rows[-1][:column], index + 3
                continue
            char = text[index]
            if char == "\n":
                rows.append("")
                column = 0
            elif char == "\r":
                column = 0
            else:
                rows[-1] = rows[-1][:column] + char + rows[-1][column + 1 :]
                column += 1
            index += 1
        return rows


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


def test_a_live_stream_is_passed_on_as_it_comes() -> None:
    paper = Paper(is_terminal=False)
    paper.screen.live(1, M0, b"load")
    assert paper.data == b"[0] load"
    paper.screen.live(1, M0, b"ing\nnext\n\n")
    assert paper.data == b"[0] loading\n[0] next\n[0] \n"
    paper.screen.live(1, M0, b"a\0b\r\n")
    assert paper.data.endswith(b"[0] a\0b\r\n")


def test_characters_cut_in_two_are_not_mangled() -> None:
    paper = Paper(is_terminal=False)
    for byte in "█é\n".encode():
        paper.screen.live(1, M0, bytes([byte]))
    assert paper.data == "[0] █é\n".encode()


def test_a_progress_bar_updates_in_its_place() -> None:
    paper = Paper(is_terminal=True)
    for percent in (0, 50, 100):
        paper.screen.live(1, M0, b"\r%3d%%" % percent)
    paper.screen.live(1, M0, b"\ndone\n")
    assert paper.drawn() == ["[0] 100%", "[0] done", ""]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_of_others_do_not_break_into_a_bar(is_terminal: bool) -> None:
    paper = Paper(is_terminal)
    paper.screen.live(1, M0, b"\r 50%")
    paper.screen.line(M1, b"hello")
    paper.screen.live(1, M0, b"\r 60%")
    paper.screen.live(2, M0, b"from its other stream\n")
    paper.screen.live(1, M0, b"\r100%\n")
    rows = paper.drawn()
    assert "[1] hello" in rows and "[0] from its other stream" in rows and "[0] 100%" in rows
    if is_terminal:
        assert rows == ["[1] hello", "[0] from its other stream", "[0] 100%", ""], "the bar moved down each time"


def test_a_cursor_that_was_sent_back_is_there_again() -> None:
    paper = Paper(is_terminal=True)
    paper.screen.live(1, M0, b"one\r")
    paper.screen.line(M1, b"hello")
    paper.screen.live(1, M0, b"two\n")
    assert paper.drawn() == ["[1] hello", "[0] two", ""]


def test_an_unfinished_line_is_ended() -> None:
    paper = Paper(is_terminal=True)
    paper.screen.live(1, M0, b"bye")
    paper.screen.end()
    paper.screen.end()
    assert paper.data == b"[0] bye\n"


def test_colours_of_a_line_do_not_run_into_the_next() -> None:
    paper = Paper(is_terminal=True)
    paper.screen.line(M1, b"\x1b[31mred")
    assert paper.data == b"[1] \x1b[31mred\x1b[0m\n"


def test_the_end_of_a_line_that_was_cut_is_no_empty_line() -> None:
    paper = Paper(is_terminal=False)
    paper.screen.live(1, M0, b"one")
    paper.screen.line(M1, b"hello")
    paper.screen.live(1, M0, b"\ntwo\n\n")
    assert paper.data == b"[0] one\n[1] hello\n[0] two\n[0] \n"
