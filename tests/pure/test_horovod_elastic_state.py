"""``TorchState``: what was saved is always one whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from guozhuang.compat.horovod.common.exceptions import HorovodInternalError
from guozhuang.compat.horovod.torch.elastic import state as module
from guozhuang.compat.horovod.torch.elastic.state import TorchState


def test_a_sync_that_fails_in_the_middle_leaves_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's model has come, its plain values have not: they must not be saved together."""
    model = torch.nn.Linear(2, 1)
    state = TorchState(model, epoch=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def brought(tensors: dict[str, torch.Tensor], root_rank: int) -> None:
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.fill_(7.0)

    lost = [True]

    def brought_object(value: Any) -> Any:
        if lost:
            lost.pop()
            raise HorovodInternalError("lost")
        return {"epoch": 5}

    monkeypatch.setattr(module, "broadcast_parameters", brought)
    monkeypatch.setattr(state, "_bcast_object", brought_object)
    with pytest.raises(HorovodInternalError):
        state.sync()
    assert model.bias.item() == 7.0
    state.restore()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()) and state.epoch == 3
    state.sync()
    state.epoch = 6
    with torch.no_grad():
        model.bias.fill_(1.0)
    state.restore()
    assert model.bias.item() == 7.0 and state.epoch == 5
