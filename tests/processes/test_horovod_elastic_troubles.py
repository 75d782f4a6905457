"""Elastic drivers in trouble: a reader that takes nothing, a second signal."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.processes.test_horovod_elastic_run import driver, of_folder, settings

pytestmark = pytest.mark.timeout(120)


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    ignores = ("/bin/sh", "-c", f"trap '' TERM; echo {tmp_path}; while :; do sleep 0.1; done")
    wanted = settings(tmp_path, "127.0.0.1:1\n127.0.0.2:1\n", *ignores)
    hangs = f"cat {tmp_path}/hosts; if test -e {tmp_path}/hangs; then tail -f {tmp_path}/hangs; fi"
    with driver(tmp_path, replace(wanted, host_discovery_script=hangs)) as running:
        running.until(lambda: running.printed.count(f"{tmp_path}\n") == 2)
        (tmp_path / "hangs").touch()
        running.until(lambda: any("tail" in each for each in of_folder(tmp_path)))
        os.kill(running.process.pid, signal.SIGINT)
        running.until(lambda: "got SIGINT" in running.printed)
        time.sleep(0.3)
        assert running.process.is_alive(), "the workers have a grace"
        began = time.monotonic()
        os.kill(running.process.pid, signal.SIGINT)
        assert running.wait() == 128 + signal.SIGINT and time.monotonic() < began + 4
        assert "Traceback" not in running.printed


def test_a_reader_that_takes_nothing_holds_up_the_workers_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "unread")
    reader = os.open(tmp_path / "unread", os.O_RDONLY | os.O_NONBLOCK)
    prints = ("/bin/sh", "-c", f"touch {tmp_path}/$HOROVOD_HOSTNAME; yes {tmp_path}")
    try:
        with driver(tmp_path, settings(tmp_path, "127.0.0.1:1\n127.0.0.2:1\n", *prints), "unread") as running:
            running.until(lambda: (tmp_path / "127.0.0.2").exists())
            time.sleep(1.0)
            memory = psutil.Process(running.process.pid).memory_info().rss
            (tmp_path / "hosts").write_text("127.0.0.1:1\n127.0.0.2:1\n127.0.0.3:1\n")
            running.until(lambda: (tmp_path / "127.0.0.3").exists())  # the driver goes on all the same
            time.sleep(0.5)
            assert psutil.Process(running.process.pid).memory_info().rss < memory + (32 << 20)
            began = time.monotonic()
            running.process.terminate()
            assert running.wait() == 128 + signal.SIGTERM and time.monotonic() < began + 10
    finally:
        os.close(reader)
