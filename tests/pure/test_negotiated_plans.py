from __future__ import annotations

import torch

from guozhuang.gradients.named.plans import Plans, Remembered
from guozhuang.gradients.named.submission import Kind, Reduction
from guozhuang.gradients.named.table import Request, Response


def _response(name: str, num_elements: int = 4) -> Response:
    request = Request(
        Kind.ALLREDUCE, ((num_elements,),), (torch.float32,), "cpu", Reduction.SUM, 1.0, 1.0, None, None, None
    )
    return Response(name, {0: request, 1: request}, None, None)


def test_the_same_responses_give_the_same_batches_and_equal_ones_new_ones() -> None:
    plans = Plans(fuse_groups=True)
    responses = [_response("a"), _response("b"), _response("c", 1000)]
    first = plans.batches(responses, 64)
    assert [[each.name for each in batch] for batch in first] == [["a", "b"], ["c"]]
    assert plans.batches(list(responses), 64) is first
    assert plans.batches([_response("a"), *responses[1:]], 64) is not first
    assert plans.batches(responses[:2], 64) == first[:1]


def test_another_threshold_divides_anew() -> None:
    plans = Plans(fuse_groups=True)
    responses = [_response("a"), _response("b")]
    assert len(plans.batches(responses, 64)) == 1
    assert len(plans.batches(responses, 0)) == 2
    assert len(plans.batches(responses, 64)) == 1


def test_what_is_remembered_is_about_these_objects_and_does_not_grow_without_end() -> None:
    remembered: Remembered[int] = Remembered()
    objects = [object() for _ in range(300)]
    for i, each in enumerate(objects):
        remembered.put([each], i)
        assert remembered.get([each]) == i
    assert sum(remembered.get([each]) is not None for each in objects) <= 64
    assert remembered.get([objects[-1], objects[-1]]) is None
