"""One file knows what differs between versions of PyTorch; a version that is too old says so at the import."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from guozhuang.groups import backend
from guozhuang.groups.base import PythonGroup
from guozhuang.groups.hierarchical.process_group import HierarchicalGroup
from guozhuang.groups.round_robin import RoundRobinGroup
from guozhuang.groups.shared_memory import SharedMemoryGroup
from guozhuang.launch.options import torchrun
from guozhuang.world import versions
from guozhuang.world.versions import OLDEST, RENAMED, require

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git123", "2.13.0+cpu", "3.0", "10.1"])
def test_new_enough(version: str) -> None:
    require("gz.thing", (2, 11), version)


@pytest.mark.parametrize("version", ["2.10.1+cu128", "1.13.1", "2.9", "unknown", ""])
def test_too_old(version: str) -> None:
    with pytest.raises(ImportError) as caught:
        require("gz.thing", (2, 11), version)
    assert "gz.thing needs PyTorch 2.11 or later" in str(caught.value)
    assert repr(version) in str(caught.value)
    assert "pip install" in str(caught.value)


@pytest.mark.parametrize(
    ("version", "says"),
    [("2.13.0", False), ("2.15.0", False), ("2.15.2+cu132", False), ("2.16.0a0", True), ("3.0", True), ("10.1", True)],
)
def test_a_version_newer_than_any_tried(version: str, says: bool) -> None:
    text = versions.newer_than_tried(version)
    assert bool(text) == says
    assert not says or ("2.11 to 2.15" in text and version in text)


OLD_AND_WITHOUT = """
import importlib, sys, types
import torch

def attempt():
    try:
        importlib.import_module("guozhuang")
    except ImportError as error:
        print(error)
    for name in [name for name in sys.modules if name.split(".")[0] == "guozhuang"]:
        del sys.modules[name]

version, torch.__version__ = torch.__version__, "2.4.1"
attempt()
torch.__version__ = version
for name in [name for name in sys.modules if name.startswith("torch.distributed")]:
    del sys.modules[name]
sys.modules["torch.distributed"] = torch.distributed = types.ModuleType("torch.distributed")  # as builds without it have it
torch.distributed.is_available = lambda: False
attempt()
"""


def test_importing_the_package_says_first_that_pytorch_is_too_old_or_lacks_torch_distributed() -> None:
    command = [sys.executable, "-c", OLD_AND_WITHOUT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    old, without = done.stdout.splitlines()
    assert old.startswith("guozhuang.world needs PyTorch 2.11 or later (got '2.4.1')"), done.stderr
    assert without.startswith("guozhuang.world needs torch.distributed, which this build of PyTorch"), done.stderr


def test_what_is_declared_is_what_is_checked() -> None:
    wanted = ".".join(map(str, OLDEST))
    assert f'"torch>={wanted}"' in (ROOT / "pyproject.toml").read_text()


def test_pytorch_finds_the_backend_by_its_entry_point() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    entry = EntryPoint("shm", groups["torch.distributed.backends"]["shm"], "torch.distributed.backends")
    assert entry.load() is backend.register


def test_a_group_answers_to_the_names_of_older_versions() -> None:
    class Group(PythonGroup):
        def all_gather_single(self) -> str:
            return "gathered"

        def reduce_scatter_single(self) -> str:
            return "scattered"

        def _reduce_scatter_base(self) -> str:
            return "a way of its own"

    group = Group(0, 1, "made up")
    assert group._allgather_base() == "gathered"
    assert group._reduce_scatter_base() == "a way of its own"
    assert "alltoall_base" not in vars(Group)


@pytest.mark.parametrize("kind", [SharedMemoryGroup, HierarchicalGroup, RoundRobinGroup])
def test_the_groups_have_both_names_of_every_renamed_method(kind: type) -> None:
    for name, older in RENAMED.items():
        assert getattr(kind, older) is getattr(kind, name), older


def test_a_method_is_asked_for_by_the_name_this_version_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        _allgather_base = alltoall_base = allreduce = None

    monkeypatch.setattr(versions.dist, "ProcessGroup", Older)
    assert [versions.name_of(name) for name in ("all_gather_single", "all_to_all_single", "allreduce")] == [
        "_allgather_base",
        "alltoall_base",
        "allreduce",
    ]


def test_a_setting_that_only_later_versions_know_is_none() -> None:
    made = SimpleNamespace(role="worker")
    assert versions.field(made, "role") == "worker"
    assert versions.field(made, "virtual_local_rank") is None


def test_no_flight_recorder_is_attached_to_a_group_written_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    attached: list[tuple[object, ...]] = []
    c10d = versions.dist.distributed_c10d
    monkeypatch.setattr(c10d, "_maybe_attach_flight_recorder", lambda *told: attached.append(told), raising=False)
    versions.attach_no_flight_recorder(PythonGroup)
    for group in (PythonGroup(0, 1, "made up"), "a group of PyTorch's"):
        c10d._maybe_attach_flight_recorder(group, "shm", [0])
    assert attached == [("a group of PyTorch's", "shm", [0])]


def test_every_version_has_the_options_and_defaults_of_guozhuang_run() -> None:
    found = torchrun.parser({}).parse_args(["--shutdown-timeout", "3", "train.py"])
    assert (found.shutdown_timeout, found.master_port) == (3, None)
