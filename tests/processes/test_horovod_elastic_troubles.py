"""Elastic drivers in trouble: a reader that takes nothing, a second signal."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil

from tests.processes.test_horovod_elastic_run import driver, of_folder, settings
from tests.waiting import NEVER_S


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    script = f"trap 'echo heard {tmp_path}' TERM; echo began {tmp_path}; while :; do sleep 0.1; done"
    ignores = ("/bin/sh", "-c", script)
    wanted = settings(tmp_path, "127.0.0.1:1\n127.0.0.2:1\n", *ignores)
    hangs = f"cat {tmp_path}/hosts; if test -e {tmp_path}/hangs; then tail -f {tmp_path}/hangs; fi"
    with driver(tmp_path, replace(wanted, host_discovery_script=hangs), grace_s=NEVER_S) as running:
        running.until(lambda: running.printed.count(f"began {tmp_path}\n") == 2)
        (tmp_path / "hangs").touch()
        running.until(lambda: any("tail" in each for each in of_folder(tmp_path)))
        os.kill(running.process.pid, signal.SIGINT)
        # The workers have a grace, and the driver stays with them.
        running.until(lambda: "got SIGINT" in running.printed and running.printed.count(f"heard {tmp_path}\n") == 2)
        os.kill(running.process.pid, signal.SIGINT)
        assert running.wait() == 128 + signal.SIGINT
        assert "Traceback" not in running.printed


def test_a_reader_that_takes_nothing_holds_up_the_workers_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "unread")
    reader = os.open(tmp_path / "unread", os.O_RDONLY | os.O_NONBLOCK)

    def are_stuck(number: int) -> bool:
        """Whether so many workers print, and all of them wait in that."""
        found = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["yes", str(tmp_path)]]
        return [each.status() for each in found] == [psutil.STATUS_SLEEPING] * number

    prints = ("/bin/sh", "-c", f"touch {tmp_path}/$HOROVOD_HOSTNAME; yes {tmp_path}")
    try:
        with driver(tmp_path, settings(tmp_path, "127.0.0.1:1\n127.0.0.2:1\n", *prints), "unread") as running:
            running.until(lambda: (tmp_path / "127.0.0.2").exists() and are_stuck(2))
            memory = psutil.Process(running.process.pid).memory_info().rss
            (tmp_path / "hosts").write_text("127.0.0.1:1\n127.0.0.2:1\n127.0.0.3:1\n")
            # The driver goes on all the same.
            running.until(lambda: (tmp_path / "127.0.0.3").exists() and are_stuck(3))
            assert psutil.Process(running.process.pid).memory_info().rss < memory + (32 << 20)
            running.process.terminate()
            assert running.wait() == 128 + signal.SIGTERM
    finally:
        os.close(reader)
