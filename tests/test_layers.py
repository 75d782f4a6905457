"""The floor table of the design, held as an import test; and the few rules that every file of the package keeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "guozhuang"

# From the ground up. A file imports from floors below its own, and from its own package. Where one part of a floor of the
# design stands on another part of it, they are two rows here.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "units"),
    ("timeline", "records", "net", "watch"),
    ("world", "data"),
    ("groups", "gradients.buckets", "weights.flat"),
    ("exchange", "sync_batch_norm"),
    ("gradients", "weights", "optim"),  # an optimizer may bring its exchange
    ("distributed", "data_parallel", "sharding", "parallel"),
    ("strategies", "checkpoint"),
    ("workloads",),
    ("lab",),
    ("launch",),
    ("check",),  # starts ranks as `guozhuang run` does
    ("cli", "compat"),
    ("__init__", "__main__"),  # nothing stands on these
)
FLOOR_OF = {part: number for number, parts in enumerate(FLOORS) for part in parts}

FORBIDDEN_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "tools"}
MAX_LINES = 430  # "about 400"
READS_ENVIRONMENT = {"world", "launch", "compat"}  # scripts of another library have variables of their own
FOLLOWS_OTHERS = {"compat"}  # names of modules and errors are those that scripts of another library expect
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def module_of(path: Path) -> str:
    """ "buckets", "exchange.base", "exchange" for its __init__, "__init__" for the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)


MODULES = {module_of(path): path for path in FILES}


def imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports, also those inside functions, but those for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for branch in node.orelse:
                yield from imports(branch)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        else:
            yield from imports(node)


def resolve(name: str) -> str:
    """The module of the package that a dotted name (without "guozhuang.") leads to: the longest that exists."""
    parts = name.split(".")
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts) or "__init__"


def imported_modules(path: Path) -> set[str]:
    found = set()
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in imports(TREES[path] if path in TREES else ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {resolve(a.name.partition(".")[2]) for a in node.names if a.name.split(".")[0] == "guozhuang"}
            continue
        base = here[: len(here) - node.level] if node.level else ()
        full = (*base, *(node.module.split(".") if node.module else ()))
        if full and full[0] == "guozhuang":
            found |= {resolve(".".join((*full[1:], alias.name))) for alias in node.names}
    return found - {module_of(path)}


GRAPH = {name: imported_modules(path) for name, path in MODULES.items()}


def part(module: str) -> str:
    """What of a module stands in the table: itself, or the folder it lies in."""
    return module if module in FLOOR_OF else module.split(".")[0]


def test_the_graph_sees_imports_of_every_form(tmp_path: Path) -> None:
    assert {"errors", "world.identity"} <= GRAPH["world.torchrun"]  # absolute
    assert "world" in GRAPH["__init__"]  # relative
    assert "lab.compare" in GRAPH["cli"]  # inside a function
    assert "launch" in GRAPH["cli"]  # from guozhuang import launch


def test_every_file_has_a_floor() -> None:
    assert {part(m) for m in MODULES} <= FLOOR_OF.keys(), "assign the new file to a floor, the lowest it can stand on"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down(module: str) -> None:
    wrong = [
        f"{module} (floor {FLOOR_OF[part(module)]}) imports {other} (floor {FLOOR_OF[part(other)]})"
        for other in sorted(GRAPH[module])
        if part(other) != part(module) and FLOOR_OF[part(other)] >= FLOOR_OF[part(module)]
    ]
    assert not wrong


def test_there_is_no_cycle() -> None:
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(GRAPH[module]):
                walk(other, (*path, module))
            done.add(module)

    for module in sorted(GRAPH):
        walk(module, ())


def test_the_reducer_knows_no_method() -> None:
    files = [m for m in GRAPH if part(m) == "gradients" and not m.startswith("gradients.named")]
    known = {other for module in files for other in GRAPH[module] if part(other) == "exchange"}
    # Sparse gradients have one way only, which is no exchange to choose.
    assert known <= {"exchange.base", "exchange.sparse"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_short_and_its_name_says_something(path: Path) -> None:
    if part(module_of(path)) not in FOLLOWS_OTHERS:
        assert not FORBIDDEN_NAMES & set(path.relative_to(PACKAGE).with_suffix("").parts)
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: a file answers one question"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_environment_is_read_where_it_is_told(path: Path) -> None:
    if part(module_of(path)) in READS_ENVIRONMENT:
        return
    tree = TREES[path]
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os")
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names})
    ]
    assert not found, "environment variables are read in world/, launch/ and compat/ only"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_is_left_undone(path: Path) -> None:
    text = path.read_text()
    assert not [word for word in ("TODO", "FIXME", "XXX") if word in text]
    raised = [ast.unparse(n) for n in ast.walk(TREES[path]) if isinstance(n, ast.Raise) and n.exc is not None]
    if part(module_of(path)) not in FOLLOWS_OTHERS:
        assert not [line for line in raised if "NotImplementedError" in line], "raise a UsageError, or make it abstract"
