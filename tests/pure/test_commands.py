"""The command line before a subcommand begins: help, versions, mistakes and completion, all without importing torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from guozhuang import cli
from guozhuang.launch.options.unimported import definition
from tests.waiting import LIMIT_S

PROGRAM = """
import contextlib, io, json, sys
sys.argv[0] = "guozhuang"
from guozhuang.cli import main
found = []
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    found.append([code, out.getvalue()])
early = sorted({"torch", "numpy", "rich", "matplotlib"} & sys.modules.keys())
import guozhuang  # what a command is carried out with has all that a user's program gets by the import
guozhuang.prepare
from torch.distributed import is_backend_available
print(json.dumps([found, early, is_backend_available("shm")]))
"""
MISTAKES = [
    (["comapre"], 2, "no such command; there are run, check, compare", "Fix: write guozhuang compare"),
    (["frobnicate"], 2, "(got 'frobnicate')", "see guozhuang --help"),
    (["--versoin"], 2, "unrecognized arguments: --versoin. Did you mean --version?", "usage"),
    (["compare", "--stps", "3"], 2, "unrecognized arguments: --stps 3. Did you mean --steps?", "usage"),
    (["compare", "--batchsize=3", "--rang", "1"], 2, "Did you mean --batch-size --ranks?", "usage"),
    (["check", "--jsno"], 2, "Did you mean --json?", "usage"),
    (["run", "--nproc-per-nodes", "2", "x.py"], 2, "Did you mean --nproc-per-node?", "usage"),
    (["compare", "--qqqqqq"], 2, "unrecognized arguments: --qqqqqq\n", "usage"),
]  # fmt: skip


def test_help_versions_and_mistakes_import_no_torch() -> None:
    helps = [["--help"], [], *([name, "--help"] for name in cli.COMMANDS)]
    asked = [*helps, ["--version"], *(words for words, *_ in MISTAKES), ["completion", "bash"], ["completion", "zsh"]]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(asked)], capture_output=True, text=True, timeout=60, check=True
    )
    found, imported, has_backend = json.loads(done.stdout)
    assert imported == [] and has_backend
    said = dict(zip(map(tuple, asked), found, strict=True))
    for words in helps:
        code, text = said[tuple(words)]
        assert code == 0 and "usage: guozhuang" in text and ("--help" in text)
    assert all(f"    {name}" in said[("--help",)][1] for name in cli.COMMANDS)
    code, text = said[("--version",)]
    assert code == 0 and text.split()[0] == "guozhuang" and "torch 2." in text and "Python 3." in text
    for words, code, *parts in MISTAKES:
        assert said[tuple(words)][0] == code
        assert all(part in said[tuple(words)][1] for part in parts), said[tuple(words)][1]
    for shell in ("bash", "zsh"):
        code, text = said["completion", shell]
        assert code == 0 and "--nproc-per-node" in text and "--strategies" in text


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    (tmp_path / "script.py").touch()
    script.write_text(capsys.readouterr().out)
    program = f"source {script}; function=$(complete -p guozhuang | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
    completed = {
        "co": {"compare", "completion"},
        "compare --strat": {"--strategies"},
        "compare --device ''": {"cpu", "cuda"},
        "compare --bad-rows s": {"stop", "skip"},
        "run --strat": {"--strategy"},
        "run sc": {"script.py"},
        "checkpoint list s": {"script.py"},
    }
    for line in completed:
        program += f"COMP_WORDS=(guozhuang {line}); COMP_CWORD={len(line.split())}; COMPREPLY=()\n"
        program += '$function guozhuang "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"; echo "${COMPREPLY[*]}"\n'
    done = subprocess.run(
        ["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert [set(line.split()) for line in done.stdout.splitlines()] == list(completed.values())


def test_completion_without_its_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "zsh"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "needs the package shtab" in said and "-m pip install shtab" in said


def test_the_parser_taken_from_the_source_is_torchruns() -> None:
    taken, imported = definition("torch.distributed.run", "get_args_parser")(), get_args_parser()
    assert [str(vars(a)) for a in taken._actions] == [str(vars(a)) for a in imported._actions] or [
        (a.option_strings, a.dest, a.default, a.choices, a.help, a.nargs) for a in taken._actions
    ] == [(a.option_strings, a.dest, a.default, a.choices, a.help, a.nargs) for a in imported._actions]


def test_definitions_are_followed_through_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "apart"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "one.py").write_text(
        "import os.path\nfrom apart.two import twice as double\nraise RuntimeError('executed')\n"
        "LIMIT = 3\ndef wanted(x):\n    return double(min(x, LIMIT)), os.path.basename('a/b')\n"
    )
    (package / "two.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert definition("apart.one", "wanted")(9) == (6, "b")
    for module, name in (("apart.one", "nothing"), ("apart.three", "x"), ("nowhere.one", "x")):
        with pytest.raises(LookupError):
            definition(module, name)
    assert "apart" not in sys.modules
