"""How many cores and how much memory a process may use, from control groups of both versions, made up in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from guozhuang.world import machine


def made_up(root: Path, own: str, files: dict[str, str]) -> tuple[str, str]:
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "own").write_text(own)
    return str(root / "cgroup"), str(root / "own")


@pytest.mark.parametrize(
    ("own", "files", "found"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n", "c/cpu.max": "1 1\n"}, 4.0),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "400000 100000\n"}, 2.0),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ("4:cpu,cpuacct:/x\n0::/\n", {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"}, 3.0),
        ("4:memory:/x\n", {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"}, None),
        ("garbage\n", {"cpu.max": "x y z\n"}, None),
        ("0::/../..\n", {"cpu.max": "100000 0\n"}, None),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, own: str, files: dict[str, str], found: float | None) -> None:
    assert machine.quota_cores(*made_up(tmp_path, own, files)) == found


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert machine.quota_cores(str(tmp_path / "nothing"), str(tmp_path / "nowhere")) is None
    assert 1 <= machine.usable_cores() <= machine.num_cores()


GIB = 1 << 30
V2 = {"memory.max": f"{4 * GIB}", "memory.current": f"{3 * GIB}", "memory.stat": f"anon 5\ninactive_file {GIB}\n"}


def inside(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("own", "files", "found"),
    [
        ("0::/\n", {}, 8 * GIB),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, 8 * GIB),
        ("0::/\n", V2, 2 * GIB),
        ("0::/a/b\n", inside("a", V2), 2 * GIB),
        ("0::/a/b\n", inside("a", V2) | {"a/b/memory.max": f"{GIB}", "a/b/memory.current": "0"}, GIB),
        ("0::/a\n", inside("c", V2), 8 * GIB),
        (
            "4:memory:/x\n1:cpu:/\n",
            {
                "memory/x/memory.limit_in_bytes": f"{2 * GIB}",
                "memory/x/memory.usage_in_bytes": f"{GIB}",
                "memory/x/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n",
            },
            GIB + GIB // 2,
        ),
        (
            "4:memory:/\n",
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5"},
            8 * GIB,
        ),
    ],
)
def test_the_memory_that_is_left(tmp_path: Path, own: str, files: dict[str, str], found: int) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text(f"MemTotal: 1 kB\nMemAvailable:   {8 * GIB >> 10} kB\n")
    assert machine.available_bytes(*made_up(tmp_path, own, files), str(memory)) == found


def test_memory_without_control_groups() -> None:
    assert 0 < machine.available_bytes() < 1 << 62
