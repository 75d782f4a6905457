"""What tells a wrapper of added parameters, where other threads build modules."""

from __future__ import annotations

import threading

from torch import nn
from torch.nn.modules import module as of_torch

from guozhuang.gradients.additions import Additions


def test_pytorch_iterates_over_its_hooks_without_a_lock_so_a_wrapper_adds_none() -> None:
    before = [list(of_torch._global_parameter_registration_hooks), list(of_torch._global_module_registration_hooks)]
    model = nn.Linear(2, 2)
    kept = [Additions(list(model.named_parameters())) for _ in range(3)]
    kept.pop()
    assert before == [
        list(of_torch._global_parameter_registration_hooks),
        list(of_torch._global_module_registration_hooks),
    ]


def test_a_thread_builds_modules_while_another_looks_for_additions() -> None:
    model, over, failures = nn.Sequential(nn.Linear(2, 2)), threading.Event(), []
    additions = Additions(list(model.named_parameters()))

    def build() -> None:
        try:
            while not over.is_set():
                nn.Linear(1, 1)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    for _ in range(300):
        additions.refuse(model, frozenset(), 0)
        Additions([])
    over.set()
    thread.join()
    assert not failures
