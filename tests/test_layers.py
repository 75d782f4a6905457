"""The floor table of the design, held as an import test; and the rules that all files of the package keep.

A test tells all offenders at once. What breaks a rule still stands in ``REMAINING``: its numbers go down, never up.
"""

from __future__ import annotations

import ast
import collections
import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import guozhuang
from tests import mutate

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "guozhuang"

# From the ground up. A file imports from floors below its own, and from its own package. Where one part of a floor of the
# design stands on another part of it, they are two rows here.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "units", "generators", "watch.processes"),
    ("timeline", "records", "registry", "net"),
    ("cost",),
    ("watch",),
    ("world", "data"),
    ("groups", "gradients.buckets", "weights.flat"),
    ("exchange", "sync_batch_norm"),
    ("gradients", "weights"),
    ("parallel",),
    ("optim",),  # an optimizer may bring its exchange, and needs norms of whole parameters
    ("distributed", "data_parallel", "sharding"),
    ("checkpoint",),
    ("strategies",),
    ("workloads", "script"),
    ("launch",),
    ("lab", "check"),  # start ranks as `guozhuang run` does
    ("compat",),
    ("public", "comparison"),  # adds to torch and to the table of strategies what lies above them
    ("cli",),  # tells the launcher what compat adds to a run
    ("__init__", "__main__"),  # nothing stands on these
)
FLOOR_OF = {part: number for number, parts in enumerate(FLOORS) for part in parts}

FORBIDDEN_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "tools"}
MAX_LINES = 430  # of a file: "about 400"
MAX_FILES, MAX_FILES_OF_A_PREFIX = 15, 2  # of a folder
ONE_FILE_PER_METHOD = {"exchange", "exchange/codecs"}
# What is started, read or named in certain folders only: a second user of a mechanism calls the first one's.
STANDS_ONLY_IN = {
    "threading.Thread(": (r"threading\.Thread\(", {"net", "watch", "groups", "launch"}),
    "/proc/": (r"/proc/", {"watch"}),
    "TCPStore(": (r"TCPStore\(", {"net"}),
    "Horovod": (r"(?i)horovod", {"compat"}),
    "BytePS, Bagua": (r"(?i)\bbyteps\b|\bbagua\b", {"compat", "exchange", "optim"}),
}
REMAINING: dict[str, dict[str, int]] = {
    "threading.Thread(": {"compat": 1, "gradients": 2},
    "compat": {"compat": 32},
}
READS_ENVIRONMENT = {"world", "launch", "compat"}  # scripts of another library have variables of their own
FOLLOWS_OTHERS = {"compat"}  # names of modules and errors are those that scripts of another library expect
FILES = sorted(PACKAGE.rglob("*.py"))
TEXTS = {path: path.read_text() for path in FILES}


def module_of(path: Path) -> str:
    """ "buckets", "exchange.base", "exchange" for its __init__, "__init__" for the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)


MODULES = {module_of(path): path for path in FILES}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The syntax of each file of the package."""
    gc.disable()  # all nodes stay: collections would go through them again and again
    try:
        return {path: ast.parse(text) for path, text in TEXTS.items()}
    finally:
        gc.enable()


def imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports, also those inside functions, but those for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for branch in node.orelse:
                yield from imports(branch)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.expr):
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
    for node in imports(trees()[path] if path in trees() else ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {resolve(a.name.partition(".")[2]) for a in node.names if a.name.split(".")[0] == "guozhuang"}
            continue
        base = here[: len(here) - node.level] if node.level else ()
        full = (*base, *(node.module.split(".") if node.module else ()))
        if full and full[0] == "guozhuang":
            found |= {resolve(".".join((*full[1:], alias.name))) for alias in node.names}
    return found - {module_of(path)}


@functools.cache
def graph() -> dict[str, set[str]]:
    """The modules that each module imports. Not made on import: every worker of the tests imports this file."""
    return {name: imported_modules(path) for name, path in MODULES.items()}


def part(module: str) -> str:
    """What of a module stands in the table: itself, or the folder it lies in."""
    return module if module in FLOOR_OF else module.split(".")[0]


def test_the_graph_sees_imports_of_every_form(tmp_path: Path) -> None:
    assert {"errors", "world.identity"} <= graph()["world.torchrun"]  # absolute
    assert "world" in graph()["public"]  # relative
    assert "lab.compare" in graph()["cli"]  # inside a function
    assert "compat" in graph()["cli"]  # from guozhuang import compat


def test_the_readme_shows_the_floors() -> None:
    table = (ROOT / "README.md").read_text().partition("from the ground up")[2].split("```")[1]
    shown = [tuple(line.split()[1:]) for line in table.strip().splitlines()]
    there = {each for module in MODULES for each in (module, module.split(".")[0])}
    assert shown == [tuple(each for each in parts if each in there) for parts in FLOORS[:-1]]


def test_every_file_has_a_floor() -> None:
    assert {part(m) for m in MODULES} <= FLOOR_OF.keys(), "assign the new file to a floor, the lowest it can stand on"


def folder_of(path: Path) -> str:
    return path.parent.relative_to(PACKAGE).as_posix()


def more_than_remains(rule: str, found: list[str]) -> list[str]:
    """Those offenders ("folder: what") of a rule that stand in folders with more of them than remain there."""
    allowed = REMAINING.get(rule, {})
    counts = collections.Counter(offender.partition(":")[0] for offender in found)
    return [offender for offender in found if counts[where := offender.partition(":")[0]] > allowed.get(where, 0)]


def test_imports_go_down() -> None:
    wrong = [
        f"{module} (floor {FLOOR_OF[part(module)]}) imports {other} (floor {FLOOR_OF[part(other)]})"
        for module in sorted(graph())
        for other in sorted(graph()[module])
        if part(other) != part(module) and FLOOR_OF[part(other)] >= FLOOR_OF[part(module)]
    ]
    assert not wrong


def test_there_is_no_cycle() -> None:
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(graph()[module]):
                walk(other, (*path, module))
            done.add(module)

    for module in sorted(graph()):
        walk(module, ())


def test_the_reducer_knows_no_method() -> None:
    files = [m for m in graph() if part(m) == "gradients" and not m.startswith("gradients.named")]
    known = {other for module in files for other in graph()[module] if part(other) == "exchange"}
    # Sparse gradients have one way only, which is no exchange to choose; NaN is looked for whatever the exchange.
    assert known <= {"exchange.base", "exchange.sparse", "exchange.nan_watch"}


def test_files_are_short_and_folders_small_and_names_say_something() -> None:
    long = [f"{folder_of(path)}: {path.name} has {text.count(chr(10))} lines" for path, text in TEXTS.items()]
    assert not more_than_remains("lines", [each for each in long if int(each.split()[-2]) > MAX_LINES])
    in_folders = collections.defaultdict(list)
    for path in FILES:
        if path.name != "__init__.py":
            in_folders[folder_of(path)].append(path.stem)
        if part(module_of(path)) not in FOLLOWS_OTHERS:
            assert not FORBIDDEN_NAMES & set(path.relative_to(PACKAGE).with_suffix("").parts)
    many = [f"{where}: {n}" for where, names in in_folders.items() for n in names[MAX_FILES:]]
    assert not more_than_remains("files", [each for each in many if each.partition(":")[0] not in ONE_FILE_PER_METHOD])
    prefixes = {where: [n.split("_")[0] for n in names if "_" in n] for where, names in in_folders.items()}
    families = [
        f"{where}: {prefix}_*" for where, all_of in prefixes.items() for prefix, n in collections.Counter(all_of).items()
        if n > MAX_FILES_OF_A_PREFIX
    ]  # fmt: skip
    assert not more_than_remains("prefixes", families), "a folder would say it"


def test_a_class_name_means_one_thing() -> None:
    where = collections.defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(module_of(path))
    twice = [f"guozhuang: {name} in {', '.join(modules)}" for name, modules in where.items() if len(modules) > 1]
    assert not more_than_remains("classes", twice)


def test_a_mechanism_stands_in_its_folder() -> None:
    for rule, (pattern, folders) in STANDS_ONLY_IN.items():
        parts = {path: path.relative_to(PACKAGE).parts for path in FILES}
        found = [
            f"{parts[path][0]}: {'/'.join(parts[path][1:])}"
            for path, text in TEXTS.items()
            if parts[path][0] not in folders and re.search(pattern, text)
        ]
        assert not more_than_remains(rule, found), f"{rule} stands in {', '.join(sorted(folders))} only"


def test_layers_for_other_systems_stand_on_the_public_surface() -> None:
    internal = {
        other for module in graph() if part(module) == "compat" for other in graph()[module] if part(other) != "compat"
    }
    # The packages whose names the package itself offers, the optimizers, and the methods of exchange, taken one by one.
    public = {"__init__", "public", "optim", *graph()["public"], *guozhuang._LATER.values()}
    public |= {module for module in MODULES if part(module) == "exchange"}
    found = [f"compat: {other}" for other in sorted(internal - public)]
    assert not more_than_remains("compat", found)


def test_the_environment_is_read_in_its_folders() -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = [
        f"{module_of(path)}: line {node.lineno}: {ast.unparse(node)}"
        for path, tree in trees().items()
        if part(module_of(path)) not in READS_ENVIRONMENT
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os")
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names})
    ]
    assert not found, f"environment variables are read in {', '.join(sorted(READS_ENVIRONMENT))} only"


def test_each_planted_fault_has_its_place() -> None:
    faults = mutate.faults()
    assert [int(number) for number, *_ in faults] == list(range(1, 53))
    for _, _, file, tests, diff in faults:
        mutate.planted((ROOT / file).read_text(), diff)
        for test in tests.split(" "):
            assert (ROOT / test.partition("::")[0]).is_file(), test


def test_nothing_is_left_undone() -> None:
    found = [
        f"{module_of(path)}: {word}"
        for path, text in TEXTS.items()
        for word in ("TODO", "FIXME", "XXX")
        if word in text
    ]
    for path, tree in trees().items():
        if part(module_of(path)) not in FOLLOWS_OTHERS:
            raised = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Raise) and n.exc is not None]
            found += [f"{module_of(path)}: {line}" for line in raised if "NotImplementedError" in line]
    assert not found, "raise a UsageError, or make it abstract"


def file_named(words: str, path: Path) -> str:
    """The file, or its end, that a reference in ``path`` names: "rounds.py", "``net.client``" or "the package"."""
    if words == "the package":
        return f"{path.parent.name}/__init__.py"
    name = words.strip("`.")
    return name if name.endswith((".py", ".c", ".h")) else name.replace(".", "/") + ".py"


def test_every_note_stands_in_the_file_that_a_reference_names() -> None:
    """A note begins a line. A file refers to its own notes, or says at least once "[Note: title] in FILE"."""
    texts = {path: path.read_text() for path in PACKAGE.rglob("*") if path.suffix in {".py", ".c", ".h"}}
    begins = re.compile(r'^[\s#*/"]*\[Note: ([^\]\n]+)\](?:$| (?!in ))', re.MULTILINE)
    refers = re.compile(r"\[Note: ([^\]]+)\](?: in (the package|[`\w./]+))?")
    notes = {path: set(begins.findall(text)) for path, text in texts.items()}
    wrong, num = [], 0
    for path, text in texts.items():
        named: dict[str, set[str]] = {}
        for title, words in refers.findall(re.sub(r"\s*\n[\s#*]*", " ", text)):
            named.setdefault(title, set()).update({file_named(words, path)} if words else ())
            num += 1
        for title, files in named.items():
            there = [each.as_posix() for each in texts if title in notes[each]]
            lost = [file for file in files if not any(each.endswith(f"/{file}") for each in there)]
            if lost or not (files or title in notes[path]):
                wrong.append(f"{path.relative_to(ROOT)}: [Note: {title}] in {', '.join(lost) or 'this file'}")
    assert num > 200 and not wrong
