"""No test depends on how fast the machine is: what tests may not do with time, found in their syntax trees.

Three rules, also for the scripts that stand in tests as strings:

- **sleep**: nobody sleeps to let something happen. Two kinds of sleep let nothing happen, and pass: one in a ``while`` loop,
  which asks again and again for an event; and one of a minute or more, of a process that stays until somebody ends it.
- **limit**: a limit of less than a minute is reached on a slow machine. Limits are ``LIMIT_S`` of tests/waiting.py. A time-out
  of the code under test is ``NEVER_S`` where it must not be waited for, and ``EXPIRES_S`` where it is to be reached.
- **clock**: no assertion says how long something took. What must not wait for a time-out is given one that never ends.

What has to break a rule stands in ``ALLOWED``, with its reason. What still breaks one, and need not, is counted in
``REMAINING``: its numbers go down, never up.
"""

from __future__ import annotations

import ast
import collections
import gc
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LEAST_LIMIT_S = 60.0

# (file, function, rule): why. A script that is a string has the name of the function, or the constant, that it stands in.
ALLOWED: dict[tuple[str, str, str], str] = {
    ("ranks.py", "_wait", "sleep"): "after a hang was found: the handlers of the ranks write their stacks",
    ("processes/test_slow_rank.py", "late", "sleep"): "a rank is late by ten times what a step takes in the same run",
    (
        "processes/test_heartbeat.py",
        "_stop_all_for",
        "sleep",
    ): "all ranks are stopped that long, however fast the machine is",
    ("conftest.py", "_settles", "limit"): "how often garbage is collected while something is waited for",
    ("pytorch_own/run.py", "sleep", "sleep"): "how often PyTorch's own tests poll",
}

REMAINING: dict[str, int] = {}

# Names of arguments and constants that limit a wait.
_LIMITS = ("timeout", "time_out", "limit_s", "patience", "wait_s", "deadline")
# Calls whose first argument is a limit, or whose second one is.
_FIRST = {"join", "wait", "result", "communicate", "left", "exception", "settimeout"}
_SECOND = {"until", "remaining", "wait_for"}
_UNITS = {
    "days": 86_400.0,
    "hours": 3600.0,
    "minutes": 60.0,
    "seconds": 1.0,
    "milliseconds": 1e-3,
    "microseconds": 1e-6,
}
_CLOCKS = {"monotonic", "perf_counter", "monotonic_ns", "perf_counter_ns", "time", "time_ns"}


def offences(path: str, text: str) -> list[tuple[str, str, str, int, str]]:
    """(file, function, rule, line, code) of each place that breaks a rule."""
    return [(path, *row) for row in _in_tree(ast.parse(text), "", 0)]


def _in_tree(tree: ast.Module, within: str, first_line: int) -> Iterator[tuple[str, str, int, str]]:
    times = _names_of_times(tree)  # of the whole file: ranks return them, tests compare them
    for node, function, is_polled in _walk(tree, within, False):
        for rule, at in _broken(node, is_polled, *times):
            yield function, rule, first_line + at.lineno, ast.unparse(at)[:100]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            script = _script(node.value)
            if script is not None:
                yield from _in_tree(script, function, first_line + node.lineno - 1)


def _walk(node: ast.AST, function: str, is_polled: bool) -> Iterator[tuple[ast.AST, str, bool]]:
    for child in ast.iter_child_nodes(node):
        name, polled = function, is_polled
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name, polled = function or child.name, False
        elif isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name) and not function:
            name = child.targets[0].id
        elif isinstance(child, ast.While):
            polled = True
        yield child, name, polled
        yield from _walk(child, name, polled)


def _script(text: str) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return None  # a sentence


def _broken(
    node: ast.AST, is_polled: bool, points: set[str], lengths: set[str]
) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    if isinstance(node, ast.Call):
        called = _name_of(node.func)
        if called == "sleep" and not is_polled and (len(node.args) != 1 or _is_short(node.args[0])):
            yield "sleep", node
        limits = [each.value for each in node.keywords if each.arg and _is_limit(each.arg)]
        limits += node.args[:1] if called in _FIRST else node.args[1:2] if called in _SECOND else []
        if any(_is_number_below(each, LEAST_LIMIT_S) for each in limits):
            yield "limit", node
        if called == "timedelta" and node.keywords and _seconds(node) < LEAST_LIMIT_S:
            yield "limit", node
    elif isinstance(node, ast.Dict):  # of options
        for key, value in zip(node.keys, node.values, strict=True):
            is_limit = isinstance(key, ast.Constant) and isinstance(key.value, str) and _is_limit(key.value)
            if is_limit and _is_number_below(value, LEAST_LIMIT_S):
                yield "limit", value
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        is_limit = isinstance(target, ast.Name) and _is_limit(target.id)
        if is_limit and node.value is not None and _is_number_below(node.value, LEAST_LIMIT_S):
            yield "limit", node
    elif isinstance(node, ast.FunctionDef):
        named = [*node.args.posonlyargs, *node.args.args]
        pairs = [
            *zip(named[::-1], node.args.defaults[::-1], strict=False),
            *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            if _is_limit(argument.arg) and default is not None and _is_number_below(default, LEAST_LIMIT_S):
                yield "limit", default
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for one, other in ((node.left, node.right), (node.right, node.left)):
            if _is_point(one, points) and _is_number_below(other, LEAST_LIMIT_S):
                yield "limit", node
    elif isinstance(node, ast.Assert) and any(_tells_length(each, points, lengths) for each in ast.walk(node.test)):
        yield "clock", node


def _is_limit(name: str) -> bool:
    return any(part in name.lower() for part in _LIMITS)


def _is_short(value: ast.expr) -> bool:
    return not (
        isinstance(value, ast.Constant) and isinstance(value.value, int | float) and value.value >= LEAST_LIMIT_S
    )


def _is_number_below(value: ast.expr, bound: float) -> bool:
    if not isinstance(value, ast.Constant) or isinstance(value.value, bool):
        return False
    return isinstance(value.value, int | float) and 0 < value.value < bound  # 0: a look, not a wait


def _seconds(node: ast.Call) -> float:
    values = [(each.arg, each.value) for each in node.keywords if each.arg in _UNITS]
    if not all(isinstance(value, ast.Constant) for _, value in values):
        return LEAST_LIMIT_S  # a name
    return sum(_UNITS[unit or ""] * value.value for unit, value in values if isinstance(value, ast.Constant))


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _asks_a_clock(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or _name_of(node.func) not in _CLOCKS:
        return False
    return isinstance(node.func, ast.Name) or ast.unparse(node.func).startswith("time.")


def _is_length(node: ast.AST, points: set[str]) -> bool:
    """A difference with a point in time: how long something took."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and any(_is_point(each, points) for each in (node.left, node.right))
    )


def _is_point(node: ast.AST, points: set[str]) -> bool:
    return _asks_a_clock(node) or (isinstance(node, ast.Name) and node.id in points)


def _names_of_times(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Names of points in time, which a clock said; and names of lengths, which are differences of such."""
    points: set[str] = set()
    lengths: set[str] = set()
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    for node in assigned:
        if _asks_a_clock(node.value):
            points |= {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    for node in assigned:
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        if any(_is_length(each, points) for each in values):
            lengths |= {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return points, lengths


def _tells_length(node: ast.AST, points: set[str], lengths: set[str]) -> bool:
    if _is_length(node, points) or (isinstance(node, ast.Name) and node.id in lengths):
        return True
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        name = str(node.slice.value)
    return name.startswith("took")


def test_no_test_depends_on_the_speed_of_the_machine() -> None:
    files = [path for path in sorted(ROOT.rglob("*.py")) if path != Path(__file__).resolve()]
    gc.disable()  # a tree is no cycle: collections would go through its nodes for nothing
    try:
        rows = [row for path in files for row in offences(str(path.relative_to(ROOT)), path.read_text())]
    finally:
        gc.enable()
    found = [row for row in rows if row[:3] not in ALLOWED]
    counts = collections.Counter(row[0] for row in found)
    more = [row for row in found if counts[row[0]] > REMAINING.get(row[0], 0)]
    assert not more, "\n".join(f"tests/{row[0]}:{row[3]} {row[1]}: {row[2]}: {row[4]}" for row in more)
    fewer = {file: counts[file] for file in REMAINING if counts[file] < REMAINING[file]}
    assert not fewer, f"these numbers of REMAINING can go down: {fewer}"
    unused = ALLOWED.keys() - {row[:3] for row in rows}
    assert not unused, f"nothing is left that needs these entries of ALLOWED: {sorted(unused)}"


def test_the_rules_find_what_they_are_for() -> None:
    text = '''
import time
def test_a():
    began = time.monotonic()
    time.sleep(0.5)
    thread.join(5)
    until(ready, 10)
    run(timeout_s=20.0)
    options = {"timeout_s": 20.0}
    assert time.monotonic() - began < 2
def helper(limit_s=5.0):
    end = time.monotonic() + 5
SCRIPT = """
import time
time.sleep(1)
"""
'''
    found = [(function, rule) for _, function, rule, _, _ in offences("a", text)]
    assert found == [
        *[("test_a", rule) for rule in ("sleep", "limit", "limit", "limit", "limit", "clock")],
        *[("helper", "limit"), ("helper", "limit"), ("SCRIPT", "sleep")],
    ]  # fmt: skip


def test_the_rules_pass_what_depends_on_no_speed() -> None:
    text = """
import time
def test_a():
    while not ready():
        time.sleep(0.01)
    thread.join(LIMIT_S)
    store.wait(["key"], timedelta(seconds=EXPIRES_S))
    assert event.wait(0) or poll(timeout=0)
    time.sleep(600)
    judge(now_s=time.monotonic() + 100)
"""
    assert offences("a", text) == []
