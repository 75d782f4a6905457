"""Cuts the parameters into fragments that are exchanged in turn: about equal in bytes, each with layers from the whole model.

[Note: the cut] A parameter with more bytes than an average fragment is cut into pieces along its first dim that is long enough.
Pieces are assigned from the largest to the smallest, each to the fragment with the fewest bytes so far. Pieces of equal size,
such as the matrices of equal layers, are therefore assigned to the fragments in turn, which the Streaming DiLoCo paper calls
strided. The cut depends on shapes and dtypes alone, so it is the same on all ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor

from ..weights.flat import Named


@dataclass(frozen=True)
class FragmentPiece:
    """A whole parameter, or a part of one, that belongs to one fragment.

    Attributes:
        parameter: the parameter's name.
        dim: the dimension along which the parameter was cut; None for a whole parameter.
        begin, end: the range of the part along ``dim``.
        weights: a view of that part of the parameter.
    """

    parameter: str
    dim: int | None
    begin: int
    end: int
    weights: Tensor

    @property
    def name(self) -> str:
        """The parameter's name; for a part of a parameter also its dimension and range."""
        return self.parameter if self.dim is None else f"{self.parameter}[dim {self.dim}, {self.begin}:{self.end}]"

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of a tensor of the parameter's shape, as a view."""
        return whole if self.dim is None else whole.narrow(self.dim, self.begin, self.end - self.begin)


def cut(parameters: Named, num_fragments: int) -> list[list[FragmentPiece]]:
    """Cut parameters into fragments; some fragments are empty if there are fewer pieces than fragments.

    Args:
        parameters: (name, tensor) pairs.
        num_fragments: the number of fragments, at least 1.
    """
    limit = -(-sum(p.nbytes for _, p in parameters) // num_fragments)
    pieces = [piece for name, parameter in parameters for piece in _pieces(name, parameter, limit)]
    members: list[list[int]] = [[] for _ in range(num_fragments)]
    loads = [0] * num_fragments
    for i in sorted(range(len(pieces)), key=lambda i: -pieces[i].weights.nbytes):
        least = loads.index(min(loads))
        members[least].append(i)
        loads[least] += pieces[i].weights.nbytes
    return [[pieces[i] for i in sorted(each)] for each in members]


def _pieces(name: str, parameter: Tensor, limit: int) -> list[FragmentPiece]:
    wanted = -(-parameter.nbytes // max(1, limit))
    num = min(wanted, max(parameter.shape, default=1))
    if num < 2:
        return [FragmentPiece(name, None, 0, 0, parameter)]
    dim = next(d for d, rows in enumerate(parameter.shape) if rows >= num)
    bounds = [parameter.shape[dim] * i // num for i in range(num + 1)]
    return [
        FragmentPiece(name, dim, begin, end, parameter.narrow(dim, begin, end - begin))
        for begin, end in itertools.pairwise(bounds)
    ]
