"""Format reports about lost ranks, hangs and failed collectives as text; ``end`` writes a report and ends the process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from guozhuang.errors import MismatchError, WorldError, explain, rank_table
from guozhuang.units import merged, ranks_text
from guozhuang.watch.judge import Beat, Judge
from guozhuang.watch.stacks import OWN_THREADS, place_of_error

EXIT_CODE = 75
# The time limit of each step of ``end``: the main thread may hold the lock of the log or of stdout for ever.
_SAY_S = 1.0
_log = logging.getLogger("guozhuang")
_MAX_ROWS = 20
_MAX_NAMED = 16


def losses(lost: Mapping[int, str], size: int) -> str:
    """Return one line per lost rank; ranks with equal texts share a line."""
    if not lost:
        return ""
    lines = [f"{ranks_text(ranks)} of {size}: {text}" for ranks, text in merged(lost)]
    noun = "a rank is lost" if len(lost) == 1 else f"{len(lost)} ranks are lost"
    return "\n".join([f"{noun}:", *(f"  {line}" for line in _first(lines))])


def hang(judge: Judge, lost: Mapping[int, str], now_s: float, held_up: str) -> str:
    """Describe a hang: how long it has lasted, and which rank holds up the others (``held_up``, from ``held_up_by``)."""
    idle_s = min(beat.idle_s + judge.age_s(rank, now_s) for rank, beat in judge.live(lost).items())
    text = f"hang: no rank has started a collective for {idle_s:.0f} s (--hang-timeout {judge.hang_timeout_s:g})"
    return f"{text}\n{held_up}"


def trouble(troubled: Mapping[int, str], held_up: str) -> str:
    """Describe exceptions raised by collectives; texts equal up to numbers share a line.

    Args:
        troubled: the text of the exception, by rank.
        held_up: the line of ``held_up_by``; "" where a lost rank or a mismatch explains the exceptions.
    """
    alike = {rank: re.sub(r"\d+", "0", text) for rank, text in troubled.items()}
    lines = [f"a collective failed on {ranks_text(ranks)}: {troubled[ranks[0]]}" for ranks, _ in merged(alike)]
    return "\n".join(filter(None, [*_first(lines), held_up]))


def dead_threads(judge: Judge) -> str:
    """Return one line per rank of which an exception has ended a thread: what it was to do may be what others wait for."""
    dead = {rank: beat.dead_thread for rank, beat in judge.beats().items() if beat.dead_thread}
    return "\n".join(_first([f"{ranks_text(ranks)}: {text}" for ranks, text in merged(dead)]))


def is_mismatch(troubled: Mapping[int, str]) -> bool:
    """Return whether a collective failed because ranks made different calls: its error then names each rank's call.

    What else is known of the ranks could only contradict it: they all failed in one call, at places of their own.
    """
    return any(text.startswith(MismatchError.__name__) for text in troubled.values())


def sentence(error: BaseException, rank: int, lost: Sequence[int]) -> str:
    """Return one sentence for an error of gloo, or one that quotes it: gloo tells a place in C++, and names no rank.

    Args:
        error: the error, as gloo raised it.
        rank: this rank.
        lost: the ranks that are known to be lost.
    """
    why = re.sub(r"\[\S*/gloo/\S*\] ", "", str(error).strip())
    known = f"{ranks_text(lost)} {'is' if len(lost) == 1 else 'are'} lost" if lost else ""
    if isinstance(error, WorldError):  # it says what to do already
        return f"{why} ({known})" if known else why
    what = f"{place_of_error(error).text or 'a collective'} failed: {why}".partition("\n")[0]
    if not lost:
        return explain(what, rank=rank, fix="look for the first error in the output of all ranks")
    return explain(f"{what}; {known}", rank=rank, fix="look whether that node is up, and at the network to it")


def in_a_sentence(error: BaseException, rank: int, lost: Sequence[int]) -> WorldError:
    """Return the error whose text is ``sentence``, to be shown in the place of this one, with what the script was handling."""
    said = WorldError(sentence(error, rank, lost))
    said.__cause__, said.__context__ = error.__cause__, error.__context__
    said.__suppress_context__ = error.__suppress_context__
    for note in getattr(error, "__notes__", ()):
        said.add_note(note)
    return said


def _first(lines: Sequence[str]) -> list[str]:
    """Return these lines; if they are too many, the first ones and a line that counts the rest."""
    more = [f"and {len(lines) - _MAX_NAMED} lines more like these"] if len(lines) > _MAX_NAMED else []
    return [*lines[:_MAX_NAMED], *more]


def held_up_by(judge: Judge, lost: Mapping[int, str], now_s: float) -> str:
    """Return the line that names the ranks for which the others wait; "" if no rank is live."""
    beats, live = judge.beats(), judge.live(lost)
    if not live:
        return ""
    if lost:
        return f"held up by {ranks_text(sorted(lost))}, lost"
    silent = [rank for rank in judge.silent(now_s) if rank in live]
    if silent:
        age_s = max(judge.age_s(rank, now_s) for rank in silent)
        return f"held up by {ranks_text(silent)}: no sign of life for {age_s:.0f} s"
    waiting = {rank: beat for rank, beat in live.items() if beat.waits_in}
    left = [rank for rank, beat in beats.items() if beat.left is not None]
    failed = [rank for rank in left if beats[rank].left]
    if failed:
        return f"held up by {ranks_text(failed)}, which an exception ended"
    if waiting and left:
        return f"held up by {ranks_text(left)}, which left the world while others still wait for a collective"
    started = sorted({beat.collectives for beat in live.values()})
    behind = [rank for rank, beat in live.items() if beat.collectives == started[0]]
    if len(started) > 1:
        return (
            f"held up by {ranks_text(behind)}: {_number(started[0])} of the default group started, others {started[-1]}"
        )
    elsewhere = [rank for rank in live if rank not in waiting]
    if waiting and elsewhere:
        return f"held up by {ranks_text(elsewhere)}: in no collective, while the others wait in one"
    names = sorted({beat.waits_in for beat in waiting.values()})
    if len(names) > 1:
        return f"the ranks wait in different collectives ({', '.join(names)}): one of them skipped a call, or made one more"
    places = {beat.place for beat in live.values()}
    if len(places) > 1:
        return "all ranks started the same number of collectives, but stand at different places"
    return "all ranks stand at the same place: what carries their messages may be broken"


def _number(count: int) -> str:
    return f"{count} collective{'' if count == 1 else 's'}"


def table(judge: Judge, lost: Mapping[int, str], now_s: float) -> str:
    """Return a table of all ranks; ranks in the same state at the same place share a line."""
    rows: dict[tuple[str, int, str], list[int]] = {}
    beats = judge.beats()
    for rank, beat in beats.items():
        rows.setdefault((_state(rank, beat, lost), beat.collectives, _place(beat, rank in lost)), []).append(rank)
    cells = []
    for (state, collectives, place), ranks in rows.items():
        live = [rank for rank in ranks if state in ("waits", "runs", "failing")]
        idle_s = min((beats[r].idle_s + judge.age_s(r, now_s) for r in live), default=None)
        still_s = min((beats[r].still_s + judge.age_s(r, now_s) for r in live), default=None)
        count = f"{collectives} or more" if state == "lost" else collectives  # it may have gone on after its last beat
        cells.append((ranks_text(ranks).partition(" ")[2], state, count, _seconds(idle_s), _seconds(still_s), place))
    heading = ("rank", "state", "collectives", "last started", "stands since", "at")
    text = rank_table(heading, cells[:_MAX_ROWS])
    return text + (f"\n  and {len(cells) - _MAX_ROWS} lines more" if len(cells) > _MAX_ROWS else "")


def _state(rank: int, beat: Beat, lost: Mapping[int, str]) -> str:
    if rank in lost:
        return "lost"
    if beat.left is not None:
        return "failed" if beat.left else "left"
    if beat.trouble:
        return "failing"
    return "waits" if beat.waits_in else "runs"


def _place(beat: Beat, is_lost: bool) -> str:
    if beat.left is not None:
        return beat.left
    return f"last reported: {beat.place}" if is_lost else beat.place


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.0f} s ago"


def stacks(given: Mapping[int, str], missing: Sequence[int]) -> str:
    """Return the stacks that ranks sent (``given``) as one text; equal stacks are shown once, with their ranks."""
    parts = [f"---- {ranks_text(ranks)}:\n{text}" for ranks, text in merged(given)]
    if missing:
        parts.append(f"---- {ranks_text(missing)}: gave no stack")
    return "\n".join(parts)


def last_line(ends: bool, hang_timeout_s: float | None) -> str:
    """Return the last line of a report: whether the ranks are ended now, and if not, what follows."""
    if ends:
        return f"every rank that can read this ends itself with exit code {EXIT_CODE}"
    if hang_timeout_s is None:
        return "nothing is ended because of this: who waits for a lost rank runs into the time-out of the collective"
    return f"nothing is ended because of this yet: who waits for a lost rank is, after {hang_timeout_s:g} s (--hang-timeout)"


def failures(failed: Mapping[int, str]) -> str:
    """Return one line per rank that was ended by an exception."""
    return "\n".join(f"{ranks_text(ranks)} ended with {text}" for ranks, text in merged(failed))


def end(text: str, wait_s: float, hang: str = "", error_file: str = "") -> NoReturn:
    """Write ``text`` once, to the log if one was set up, else to stderr; then end the process with ``EXIT_CODE``.

    Args:
        text: the report.
        hang: the line of ``held_up_by``; "" where the cause is no hang.
        error_file: the file by which torch elastic's agents and ours learn why this rank ended; "" without one.
        wait_s: the process lives for at least so many seconds more, so that other ranks can read the report too.
    """
    until_s = time.monotonic() + wait_s
    # Each step runs in a thread of its own, which is abandoned if it blocks, as on a lock or a full pipe.
    if not _within(_SAY_S, lambda: _log.critical("%s", text) if _log.hasHandlers() else _write(text)):
        _within(_SAY_S, lambda: _write(text))
    _within(_SAY_S, _flush)
    if error_file:
        _within(_SAY_S, lambda: _write_error_file(error_file, text, hang))
    time.sleep(max(until_s - time.monotonic(), 0.0))
    _end_children()
    os._exit(EXIT_CODE)


def _write_error_file(path: str, text: str, hang: str) -> None:
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": text, "timestamp": int(time.time()), "hang": hang}, file)


def _within(limit_s: float, do: Callable[[], None]) -> bool:
    thread = threading.Thread(target=do, name=f"{OWN_THREADS} last words", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends: no thread can start any more
        do()
        return True
    thread.join(limit_s)
    return not thread.is_alive()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _write(text: str) -> None:
    data = (text + "\n").encode(errors="replace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def _end_children() -> None:
    """End worker processes (of a data loader, for example), which ``os._exit`` leaves running."""
    for process in list(getattr(sys.modules.get("multiprocessing.process"), "_children", ())):
        with contextlib.suppress(Exception):
            process.terminate()


def in_words(error: BaseException) -> str:
    """Return an error in one line, cut to what a beat may hold."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
