"""Take a function out of a package without importing that package: torchrun's parser, without all of torch."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
from pathlib import Path
from typing import Any


def definition(module: str, name: str) -> Any:
    """Return what a name of a module means: a function, class or imported object, without importing the module's package.

    Of the module only the statement that defines the name is executed, with the statements that define the names it uses, also
    those of other modules of the same package. Other packages are imported.

    Args:
        module: the full name of a module that is one file of Python source: ``"torch.distributed.run"``.
        name: a name on the module's top level.

    Raises:
        LookupError: the package or module is not found, or does not define the name by an import, a function, a class or an
            assignment.
    """
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"no package {top}")
    return _Definitions(Path(next(iter(spec.submodule_search_locations))), top).find(module, name)


class _Definitions:
    """The definitions found so far in one package, by module and name."""

    def __init__(self, folder: Path, package: str) -> None:
        self._folder, self._package = folder, package
        self._statements: dict[str, dict[str, ast.stmt]] = {}
        self._spaces: dict[str, dict[str, Any]] = {}

    def find(self, module: str, name: str) -> Any:
        if module not in self._statements:
            self._statements[module] = self._read(module)
            self._spaces[module] = {"__name__": module, "__builtins__": builtins}
        space = self._spaces[module]
        if name not in space:
            statement = self._statements[module].get(name)
            if statement is None:
                raise LookupError(f"{module} does not define {name}")
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").split(".")[0] == self._package:
                (alias,) = [each for each in statement.names if (each.asname or each.name) == name]
                space[name] = self.find(statement.module or "", alias.name)
            else:
                used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} - {name}
                for other in sorted(used & self._statements[module].keys()):
                    self.find(module, other)
                exec(compile(ast.Module([statement], []), module, "exec"), space)
        return space[name]

    def _read(self, module: str) -> dict[str, ast.stmt]:
        """Return the statements of a module's top level, by the names that they define."""
        path = self._folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
        if not path.is_file():
            raise LookupError(f"{module} is not a file of Python source")
        found: dict[str, ast.stmt] = {}
        for statement in ast.parse(path.read_bytes()).body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                found[statement.name] = statement
            elif isinstance(statement, ast.Import | ast.ImportFrom):
                found |= {each.asname or each.name.partition(".")[0]: statement for each in statement.names}
            elif isinstance(statement, ast.Assign):
                found |= {each.id: statement for each in statement.targets if isinstance(each, ast.Name)}
        return found
