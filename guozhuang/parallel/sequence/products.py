"""Rules for matrix products: rows stay divided, and what they are multiplied by is gathered where it is divided too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .divided import Place, by_gathering, cut_where_it_meets, divided, place_of, rule, whole_of
from .team import matmul_gathered


def _cast(*tensors: Tensor) -> list[Tensor]:
    """The operands in the type that autocast gives to a product."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [each.to(torch.get_autocast_dtype(kind)) if each.is_floating_point() else each for each in tensors]


@rule("matmul", "mm", "bmm", "__matmul__", "__rmatmul__")
def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = (args[1], args[0]) if func.__name__ == "__rmatmul__" else args[:2]
    if min(left.dim(), right.dim()) < 2 or kwargs:
        return by_gathering(func, args, kwargs)
    here, there = place_of(left), place_of(right)
    row, column = (None if place is None else place.dim - each.dim() for place, each in ((here, left), (there, right)))
    place: Place | None = here or there
    assert place is not None
    if row == -1 or (here is None and column == -2):
        return by_gathering(func, args, kwargs)  # a sum over tokens of which only one operand is divided
    if here is None or (row is not None and row < -2):  # independent products, or columns
        position: int = column if here is None else row  # type: ignore[assignment]
        if position == -1:
            result = left @ right
        else:
            if here is not None and there is not None and not (row == column and here.is_like(there)):
                right = whole_of(right)
            fitted = [_fit(each, place, position) for each in (left, right)]
            result = fitted[0] @ fitted[1]
        return divided(result, place.at(result.dim() + position))
    if there is None:
        result = left @ right
    elif column in (-1, -2) and there.outer == there.inner == 1:
        left, right = _cast(left, right)
        result = matmul_gathered(left, right, column, there.spans, there.team)
    else:
        result = left @ whole_of(right)
    return divided(result, here.at(result.dim() - 2))


def _fit(value: Tensor, place: Place, position: int) -> Tensor:
    return value if place_of(value) is not None else cut_where_it_meets(value, place, position)


@rule("addmm", "baddbmm")
def _added_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    added, left, right = args[:3]
    place = place_of(left)
    is_linear = func.__name__ == "addmm" and added.dim() == 1 and place_of(right) is None and place_of(added) is None
    if is_linear and place is not None and place.dim == 0:
        return divided(func(*args, **kwargs), place)
    with torch._C._EnableTorchFunction():
        product = torch.matmul(left, right)
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        product = product if alpha == 1 else product * alpha
        return product if beta == 0 else product + (added if beta == 1 else added * beta)


@rule("einsum")
def _einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    equation = args[0]
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], tuple | list) else list(args[1:])
    if not isinstance(equation, str) or "..." in equation or "->" not in equation:
        return by_gathering(func, args, kwargs)
    inputs, output = equation.replace(" ", "").split("->")
    names = inputs.split(",")
    placed = [(i, place_of(each)) for i, each in enumerate(operands)]
    # The first letter of a divided dimension that the result has stays divided; other operands are gathered, or cut at it.
    lead = next(((i, place) for i, place in placed if place is not None and names[i][place.dim] in output), None)
    if lead is None or any(len(set(each)) < len(each) for each in names):
        return by_gathering(func, args, kwargs)
    letter, place = names[lead[0]][lead[1].dim], lead[1]
    for i, here in placed:
        is_same = here is not None and names[i][here.dim] == letter and here.is_like(place)
        if here is not None and not is_same:
            operands[i] = whole_of(operands[i])
        if letter in names[i] and not is_same:
            operands[i] = cut_where_it_meets(operands[i], place, names[i].index(letter) - len(names[i]))
    return divided(torch.einsum(equation, *operands), place.at(output.index(letter)))
