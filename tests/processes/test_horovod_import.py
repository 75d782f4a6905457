"""``import horovod.X``: the same modules by two names, in ranks and in what they start; and the real Horovod before ours."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import pytest

from guozhuang.compat.horovod.common import extension
from tests import launching
from tests.launching import ROOT, guozhuang, write
from tests.waiting import LIMIT_S

EXTRAS = ROOT / "packaging" / "horovod" / "guozhuang_horovod"

# What scripts, and Horovod's own tests, import.
NAMES = (
    "torch torch.mpi_ops torch.functions torch.optimizer torch.compression torch.sync_batch_norm torch.elastic "
    "torch.elastic.sampler torch.elastic.state common common.util common.exceptions common.process_sets common.basics "
    "common.elastic runner runner.launch"
)

SAME = f"""
import importlib, importlib.util, pickle, sys
import horovod
import horovod.torch as hvd
from horovod.torch.mpi_ops import synchronize
import guozhuang.compat.horovod as ours

assert horovod is ours and horovod.__version__ == "0.28.1" and horovod._check_has_gpu() in (False, True)
assert callable(horovod.run) and horovod.run is importlib.import_module("horovod.runner").run
for name in {NAMES!r}.split():
    theirs = importlib.import_module("horovod." + name)
    module = importlib.import_module("guozhuang.compat.horovod." + name)
    assert theirs is module is sys.modules["horovod." + name], name
    assert module.__name__ == module.__spec__.name == "guozhuang.compat.horovod." + name, module.__spec__
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader" and not module.__spec__._initializing
from horovod import torch as again
assert again is hvd and hvd.synchronize is synchronize

# One class by both names, also for whoever reads an old pickle.
assert pickle.loads(pickle.dumps(hvd.HorovodInternalError("x"))).args == ("x",)
old = pickle.dumps(hvd.HorovodInternalError("x"), 0).replace(b"cguozhuang.compat.horovod", b"chorovod")
assert b"chorovod.common" in old and type(pickle.loads(old)) is hvd.HorovodInternalError

for name in ("tensorflow", "tensorflow.keras", "keras", "mxnet", "spark", "ray"):
    try:
        importlib.import_module("horovod." + name)
        raise SystemExit(name + " is there")
    except ImportError as error:
        assert "PyTorch part only" in str(error) and error.name == "horovod." + name.split(".")[0], error
try:
    import horovod.nonsense
    raise SystemExit("nonsense is there")
except ModuleNotFoundError as error:
    assert error.name == "horovod.nonsense", error.name
assert importlib.util.find_spec("horovod.nonsense") is None
assert importlib.util.find_spec("horovod.torch.mpi_ops").origin.endswith("mpi_ops.py")
importlib.reload(sys.modules["horovod.common.exceptions"])
print("the same")
"""


def python(*arguments: str, path: list[Path | str], folder: Path) -> subprocess.CompletedProcess[str]:
    joined = os.pathsep.join(map(str, path))
    return launching.python(*arguments, folder=folder, PYTHONPATH=joined, PYTHONNOUSERSITE="1")


def test_both_names_are_one_module(tmp_path: Path) -> None:
    """On a path that has our folder twice: that of `guozhuang run`, and that of the extra."""
    done = python("-W", "error", "-c", SAME, path=[extension.ON_PATH, EXTRAS, ROOT], folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the same\n", "")


def test_a_module_can_be_run_by_its_other_name(tmp_path: Path) -> None:
    done = python("-m", "horovod.runner.launch", "--version", path=[extension.ON_PATH, ROOT], folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.28.1\n", "")


def test_the_real_horovod_goes_before_ours(tmp_path: Path) -> None:
    """It is a package that is installed somewhere behind ours; nothing of ours is imported then."""
    real = tmp_path / "site" / "horovod"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("__version__ = '0.28.1+real'\n")
    (real / "torch.py").write_text("is_real = True\n")
    (tmp_path / "horovod").mkdir()  # the current folder has one without a module, as a clone's root may
    code = (
        "import sys, horovod, horovod.torch; from horovod import torch; import importlib; "
        "assert torch is horovod.torch and horovod.torch.is_real and 'guozhuang' not in sys.modules; "
        "assert sys.modules['horovod'] is horovod is importlib.import_module('horovod'); "
        "assert horovod.__spec__.origin == horovod.__file__; print(horovod.__version__)"
    )
    for first in (extension.ON_PATH, EXTRAS):
        done = python("-c", code, path=[first, extension.ON_PATH, EXTRAS, real.parent], folder=tmp_path)
        assert (done.returncode, done.stdout) == (0, "0.28.1+real\n"), done.stderr
        assert done.stderr.count("guozhuang: horovod itself is installed") == 1
        assert str(real / "__init__.py") in done.stderr and "pip uninstall horovod" in done.stderr


def _installed(how: str, folder: Path) -> tuple[list[Path], str]:
    """A real Horovod; what stands on the path for it, and code that Python runs when it starts."""
    source = folder / "source" / "horovod"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("__version__ = '0.28.1+real'\n")
    (source / "torch.py").write_text("is_real = True\n")
    if how == "archive":
        with zipfile.ZipFile(folder / "real.egg", "w") as files:
            for path in source.iterdir():
                files.write(path, f"horovod/{path.name}")
        return [folder / "real.egg"], ""
    if how == "sourceless":
        for path in source.iterdir():
            py_compile.compile(str(path), cfile=str(path.with_suffix(".pyc")), doraise=True)
            path.unlink()
        return [source.parent], ""
    where = f"(name, {str(source / '__init__.py')!r}, submodule_search_locations=[{str(source)!r}])"
    code = (
        "import importlib.util, sys, types\n"
        "def find(name, path=None, target=None):\n"
        f"    return importlib.util.spec_from_file_location{where} if name == 'horovod' else None\n"
        "sys.meta_path.append(types.SimpleNamespace(find_spec=find))\n"
    )
    return [], code


@pytest.mark.parametrize("how", ["archive", "sourceless", "edited"])
def test_the_real_horovod_is_seen_wherever_it_is(tmp_path: Path, how: str) -> None:
    path, before = _installed(how, tmp_path)
    code = "import horovod.torch\nassert horovod.torch.is_real\nprint(horovod.__version__)"
    done = python("-c", before + code, path=[extension.ON_PATH, EXTRAS, *path], folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "0.28.1+real\n"), done.stderr
    assert done.stderr.count("guozhuang: horovod itself is installed") == 1


def test_the_redirect_without_guozhuang_says_what_is_missing(tmp_path: Path) -> None:
    code = "try:\n import horovod.torch\nexcept ImportError as e:\n print(e.name, e)"
    done = python("-S", "-c", code, path=[EXTRAS], folder=tmp_path)
    assert done.stdout.startswith("horovod `import horovod` is to find Guozhuang"), done.stderr
    assert "Fix: install Guozhuang" in done.stdout


def test_a_real_horovod_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    real = tmp_path / "site" / "horovod"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("import nowhere\n")
    code = "import sys\ntry:\n import horovod\nexcept ModuleNotFoundError as e:\n print(e, 'horovod' in sys.modules)"
    done = python("-c", code, path=[extension.ON_PATH, real.parent], folder=tmp_path)
    assert done.stdout == "No module named 'nowhere' False\n", done.stderr


IN_RANKS = """
import multiprocessing, os, pickle, sys
import horovod.torch as hvd
from torch.utils.data import DataLoader

class Squares:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        import horovod
        assert "horovod" in sys.modules and horovod.__name__ == "guozhuang.compat.horovod"
        return index * index

def raised(text):
    return hvd.HorovodInternalError(text)

if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(raised, ("from a child",))
        assert type(found) is hvd.HorovodInternalError
    else:
        found = [int(each) for each in DataLoader(Squares(), num_workers=1, multiprocessing_context="forkserver")]
    hvd.init()
    print(hvd.rank(), hvd.size(), found)
"""


@pytest.mark.slow
def test_ranks_and_what_they_start_find_it(tmp_path: Path) -> None:
    """Processes that a rank spawns begin with a new Python, which has the path from its environment alone."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as short:  # a socket's path has 107 bytes at most
        script = write(tmp_path, IN_RANKS)
        done = guozhuang("run", "-np", 2, script, folder=tmp_path, TMPDIR=short)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 2 from a child", "[1] 1 2 [0, 1, 4, 9]"]


def wheel(source: Path) -> Path:
    folder = source.with_name(f"{source.name}-wheels")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "-w", str(folder), str(source)], check=True, timeout=LIMIT_S)
    (found,) = folder.iterdir()
    return found


@pytest.mark.slow
def test_a_wheel_of_ours_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    """The extra of an installation from the tree asks for what lies beside it; that of a wheel that is handed on cannot."""
    source = tmp_path / "source"
    shutil.copytree(EXTRAS.parent, source / "packaging" / "horovod")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "guozhuang").mkdir()
    (source / "guozhuang" / "__init__.py").touch()
    with zipfile.ZipFile(wheel(source)) as files:
        (name,) = [name for name in files.namelist() if name.endswith("METADATA")]
        told = [line for line in files.read(name).decode().splitlines() if line.endswith('extra == "horovod"')]
    assert len(told) == 2 and not any("guozhuang" in line for line in told), told
    told_to_pip = "import setuptools.build_meta as b; b.prepare_metadata_for_build_wheel('.')"
    subprocess.run([sys.executable, "-c", told_to_pip], cwd=source, check=True, timeout=LIMIT_S, capture_output=True)
    metadata = (source / "guozhuang-0.1.0.dist-info" / "METADATA").read_text()
    assert f"guozhuang-horovod @ {source.resolve().as_uri()}/packaging/horovod" in metadata


@pytest.mark.slow
@pytest.mark.parametrize(("root", "module"), [("byteps", "torch"), ("bagua", "torch_api")])
def test_what_the_other_extras_install(tmp_path: Path, root: str, module: str) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    beside = ROOT / "packaging" / root
    shutil.copytree(beside, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    with zipfile.ZipFile(wheel(source)) as files:
        files.extractall(site)
        assert not [name for name in files.namelist() if name.startswith(root)]
    code = (
        f"import site, sys; site.addsitedir({str(site)!r}); at = sys.path.index({str(site)!r}); "
        f"assert sys.path[at - 1] == {str(site / f'guozhuang_{root}')!r}, sys.path; "
        f"sys.path.append({sysconfig.get_path('platlib')!r}); "
        f"import {root}.{module}; assert {root}.{module}.__name__ == 'guozhuang.compat.{root}.{module}'"
    )
    done = python("-S", "-c", code, path=[ROOT], folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_the_extra_installs(tmp_path: Path) -> None:
    """A folder right before site-packages that holds `horovod` alone, and the command; no file that Horovod has too."""
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXTRAS.parent, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    before = sorted(source.rglob("*"))
    with zipfile.ZipFile(wheel(source)) as files:
        files.extractall(site)
        assert not [name for name in files.namelist() if name.startswith("horovod")]
    assert sorted(source.rglob("*")) == before  # in a clone nothing is left behind
    (words,) = site.glob("*.dist-info/entry_points.txt")
    assert "horovodrun = _guozhuang_horovod:horovodrun" in words.read_text()
    # Without site packages of its own, where the extra may be installed; torch comes last.
    code = (
        f"import site, sys; site.addsitedir({str(site)!r}); at = sys.path.index({str(site)!r}); "
        f"assert sys.path[at - 1] == {str(site / 'guozhuang_horovod')!r}, sys.path; "
        f"sys.path.append({sysconfig.get_path('platlib')!r}); "
        "import horovod; assert horovod.__name__ == 'guozhuang.compat.horovod'; "
        "sys.argv = ['horovodrun', '--check-build']; import _guozhuang_horovod; _guozhuang_horovod.horovodrun()"
    )
    done = python("-S", "-c", code, path=[ROOT], folder=tmp_path)
    assert done.returncode == 0 and "[X] PyTorch" in done.stdout, done.stderr
    # Horovod's own command may have been overwritten by ours, which then calls Horovod.
    real = tmp_path / "real" / "horovod" / "runner"
    real.mkdir(parents=True)
    for name, text in (("../__init__.py", ""), ("__init__.py", ""), ("launch.py", "def run_commandline(): return 7")):
        (real / name).write_text(text)
    code = f"import site; site.addsitedir({str(site)!r}); import _guozhuang_horovod; _guozhuang_horovod.horovodrun()"
    assert python("-S", "-c", code, path=[real.parents[1]], folder=tmp_path).returncode == 7
