"""Bucket layouts hold their promises for any list of parameters, and the views are where they should be."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guozhuang.distributed.arguments import bucket_caps
from guozhuang.errors import UsageError
from guozhuang.gradients.buckets import DEFAULT_CAP_BYTES, FIRST_CAP_BYTES, Bucket, Caps, Slot, assign, place

DTYPES = (torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.complex64)
DEVICES = (torch.device("cpu"), torch.device("meta"))

slots_lists = st.lists(
    st.builds(
        Slot,
        num_elements=st.integers(0, 40),
        dtype=st.sampled_from(DTYPES),
        device=st.sampled_from(DEVICES),
        sparse=st.sampled_from((False, False, False, True)),
    ),
    max_size=30,
)
caps_tuples = st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Slot], list[int], Caps]:
    slots = draw(slots_lists)
    return slots, draw(st.permutations(range(len(slots)))), Caps(draw(caps_tuples))


@given(cases())
def test_every_parameter_is_in_exactly_one_bucket(case: tuple[list[Slot], list[int], Caps]) -> None:
    slots, order, caps = case
    layout = assign(slots, order, caps)
    assert sorted(itertools.chain.from_iterable(layout)) == list(range(len(slots)))
    assert all(layout)


@given(cases())
def test_a_bucket_holds_one_dtype_and_device_and_a_sparse_one_holds_one_parameter(
    case: tuple[list[Slot], list[int], Caps],
) -> None:
    slots, order, caps = case
    for bucket in assign(slots, order, caps):
        assert len({(slots[i].dtype, slots[i].device, slots[i].sparse) for i in bucket}) == 1
        assert len(bucket) == 1 or not slots[bucket[0]].sparse


@given(cases())
def test_caps_hold_but_for_single_parameters_and_no_bucket_ends_without_need(
    case: tuple[list[Slot], list[int], Caps],
) -> None:
    slots, order, caps = case
    place_in = {index: place for place, index in enumerate(order)}
    layout = assign(slots, order, caps)
    for key in {(s.dtype, s.device) for s in slots if not s.sparse}:
        own = [b for b in layout if not slots[b[0]].sparse and (slots[b[0]].dtype, slots[b[0]].device) == key]
        # Caps are counted separately for each dtype and device: one list of buckets, filled in order.
        assert [i for b in own for i in b] == sorted((i for b in own for i in b), key=place_in.__getitem__)
        for number, bucket in enumerate(own):
            size = sum(slots[i].num_bytes for i in bucket)
            assert size <= caps.of(number) or len([i for i in bucket if slots[i].num_bytes]) == 1
            if number + 1 < len(own):
                assert size + slots[own[number + 1][0]].num_bytes > caps.of(number)


@given(cases())
def test_buckets_stand_in_the_order_in_which_they_fill(case: tuple[list[Slot], list[int], Caps]) -> None:
    slots, order, caps = case
    place_in = {index: place for place, index in enumerate(order)}
    full_at = [max(place_in[i] for i in bucket) for bucket in assign(slots, order, caps)]
    assert full_at == sorted(full_at)


def test_an_order_that_is_no_permutation_is_our_own_mistake() -> None:
    slots = [Slot(1, torch.float32, DEVICES[0])] * 3
    for order in ([0, 1], [0, 1, 1], [0, 1, 2, 2]):
        with pytest.raises(AssertionError):
            assign(slots, order, Caps((8,)))


@pytest.mark.parametrize("caps", [(), (0,), (5, -1)])
def test_caps_must_be_positive(caps: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        Caps(caps)


def test_the_usual_caps_start_small_and_never_pass_the_one_asked_for() -> None:
    assert [Caps.usual().of(i) for i in range(3)] == [FIRST_CAP_BYTES, DEFAULT_CAP_BYTES, DEFAULT_CAP_BYTES]
    assert [Caps.usual(1000).of(i) for i in range(3)] == [1000, 1000, 1000]
    assert [Caps((3, 2, 9)).of(i) for i in range(5)] == [3, 2, 9, 9, 9]


@pytest.mark.parametrize("cap", [0, -1, math.nan, math.inf, 1e308])
def test_a_cap_that_is_no_number_of_bytes_is_refused_with_its_value(cap: float) -> None:
    for options in ((cap, None), (None, [1.0, cap])):
        with pytest.raises(UsageError, match=rf"{re.escape(str(cap))}.*Fix:"):
            bucket_caps(*options)
    assert bucket_caps(10**9, [10**400]).each == (10**400 << 20,)


def test_bytes_follow_the_dtype() -> None:
    assert [Slot(10, dtype, DEVICES[0]).num_bytes for dtype in DTYPES] == [40, 20, 80, 20, 80]


# ---- views ----------------------------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 4), max_size=5).map(tuple)


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[torch.Tensor]:
    dtype = draw(st.sampled_from(DTYPES))
    parameters = []
    for shape in draw(st.lists(shapes, min_size=1, max_size=6)):
        order = draw(st.permutations(range(len(shape))))
        back = [order.index(i) for i in range(len(order))]
        parameters.append(torch.ones([shape[i] for i in order], dtype=dtype).permute(back))
        assert parameters[-1].shape == shape
    return parameters


@given(parameter_lists())
def test_views_cover_the_flat_tensor_once_with_the_strides_of_the_parameters(parameters: list[torch.Tensor]) -> None:
    bucket = Bucket(0, True, [str(i) for i in range(len(parameters))], parameters)
    assert bucket.flat.numel() == sum(p.numel() for p in parameters)
    assert bucket.num_bytes == bucket.flat.numel() * bucket.flat.element_size()
    assert not bucket.flat.any()
    for number, (view, parameter) in enumerate(zip(bucket.views, parameters, strict=True)):
        assert view.shape == parameter.shape and view.dtype == parameter.dtype
        sized = [i for i, size in enumerate(parameter.shape) if size > 1]
        if parameter.numel():
            assert [view.stride(i) for i in sized] == [parameter.stride(i) for i in sized]
        view.add_(number + 1)  # twice written would show
    expected = [float(number + 1) for number, p in enumerate(parameters) for _ in range(p.numel())]
    assert bucket.flat.tolist() == expected
    bucket.flat.zero_()
    assert not any(bool(view.any()) for view in bucket.views)


def test_channels_last_stays_and_an_expanded_parameter_becomes_dense() -> None:
    convolution = torch.zeros(5, 3, 2, 2).to(memory_format=torch.channels_last)
    expanded = torch.zeros(4, 1).expand(4, 3)
    gapped = torch.zeros(4, 6)[:, ::2]
    bucket = Bucket(0, True, ["convolution", "expanded", "gapped"], [convolution, expanded, gapped])
    assert bucket.views[0].is_contiguous(memory_format=torch.channels_last)
    assert not bucket.views[0].is_contiguous()
    assert bucket.views[1].is_contiguous() and bucket.views[1].shape == (4, 3)
    assert bucket.views[2].is_contiguous() and bucket.views[2].shape == (4, 3)
    for number, view in enumerate(bucket.views):
        view.fill_(number + 1.0)
    assert bucket.flat.tolist() == [1.0] * 60 + [2.0] * 12 + [3.0] * 12


def test_autograd_takes_views_for_tensors_of_their_own() -> None:
    """Older scripts call ``p.grad.detach_()``, which autograd refuses on what it knows to be a view."""
    bucket = Bucket(0, True, ["a", "b"], [torch.zeros(3), torch.zeros(2)])
    with pytest.raises(RuntimeError, match="view"):
        (torch.zeros(4, requires_grad=True) * 2).view(2, 2).detach_()
    for view in bucket.views:
        assert view.detach_() is view
        view.requires_grad_(False)
        view.zero_()


def test_place_knows_bucket_and_view_of_each_parameter() -> None:
    parameters = [torch.zeros(n) for n in (3, 5, 2)] + [torch.zeros(4, 2)]
    names = ["a", "b", "c", "rows"]
    slots = [Slot(p.numel(), p.dtype, p.device, name == "rows") for name, p in zip(names, parameters, strict=True)]
    placement = place(assign(slots, [3, 2, 0, 1], Caps((20,))), names, parameters, slots)
    assert placement.layout == [(3,), (2, 0), (1,)]
    assert placement.bucket_of == [1, 2, 1, 0]
    assert [b.index for b in placement.buckets] == [0, 1, 2]
    assert [b.is_last for b in placement.buckets] == [False, False, True]
    assert placement.buckets[1].names == ("c", "a")
    assert placement.dense == placement.buckets[1:]
    assert placement.buckets[0].views == [] and placement.buckets[0].flat.numel() == 0
    for bucket in placement.dense:
        for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
            assert view.shape == parameter.shape
            assert view.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()


def test_a_renewed_bucket_leaves_its_old_memory_alone() -> None:
    bucket = Bucket(0, True, ["a", "b"], [torch.zeros(2), torch.zeros(3)])
    bucket.flat.fill_(1.0)
    kept = bucket.views[1]
    bucket.renew()
    bucket.flat.fill_(2.0)
    assert kept.tolist() == [1.0] * 3 and bucket.views[1].tolist() == [2.0] * 3
