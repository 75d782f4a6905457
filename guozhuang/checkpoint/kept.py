"""What a script keeps in a checkpoint, and its objects that restore themselves: all of them do, on all ranks, or none does.

[Note: the script's objects first] ``load_state_dict`` and ``set_extra_state`` are code of the script, or of a library that it
uses, and may raise for a state that they do not know. What this package restores itself was compared before, and cannot fail
any more. So the objects come first, each after a copy of its state was taken; where one raises, on any rank, all go back to
these copies on every rank, and nothing else was touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from guozhuang.checkpoint.tree import copied
from guozhuang.errors import explain
from guozhuang.registry import Trained
from guozhuang.watch.report import in_words


class Values:
    """Values of a script that change while it trains, as attributes; :func:`guozhuang.keep` makes the only one.

    An attribute is a number, a text, None, a list or dict of these, or a tensor; or an object with ``state_dict`` and
    ``load_state_dict``, which is restored in place.
    """

    def __getattr__(self, name: str) -> Any:
        """Raise an error that says how a value is made."""
        raise AttributeError(explain("no such value is kept", value=name, fix=f"pass it first: gz.keep({name}=...)"))


def is_stateful(value: object) -> bool:
    """Tell whether an object has ``state_dict`` and ``load_state_dict``."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return all(callable(method) for method in methods) and not isinstance(value, type)


def state_of(value: Any) -> dict[str, Any]:
    """Return the state of a value that is kept, as a checkpoint holds it."""
    if is_stateful(value):
        return {"stateful": True, "state": value.state_dict()}
    return {"stateful": False, "state": value}


def with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules that define an extra state, with their names."""
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield name, part


def extra_states(module: nn.Module) -> dict[str, Any]:
    """Return the extra states of those submodules that define one."""
    return {name: part.get_extra_state() for name, part in with_extra_state(module)}


@dataclass(frozen=True)
class RestoresItself:
    """An object whose state is restored by its own code.

    Attributes:
        name: the object in words, for errors.
        take: returns its state.
        put: restores such a state.
        saved: the state that it is to get.
    """

    name: str
    take: Callable[[], Any]
    put: Callable[[Any], object]
    saved: Any


def objects_of(
    values: Values, saved: Mapping[str, Any], trained: Iterable[tuple[Trained, Mapping[str, Any]]]
) -> Iterator[RestoresItself]:
    """Yield the objects of ``gz.keep``, and the submodules with an extra state, of which the checkpoint holds a state.

    Args:
        values: what ``gz.keep`` was given.
        saved: of these, what was saved.
        trained: each model, and what was saved as this rank's own part of it.
    """
    for name, value in vars(values).items():
        if name in saved and is_stateful(value):
            state = saved[name]["state"]
            yield RestoresItself(f"{name} of gz.keep", value.state_dict, value.load_state_dict, state)
    seen = set()
    for each, own in trained:
        parts = dict(each.module.named_modules())
        for name, state in own["extra"].items():
            part = parts[name]
            if id(part) not in seen:  # a model with several optimizers is there several times
                seen.add(id(part))
                what = f"the extra state of {name or type(part).__name__}"
                yield RestoresItself(what, part.get_extra_state, part.set_extra_state, state)


class Objects:
    """Objects that restore themselves, and get their saved states one after the other. See [Note: the script's objects first].

    Args:
        some: the objects, in their order.
    """

    def __init__(self, some: Iterable[RestoresItself]) -> None:
        self._some = list(some)
        self._before: list[tuple[RestoresItself, Any]] = []

    def restore(self) -> tuple[str, Exception | None]:
        """Restore their states until one raises; return that in words, and the exception; "" and None where none did."""
        for each in self._some:
            try:
                before = copy.deepcopy(each.take())
                self._before.append((each, before))
                each.put(copied(each.saved))
            except Exception as error:
                return f"{each.name} cannot be restored: {in_words(error)}", error
        return "", None

    def go_back(self) -> str:
        """Give all objects back what they had before; return which could not be given it back; "" for none."""
        failed = []
        for each, before in reversed(self._before):
            try:
                each.put(before)
            except Exception as error:
                failed.append(f"{each.name} ({in_words(error)})")
        self._before.clear()
        return ", ".join(reversed(failed))


def set_values(values: Values, saved: Mapping[str, Any]) -> list[str]:
    """Set the values of ``gz.keep`` that are no objects; return what could not be restored: sentences for the log."""
    notes = []
    for name, value in list(vars(values).items()):
        if name not in saved:
            notes.append(f"{name} of gz.keep is not in the checkpoint and stays as it is")
        elif not is_stateful(value):
            found = copied(saved[name]["state"])
            setattr(values, name, found.to(value.device) if isinstance(value, Tensor) else found)
    forgotten = sorted(saved.keys() - vars(values).keys())
    if forgotten:
        notes.append(f"the checkpoint holds {', '.join(forgotten)} too, which gz.keep was not given")
    return notes
