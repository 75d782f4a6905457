"""Checks and interprets the arguments of ``DistributedDataParallel``, once, before any communication."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import UsageError, explain
from ..gradients.buckets import Caps
from ..registry import registry

MIB = 1 << 20
#: The attribute by which a module names to PyTorch's wrapper, and to ours, what is left out.
LEFT_OUT = "_ddp_params_and_buffers_to_ignore"


def choose_group(process_group: dist.ProcessGroup | None, device_mesh: Any, module: nn.Module) -> dist.ProcessGroup:
    """Return the group to communicate over: the one given, that of a 1-dimensional mesh, or the default one.

    Raises:
        RuntimeError: both were given, the mesh has more axes, or there is no default group (as PyTorch raises).
    """
    if process_group is not None and device_mesh is not None:
        raise RuntimeError(
            explain("Cannot specify both process_group and device_mesh arguments", fix="give one of them")
        )
    if device_mesh is None:
        chosen = process_group if process_group is not None else dist.group.WORLD
        if chosen is None:
            raise RuntimeError(
                explain("there is no process group yet", fix="call guozhuang.init() before DistributedDataParallel")
            )
        share = registry.data_share
        if process_group is None and share is not None and share[1] != chosen.size() and not registry.trained:
            # The ranks would train whole copies on equal data: the script does not divide what the launcher lays out.
            what = "--strategy or --layout of this run divides the model, which gz.prepare does, and it was not called"
            fix = "call gz.prepare in place of DistributedDataParallel, or leave that option out"
            raise UsageError(explain(what, value=f"{share[1]} shares of the data", rank=chosen.rank(), fix=fix))
        return chosen
    if device_mesh.ndim != 1:
        what = f"Only 1D device mesh is supported, but got {device_mesh}, which has more than one axis"
        raise RuntimeError(explain(what, fix='slice it: mesh["dp"]'))
    if (
        device_mesh._get_root_mesh() != device_mesh
    ):  # for a slice of a larger mesh: parameters may be DTensors over another axis of that mesh
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    of_mesh: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return of_mesh


def bucket_caps(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> Caps:
    """Return the size limits of the buckets, from the list if given; its last entry holds for all further buckets.

    Raises:
        UsageError: a cap is not positive.
    """
    given = list(bucket_cap_mb_list or ()) or ([] if bucket_cap_mb is None else [bucket_cap_mb])
    for cap in given:
        if not 0 < cap * MIB < math.inf:
            fix = "leave it out for 25 MiB, or give one as large as the model for the fewest buckets"
            raise UsageError(explain("a bucket cap must be a positive, finite number of MiB", value=cap, fix=fix))
    if bucket_cap_mb_list:
        return Caps(tuple(max(int(cap * MIB), 1) for cap in bucket_cap_mb_list))
    return Caps.usual() if bucket_cap_mb is None else Caps.usual(max(int(bucket_cap_mb * MIB), 1))


def sync_choices(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Return whether to broadcast buffers before each forward, and whether to broadcast them at construction.

    ``broadcast_buffers`` is PyTorch's older name: False also leaves out the broadcast at construction.
    """
    if forward_sync_buffers is not None:
        if broadcast_buffers is not None:
            warnings.warn(
                "broadcast_buffers is deprecated and has no effect beside forward_sync_buffers",
                FutureWarning,
                stacklevel=3,
            )
        return forward_sync_buffers, True
    if broadcast_buffers is not None:
        warnings.warn(
            "broadcast_buffers is deprecated; use forward_sync_buffers, which always makes buffers equal at the start",
            FutureWarning,
            stacklevel=3,
        )
        return broadcast_buffers, broadcast_buffers
    return True, True


def choose_devices(
    parameters: Sequence[nn.Parameter], device_ids: Sequence[Any] | None, output_device: Any
) -> tuple[list[int] | None, int | None]:
    """Return the accelerator indices for inputs (in a list) and outputs; (None, None) on the CPU or on several devices.

    Raises:
        UsageError: more than one device id, parameters on devices of several types, or ids where they have no meaning.
        RuntimeError: a parameter has no shape yet (a lazy module before its first input).
    """
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
        what = "Modules with uninitialized parameters can't be used with `DistributedDataParallel`"
        fix = "run one forward before wrapping, so that shapes are known"
        raise RuntimeError(explain(what, fix=fix))
    if device_ids is not None and len(device_ids) > 1:
        what = "device_ids can only be None or contain a single element"
        raise UsageError(explain(what, value=list(device_ids), fix="start one process per device"))
    devices = {p.device for p in parameters}
    types = {device.type for device in devices}
    if len(types) > 1:
        what = "DistributedDataParallel's input module must be on the same type of devices, but its parameters are on several"
        fix = "move the whole module to one type of device"
        raise UsageError(explain(what, value=sorted(map(str, devices)), fix=fix))
    if not device_ids or types == {"cpu"} or len(devices) > 1:
        if device_ids or output_device:
            what = (
                "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU modules: "
                "the module must be whole on one accelerator; its parameters are on "
                f"{sorted(map(str, devices))}"
            )
            raise UsageError(explain(what, value=(device_ids, output_device), fix="leave both out"))
        return None, None
    (own,) = devices
    index = _index_of(device_ids[0], own)
    return [index], index if output_device is None else _index_of(output_device, own)


def _index_of(device: Any, own: torch.device) -> int:
    """Return an accelerator's index; for "cuda" without an index, that of the parameters' device."""
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None:
        index = own.index or 0
    return int(index)
