"""How many cores a process may use, from control groups of both versions, made up in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from guozhuang.world import cores


def quota(root: Path, own: str, files: dict[str, str]) -> float | None:
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "own").write_text(own)
    return cores.quota_cores(str(root / "cgroup"), str(root / "own"))


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
    assert quota(tmp_path, own, files) == found


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cores.quota_cores(str(tmp_path / "nothing"), str(tmp_path / "nowhere")) is None
    assert 1 <= cores.usable_cores() <= cores.num_cores()
