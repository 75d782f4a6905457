"""Copies many parameters to few flat tensors, for methods that send or store all weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: (name, parameter) pairs, in the same order on all ranks.
Named = Sequence[tuple[str, Tensor]]


def as_real(parameters: Named) -> list[tuple[str, Tensor]]:
    """Return views of the parameters as real numbers: a complex parameter gets a last dimension of 2."""
    return [(name, torch.view_as_real(p.detach()) if p.is_complex() else p.detach()) for name, p in parameters]


class FlatWeights:
    """Copies of many parameters as few flat tensors: one per device and dtype, in the order of the parameters.

    Args:
        parameters: (name, parameter) pairs; tensors of any shape, contiguous or not.
        dtype: dtype of the copies; None keeps each parameter's own.

    Attributes:
        names: names of the parameters in each flat tensor.
    """

    def __init__(self, parameters: Named, dtype: torch.dtype | None = None) -> None:
        self._groups: list[list[Tensor]] = []
        self.names: list[list[str]] = []
        self._kinds: list[tuple[torch.device, torch.dtype]] = []
        for name, parameter in parameters:
            kind = parameter.device, dtype or parameter.dtype
            if kind not in self._kinds:
                self._kinds.append(kind)
                self._groups.append([])
                self.names.append([])
            at = self._kinds.index(kind)
            self._groups[at].append(parameter.detach())
            self.names[at].append(name)

    def __len__(self) -> int:
        """Return the number of flat tensors."""
        return len(self._groups)

    def empty(self) -> list[Tensor]:
        """Allocate the flat tensors, with undefined values."""
        sizes = [sum(p.numel() for p in group) for group in self._groups]
        return [
            torch.empty(n, dtype=dtype, device=device) for n, (device, dtype) in zip(sizes, self._kinds, strict=True)
        ]

    def copy(self) -> list[Tensor]:
        """Return new flat tensors that hold the weights."""
        flats = self.empty()
        self.read(flats)
        return flats

    def views(self, flats: Sequence[Tensor]) -> list[list[Tensor]]:
        """Split flat tensors into views of the parameters' shapes."""
        return [
            [part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in group]), group, strict=True)]
            for flat, group in zip(flats, self._groups, strict=True)
        ]

    def by_name(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Split flat tensors into views of the parameters' shapes, by the parameters' names."""
        pairs = zip(self.names, self.views(flats), strict=True)
        return {name: view for names, views in pairs for name, view in zip(names, views, strict=True)}

    @torch.no_grad()
    def read(self, into: Sequence[Tensor]) -> None:
        """Copy the parameters into flat tensors."""
        for views, group in zip(self.views(into), self._groups, strict=True):
            torch._foreach_copy_(views, group)

    @torch.no_grad()
    def write(self, source: Sequence[Tensor]) -> None:
        """Copy flat tensors into the parameters, in place."""
        for views, group in zip(self.views(source), self._groups, strict=True):
            torch._foreach_copy_(group, views)

    @torch.no_grad()
    def subtract_from(self, flats: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Write ``flats`` minus the parameters to ``out``, computed in the dtype of the flat tensors."""
        for views, outs, group in zip(self.views(flats), self.views(out), self._groups, strict=True):
            for view, result, parameter in zip(views, outs, group, strict=True):
                torch.sub(view, parameter, out=result)

    @torch.no_grad()
    def mix(self, source: Sequence[Tensor], kept: float) -> None:
        """Set each parameter p to ``kept`` * p + (1 - ``kept``) * its values in ``source``, rounded to p's dtype once."""
        for views, group in zip(self.views(source), self._groups, strict=True):
            if all(view.dtype == parameter.dtype for view, parameter in zip(views, group, strict=True)):
                torch._foreach_mul_(group, kept)
                torch._foreach_add_(group, views, alpha=1 - kept)
            else:
                for v, p in zip(views, group, strict=True):  # one by one, to hold only one copy in a wide dtype
                    p.copy_(p.to(v.dtype).mul_(kept).add_(v, alpha=1 - kept))

    @torch.no_grad()
    def add(self, source: Sequence[Tensor]) -> None:
        """Add flat tensors to the parameters; the sum is rounded once, to the parameter's dtype."""
        for views, group in zip(self.views(source), self._groups, strict=True):
            for v, p in zip(views, group, strict=True):
                if v.dtype == p.dtype:
                    p.add_(v)
                else:
                    p.copy_(p.to(v.dtype).add_(v))
