"""``BaguaTensor``: the methods that PyTorch's tensors get by importing ``bagua.torch_api``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from guozhuang.errors import UsageError, explain

from .bucket import NO_CORE


class BaguaTensor:
    """A tensor with a name, which may stand for another one, such as a parameter for its gradient.

    Attributes:
        bagua_tensor_name: the name of a tensor that :meth:`ensure_bagua_tensor` was called for; "" by default.
        bagua_module_name: the name of the module that it belongs to, or None.
    """

    bagua_tensor_name: str
    bagua_module_name: str | None

    def is_bagua_tensor(self) -> bool:
        """Return whether :meth:`ensure_bagua_tensor` was called for this tensor."""
        return "bagua_tensor_name" in vars(self)

    def ensure_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Callable[[Any], Tensor] | None = None,
        setter_closure: Callable[[Any, Tensor], None] | None = None,
    ) -> Any:
        """Give this tensor a name, and return it.

        Args:
            name: the name; it cannot be changed later.
            module_name: the name of its module; it cannot be changed later.
            getter_closure: called with this tensor; returns the one that it stands for. None: itself.
            setter_closure: called with this tensor and the one that it is to stand for; it needs ``getter_closure``.

        Raises:
            AssertionError: the tensor has another name; a setter without a getter.
        """
        for attribute, value in (("bagua_tensor_name", name), ("bagua_module_name", module_name)):
            before = vars(self).get(attribute)
            fix = "leave the name out, or take to_bagua_tensor for another one"
            assert value is None or not before or before == value, explain(
                f"a tensor of {attribute} {before!r} cannot be renamed", value=value, fix=fix
            )
            vars(self)[attribute] = before if value is None else value
        self.bagua_tensor_name = self.bagua_tensor_name or ""
        assert setter_closure is None or getter_closure is not None, explain(
            "setter_closure needs getter_closure", fix="give both, or the getter alone"
        )
        vars(self).update(_bagua_getter=getter_closure, _bagua_setter=setter_closure)
        return self

    def to_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Callable[[Any], Tensor] | None = None,
        setter_closure: Callable[[Any, Tensor], None] | None = None,
    ) -> Any:
        """Return a new tensor over the memory of this one, with a name; see :meth:`ensure_bagua_tensor`."""
        tensor: Any = self
        return tensor.detach().ensure_bagua_tensor(name, module_name, getter_closure, setter_closure)

    def bagua_getter_closure(self) -> Tensor:
        """Return the tensor that this one stands for."""
        getter = vars(self).get("_bagua_getter")
        return self if getter is None else getter(self)  # type: ignore[return-value]

    def bagua_setter_closure(self, t: Tensor) -> None:
        """Let this tensor stand for another one.

        Raises:
            UsageError: it has no setter.
        """
        setter = vars(self).get("_bagua_setter")
        if setter is None:
            raise UsageError(explain("the tensor has no setter", fix="give setter_closure to ensure_bagua_tensor"))
        setter(self, t)

    def bagua_backend_tensor(self) -> Tensor:
        """Return what a communicator sends for this tensor: the tensor that it stands for."""
        return self.bagua_getter_closure()

    def bagua_ensure_grad(self) -> Any:
        """Make the gradient zeros where it is None, and return this tensor.

        Raises:
            NotImplementedError: it has no gradient, and is no parameter.
        """
        tensor: Any = self
        if tensor.grad is None:
            if not isinstance(self, nn.Parameter):
                raise NotImplementedError(explain("only a parameter gets a gradient of zeros", fix="set tensor.grad"))
            tensor.grad = torch.zeros_like(tensor)
        return self

    def bagua_set_storage(self, storage: Any, storage_offset: int = 0) -> None:
        """Let the tensor that this one stands for have other memory, which keeps its values.

        Args:
            storage: the memory, of ``torch.Tensor.untyped_storage()`` or ``storage()``.
            storage_offset: where it begins in the memory, in elements.
        """
        with torch.no_grad():
            shown = self.bagua_getter_closure()
            has_setter = vars(self).get("_bagua_setter") is not None
            target: Any = torch.empty_like(shown) if has_setter else shown
            target.set_(storage, storage_offset, shown.shape)
            if has_setter:
                self.bagua_setter_closure(target)

    def bagua_mark_communication_ready(self) -> None:
        """Raise the error that says that Bagua's Rust core is not there.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(NO_CORE)

    bagua_mark_communication_ready_without_synchronization = bagua_mark_communication_ready


def add_to_tensors() -> None:
    """Give ``torch.Tensor`` the methods of :class:`BaguaTensor`. Repeated calls are harmless."""
    for name, value in vars(BaguaTensor).items():
        if "bagua" in name:
            setattr(Tensor, name, value)
