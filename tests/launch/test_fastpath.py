"""What a kind of call is: everything about a call but its sizes."""

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import portattn
from portattn.config import current
from portattn.launch import cache, torch_compat
from portattn.launch.cache import CallKey, identical, plain_values


def kind(tensors, values=(None, False), lengths=None, **more):
    return CallKey("attention", tensors, values, lengths or {}, current(), **more)


def matches(one, *tensors, values=(None, False), lengths=()):
    found = one.match(tensors, values, lengths, current())
    return None if found is None else found[2]


@pytest.fixture(params=["torch's guards", "in Python"])
def q(request, monkeypatch):
    """A tensor, where tensors are compared by torch's guards, and where this torch has none that can be used."""
    if request.param == "in Python":
        monkeypatch.setattr(torch_compat, "_usable", lambda: False)
    return torch.zeros(1, 2, 4, 16)


def test_torchs_guards_are_passed_over_where_they_cannot_be_used(monkeypatch):
    monkeypatch.setattr(torch_compat, "_made", lambda tensors: pytest.fail("torch's guards are used"))
    monkeypatch.setattr(torch_compat, "_usable", lambda: False)
    assert torch_compat.guard([torch.zeros(2, 3)])(torch.ones(4, 5))


def test_sizes_and_strides_are_no_part_of_it(q):
    sizes = matches(kind({"q": q, "k": q.clone(), "sinks": None}), q, torch.zeros(3, 2, 7, 16)[:, :, 2:], None)
    assert sizes == [1, 2, 4, 16, 128, 64, 16, 1, 3, 2, 5, 16, 224, 112, 16, 1]


def test_what_else_differs_makes_another_kind(q):
    one = kind({"q": q, "k": q.clone(), "sinks": None})
    k = torch.ones_like(q)
    freed = k.clone()
    freed.untyped_storage().resize_(0)  # nothing may be launched at address 0
    unaligned, negated = torch.zeros(129)[1:].view(1, 2, 4, 16), torch._neg_view(k)
    others = [k.half(), k[0], None, 3, unaligned, freed, torch.nn.Parameter(k), negated, k.to_sparse(), k.to_mkldnn()]
    assert [matches(one, q, other, None) for other in others] == [None] * len(others)
    assert matches(one, q, k, None)
    assert not matches(one, q, k, torch.zeros(2))
    assert not matches(one, q, k, None, values=(None, True))
    with portattn.settings(fallback="error"):
        assert not matches(one, q, k, None)
    with portattn.settings(fallback=current().fallback):
        assert matches(one, q, k, None), "equal settings"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_never_of_the_kind(q, layout):
    """Torch's guards would end the process at a strided one, which is of the tensor's type and axes."""
    one = kind({"q": q, "k": q.clone(), "sinks": None})
    assert not matches(one, q, torch.nested.nested_tensor([q[0], q[0]], layout=layout), None)


def test_a_tensor_that_is_given_twice_is_given_twice_again(q):
    one = kind({"q": q.clone(), "k": q, "v": q})
    k = torch.ones_like(q)
    assert matches(one, q, k, k)
    assert not matches(one, q, k, k.clone())


def test_values_of_other_types_are_other_values(q):
    one = kind({"q": q}, values=(1, (5, 1), 1.0))
    assert matches(one, q, values=(1, (5, 1), 1.0))
    for values in ((True, (5, 1), 1.0), (1, (5, True), 1.0), (1, (5, 1), 1), (1.0, (5, 1), 1.0), (1, [5, 1], 1.0)):
        assert not matches(one, q, values=values), values
    assert not matches(one, q, values=(torch.ones(2), (5, 1), 1.0)), "what does not compare is named by validation"


def test_a_length_is_a_size(q):
    one = kind({"q": q}, lengths={"max_seqlen_q": 7, "max_seqlen_k": None})
    assert matches(one, q, lengths=(9, None)) == [1, 2, 4, 16, 128, 64, 16, 1, 9]
    for other in ((None, None), (9, 9), (True, None), (9.0, None), (9,)):
        assert not matches(one, q, lengths=other), other


def test_forward_mode_differentiation_is_another_kind(q):
    one = kind({"q": q})
    with forward_ad.dual_level():
        assert not matches(one, forward_ad.make_dual(q, torch.ones_like(q)))
        assert not matches(one, q), "another tensor may have a tangent"
    assert matches(one, q)


def test_whether_gradients_are_recorded_is_part_of_it(q):
    leaf = q.clone().requires_grad_()
    with torch.no_grad():
        one = kind({"q": leaf})
        assert matches(one, leaf)
    assert not matches(one, leaf), "a kernel without a backward must not answer where gradients are recorded"
    assert not matches(kind({"q": q}), leaf)


def test_modes_of_torch_are_other_kinds(q):
    """Fake tensors, tracers and transforms: what is kept would answer them with uninitialised memory."""
    one, inside = kind({"q": q}), []
    mode = FakeTensorMode()
    with mode:
        inside.append(matches(one, mode.from_tensor(q)))
        inside.append(matches(one, q))
    torch.func.vmap(lambda x: inside.append(matches(one, x)) or x)(q[None])
    torch.func.grad(lambda x: inside.append(matches(one, x)) or x.sum())(q)
    with torch.inference_mode():
        inside.append(matches(one, q))
    assert inside == [None] * 5
    assert matches(one, q)


def test_a_kind_can_be_of_one_size(q):
    sizes = matches(kind({"q": q}), q)
    one = kind({"q": q}, only=sizes)
    assert matches(one, q) == sizes
    assert not matches(one, torch.zeros(1, 2, 5, 16))


@pytest.mark.parametrize(("a", "b", "same"), [
    (1, 1, True), (1, True, False), (1, 1.0, False), ((1, (2, "a")), (1, (2, "a")), True),
    ((1, (2, "a")), (1, (2.0, "a")), False), ((1,), (1, 2), False), (float("nan"), 0.5, False),
    ("a", "b", False),
])  # fmt: skip
def test_identical(a, b, same):
    assert identical(a, b) is same


def test_only_plain_values_are_kept():
    import numpy as np

    assert plain_values((None, 1, 2.5, "x", True, (1, None), np.float64(0.125)))
    assert not plain_values((torch.ones(1),))
    assert not plain_values(((1, [2]),))


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(cache, "MAX_KINDS", 3)
    cache.forget()
    try:
        q = torch.zeros(1, 2, 4, 16)
        made = [kind({"q": q}, values=(number // 2, 0.5)) for number in range(5)]
        for one in made:
            cache.remember(one)
            cache.remember(one)
        assert (cache.every_kind(), cache.kinds("attention", (0, 0.5))) == (made[2:], ())
        assert (cache.kinds("attention", (1, 0.5)), cache.kinds("attention", ([], 0.5))) == ((made[3], made[2]), ())
        assert cache.kinds("decode_attention", (1, 0.5)) == ()
    finally:
        cache.forget()


def test_classes_of_sizes_are_bounded(monkeypatch):
    monkeypatch.setattr(cache, "MAX_CLASSES", 3)
    one = kind({"q": torch.zeros(1, 2, 4, 16)})
    classes: list[Any] = [type("Class", (), {"native": lambda self: None})() for _ in range(5)]
    for cached in classes:
        one.add(cached)
    assert one.classes == (classes[4], classes[3], classes[2])


def test_native_classes_of_sizes_are_bounded(monkeypatch):
    """The list is native.c's own, which moves what was used last to the front."""
    monkeypatch.setattr(cache, "MAX_CLASSES", 3)
    one, lists = kind({"q": torch.zeros(1, 2, 4, 16)}), []
    monkeypatch.setattr(CallKey, "_native", lambda self, cached: lists.append(self._natives) or "hit")
    for number in range(4):
        cached: Any = type("Class", (), {"native": lambda self, number=number: number})()
        one.add(cached)
    assert lists == [[3, 2, 1]], "one list, given once"
    assert one.hit == "hit"
    lists[0].insert(0, lists[0].pop())  # 1 was used
    one.add(type("Class", (), {"native": lambda self: 4})())  # type: ignore[arg-type]
    assert lists == [[4, 1, 3]]
