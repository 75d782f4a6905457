"""The parts of a model between which it can be cut: lists of blocks, and the modules beside them.

Nothing is traced: the lists stand in the model. A transformer has a ``ModuleList`` of layers of one class, a ResNet four
``Sequential`` of one class of blocks, T5 a list in its encoder and one in its decoder. A model without such lists is cut
between its children. The order in which the forward calls these parts is not seen here, but when it runs
(``forwards/calls.py``).
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ...errors import UsageError, explain
from ...units import listed

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class BlockList:
    """A list of modules of one class, which a model's forward calls one after the other.

    Attributes:
        name: of the list within the model, such as ``"encoder.layer"``; empty if the model itself is the list.
        modules: the blocks, in the list's order.
        keys: their names within the list: ``"0"``, ``"1"``, and so on.
    """

    name: str
    modules: tuple[nn.Module, ...]
    keys: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks within the model, such as ``"encoder.layer.0"``."""
        return tuple(f"{self.name}.{key}" if self.name else key for key in self.keys)


def find_blocks(model: nn.Module, at_least: int = 2) -> list[BlockList]:
    """Return the lists of blocks of a model, in the order in which they are registered.

    They are the outermost lists (``ModuleList``, ``Sequential``, ``ModuleDict``) with at least two elements, all of one class
    and with parameters. If the model has such lists of several classes, those count whose class has the most parameters in
    them; so encoder and decoder of T5 come together, and the four of a ResNet. Empty if the model has none.

    Args:
        model: any module.
        at_least: how many blocks are needed. Where the outermost lists have fewer, lists inside of their elements are taken
            if these have enough: a Swin has four stages with 2, 2, 6 and 2 blocks.
    """
    found = list(_outermost(model, ""))
    while found:
        by_class: dict[type, list[BlockList]] = collections.defaultdict(list)
        for each in found:
            by_class[type(each.modules[0])].append(each)
        best = max(by_class.values(), key=lambda lists: (sum(map(_num_parameters, lists)), len(lists)))
        if sum(len(each.modules) for each in best) >= at_least:
            return best
        inside = [
            deeper
            for each in best
            for name, block in zip(each.names, each.modules, strict=True)
            for deeper in _outermost(block, name)
        ]
        if not inside:
            return best
        found = inside
    return []


def find_units(model: nn.Module, at_least: int = 2) -> dict[str, nn.Module]:
    """Return by name the modules that a pipeline computes on one stage each.

    These are the blocks of :func:`find_blocks` and the largest modules beside them: embeddings, dropout, pooler, head.
    Modules that contain units (the model, its encoder, lists) have a forward that calls units; each stage runs it. A model
    without blocks has its children as units, and the elements of lists among them.

    Args:
        model: any module.
        at_least: see :func:`find_blocks`.
    """
    blocks = {id(module) for each in find_blocks(model, at_least) for module in each.modules}
    within = {id(module): [id(inside) for inside in module.modules()] for module in model.modules()}
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> None:
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if id(child) in seen:
                continue
            seen.add(id(child))
            has_blocks = id(child) not in blocks and any(inside in blocks for inside in within[id(child)])
            if has_blocks or (isinstance(child, _LISTS) and id(child) not in blocks):
                walk(child, f"{name}.")
            else:
                found[name] = child

    top, prefix = model, ""
    while not blocks and len(only := list(top.named_children())) == 1 and _has(only[0][1].children()):
        prefix, top = f"{prefix}{only[0][0]}.", only[0][1]
    walk(top, prefix)
    return found


def containers(model: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return by name the modules within a model that contain units, and so have a forward that each stage runs.

    Args:
        model: the whole model, which is not among them.
        units: see :func:`find_units`.
    """
    of_units = {id(unit) for unit in units.values()}
    inside = {id(part) for unit in units.values() for part in unit.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if name and id(module) not in inside and any(id(part) in of_units for part in module.modules())
    }


def refuse_backward_hooks(around: Mapping[str, nn.Module], units: Mapping[str, nn.Module]) -> None:
    """Raise where a module that contains units has a backward hook: no stage has both what goes in and what comes out.

    Args:
        around: see :func:`containers`.
        units: see :func:`find_units`.

    Raises:
        UsageError: it names the first such module.
    """
    for name, module in around.items():
        if module._backward_hooks:
            parts = listed([each for each in units if each.startswith(f"{name}.")])
            what = f"a backward hook is on {name}, whose parts a pipeline computes each by itself ({parts})"
            fix = "register it on these parts, or use a layout without pp"
            raise UsageError(explain(what, value=type(module).__name__, fix=fix))


def _outermost(module: nn.Module, name: str) -> Iterator[BlockList]:
    """Yield the lists of one class within a module, but none inside of another; the module may be one itself."""
    if isinstance(module, _LISTS):
        children = dict(module.named_children())
        blocks = tuple(children.values())
        is_one_class = len(blocks) >= 2 and len({type(each) for each in blocks}) == 1
        if is_one_class and not isinstance(blocks[0], nn.ModuleList | nn.ModuleDict) and _has(blocks[0].parameters()):
            yield BlockList(name, blocks, tuple(children))
            return
    for key, child in module.named_children():
        yield from _outermost(child, f"{name}.{key}" if name else key)


def _has(found: Iterator[object]) -> bool:
    return next(found, None) is not None


def _num_parameters(blocks: BlockList) -> int:
    return sum(parameter.numel() for block in blocks.modules for parameter in block.parameters())
