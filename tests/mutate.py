"""Plant each fault of tests/mutations.md in a copy of the tree and run its test, which has to fail: ``make mutations``.

``python tests/mutate.py 3 7`` plants those two only. Ends with 1 when a fault was not caught.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAULT = re.compile(r"## (\d+)\. ([^\n]*)\n`([^`]*)` by `([^`]*)`\n```diff\n(.*?)```", re.S)


def faults() -> list[tuple[str, str, str, str, str]]:
    """The number, the title, the file, the tests and the diff of each fault."""
    return FAULT.findall((ROOT / "tests" / "mutations.md").read_text())


def planted(text: str, diff: str) -> str:
    """The text with the lines "-" of the diff replaced by its lines "+"."""
    old, new = ("".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] == sign) for sign in "-+")
    assert text.count(old) == 1, f"{old!r} stands there {text.count(old)} times, not once"
    return text.replace(old, new)


def is_caught(tree: Path, file: str, tests: str, diff: str) -> bool:
    path = tree / file
    sound = path.read_text()
    path.write_text(planted(sound, diff))
    try:
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run([*pytest, *tests.split(" ")], cwd=tree, capture_output=True, text=True)
    finally:
        path.write_text(sound)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 4: there is no such test
    return done.returncode == 1


def main(wanted: list[str]) -> int:
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache"))
        for number, title, file, tests, diff in faults():
            if not wanted or number in wanted:
                caught = is_caught(tree, file, tests, diff)
                print(f"{number:>2} {'caught' if caught else 'MISSED'}  {title}", flush=True)
                missed += [] if caught else [number]
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
