"""Functions of scores: random programs with gradients, functions that are refused, values that change between calls."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from flex_cases import HEADS, KEYS, ROWS, Expression, assert_right, qkv, results, theirs

import portattn
from portattn.integrations.flex_attention import AuxRequest, create_block_mask, flex_attention

FLOATS, INTS = torch.randn(HEADS, KEYS), torch.arange(KEYS)
FACTOR = 1.0
LEARNED = torch.randn(HEADS, KEYS, requires_grad=True)


def check_program(seed: int, backend: str, learned: bool) -> None:
    made = Expression(seed)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        with portattn.settings(backend=backend):
            aux = AuxRequest(lse=True)
            out, (lse, _) = flex_attention(q, k, v, made.function(tensors), enable_gqa=True, return_aux=aux)
        return [out, lse]

    def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return list(theirs(q, k, v, made.function(tensors))[:2])

    given = [*qkv(), *made.tensors]
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in given]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of numbers that are computed of indices alone
    try:
        expected = results(right, wide, learned)
    finally:
        torch.set_default_dtype(before)
    same = results(right, given, learned)
    added = learned and backend == "interpreter"
    assert_right(results(ours, given, learned, added), expected, same, f"seed {seed}: {made.source}")


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    check_program(seed, "auto", learned=True)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(100, 112))
def test_random_programs_on_kernels(seed: int) -> None:
    """Of every second program captured tensors have gradients, too."""
    check_program(seed, "interpreter", learned=bool(seed % 2))
    assert portattn.last_backward_plan().path == "interpreter"


@pytest.mark.interpreter
def test_kernels_add_gradients_of_captured_tensors() -> None:
    """Of packed rows, transformed calls and divisors, too; in deterministic mode the reference computes them."""
    rows = torch.tensor([0, 20, 20, ROWS], dtype=torch.int32)
    packed = [tensor[0].transpose(0, 1) for tensor in qkv(keys=ROWS)]
    table = torch.randn(HEADS, 2 * ROWS).requires_grad_()

    def call(c: torch.Tensor) -> torch.Tensor:
        mod = lambda s, b, h, i, j: s % c[h, 3].exp() + c[h, i - j] + (torch.where(i > j, 1, 0) << 40 > 0)  # noqa: E731
        return portattn.varlen_attention(*packed, rows, rows, 20, 20, score_mod=mod, causal=True).square().sum()

    eagerly = lambda own: torch.autograd.grad(call(own), own)[0]  # noqa: E731
    with portattn.settings(backend="reference"):
        right = eagerly(table)
    for gradient, path in ((eagerly, "interpreter"), (torch.func.grad(call), "interpreter"), (eagerly, "reference")):
        with portattn.settings(backend="interpreter", deterministic=path == "reference"):
            torch.testing.assert_close(gradient(table), right, atol=1e-4, rtol=1e-4)
        assert portattn.last_backward_plan().path == path


POINTS, PARTS = torch.randn(KEYS, 3), torch.randint(0, 9, (KEYS, 3), dtype=torch.int32)
# Score functions that read rows of at most 16 elements: what they add to a score, or a factor.
OF_ROWS: dict[str, Callable[..., torch.Tensor]] = {
    "distance": lambda p, q, kv: -(p[q] - p[kv]).pow(2).sum(-1).sqrt(),
    "product": lambda p, q, kv: torch.dot(p[q], p[kv]) + p[q] @ p[kv] + (p[q] * 2 + 1)[-1],
    "norm": lambda p, q, kv: (p[q] - torch.tensor([0.5, 1.0, 2.0], dtype=p.dtype)).norm(),
    "extremes": lambda p, q, kv: p[q].max() + p[q].amin(-1) * p[kv].prod() - p[kv].mean(),
    "truths": lambda p, q, kv: torch.where((p[q] > p[kv]).all() | (PARTS[q] == PARTS[kv]).any(-1), 1.0, -1.0),
    "whole": lambda p, q, kv: (PARTS[q] + 70_000).prod() * 1e-15,  # past int32
    "counts": lambda p, q, kv: (PARTS[q] == PARTS[kv]).sum() * 0.25 + PARTS[q].clamp(max=2).float().sum() / 8,
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_of_a_captured_tensor(name: str) -> None:
    """Element by element, with gradients of the tensor."""

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, points: torch.Tensor) -> list[torch.Tensor]:
        mod = lambda s, b, h, q, kv: s + OF_ROWS[name](points, q, kv)  # noqa: E731
        out, aux = flex_attention(q, k, v, mod, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return [out, aux.lse]

    def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, points: torch.Tensor) -> list[torch.Tensor]:
        rows = range(q.shape[2])
        added = torch.stack([torch.stack([OF_ROWS[name](points, i, j) for j in range(KEYS)]) for i in rows])
        scores = q @ k.repeat_interleave(2, 1).mT * q.shape[3] ** -0.5 + added
        return [scores.softmax(-1) @ v.repeat_interleave(2, 1), scores.logsumexp(-1)]

    given = [*qkv(), POINTS]
    assert_right(results(ours, given), results(right, [t.double() for t in given]), results(right, given), name)


def written(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    FLOATS.add_(1)
    return s


def assigned(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    FLOATS[0, 0] = 1.0
    return s


def into(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    torch.add(s, 1, out=FLOATS)
    return s


def branching(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s if q >= kv else -s


def read(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s * q.item()


def elsewhere(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + torch.empty(KEYS, device="meta")[kv]


FILE = "test_flex_attention_functions.py"
MANY = [torch.randn(2) for _ in range(5)]
WIDE = [torch.randn(2, 2, 2) for _ in range(3)]
Bad = tuple[Callable[..., Any], str]
# Score functions, and words of the error; {} stands for the line of the function's only statement.
REFUSED: dict[str, Bad] = {
    "written": (written, f"{FILE}:{{}}: add_ writes to a tensor that the function has not made"),
    "assigned": (assigned, f"{FILE}:{{}}: copy_ writes to a tensor that the function has not made"),
    "into": (into, f"{FILE}:{{}}: add writes to a tensor that the function has not made"),
    "branch": (branching, f"{FILE}:{{}}: the value of a tensor decides"),
    "read": (read, f"{FILE}:{{}}: the value of a tensor decides"),
    "elsewhere": (elsewhere, "reads a tensor (45,) on meta', but must read tensors on query's device, cpu"),
    "arguments": (lambda s, b, h, q: s, "score_mod is '(s, b, h, q)', but must take 5 arguments"),
    "no function": (5, "score_mod is 'int', but must be a function of (score, b, h, q_idx, kv_idx)"),  # type: ignore[dict-item]
    "text": ("causal", "score_mod is 'str', but must be a function, or a program of one"),  # type: ignore[dict-item]
    "integer": (lambda s, b, h, q, kv: q - kv, "must return a floating-point score; it returns an int32"),
    "bool": (lambda s, b, h, q, kv: s > 0, "must return a floating-point score; it returns a bool"),
    "nothing": (lambda s, b, h, q, kv: None, "it returns a NoneType"),
    "two": (lambda s, b, h, q, kv: (s, s), "it returns a tuple"),
    "row": (lambda s, b, h, q, kv: s + FLOATS[h].sum(), "(4, 45) needs an index for each axis, but for a last one"),
    "scan": (lambda s, b, h, q, kv: s + POINTS[q].cumsum(0)[1], "aten.cumsum.default is no operation on single scores"),
    "rows": (lambda s, b, h, q, kv: s + (POINTS[q] * torch.ones(2)).sum(), "mul of rows of 3 and 2 elements"),
    "order": (lambda s, b, h, q, kv: s + torch.linalg.vector_norm(POINTS[q], 0), "aten.linalg_vector_norm.default is"),
    "slice": (lambda s, b, h, q, kv: s + FLOATS[h, :][kv], "is sliced: give an index for each axis"),
    "float index": (lambda s, b, h, q, kv: s + FLOATS[h, kv / 2], "an index is no integer"),
    "too many indices": (lambda s, b, h, q, kv: s + FLOATS[b, h, kv], "a captured tensor (4, 45) has 3 indices"),
    "tensors": (lambda s, b, h, q, kv: s + sum(t[b] for t in MANY), "5 tensors of 5 axes"),
    "axes": (lambda s, b, h, q, kv: s + sum(t[b, b, b] for t in WIDE), "3 tensors of 9 axes"),
    "random": (lambda s, b, h, q, kv: s + torch.rand(3)[b], "rand draws random numbers"),
    "learned": (lambda s, b, h, q, kv: s + (LEARNED * 2)[h, kv], "compute with it outside of the function"),
    "view": (lambda s, b, h, q, kv: s + FLOATS[h].view(9, 5)[b, b], "view of a captured tensor that has an index"),
    "list": (lambda s, b, h, q, kv: s * FLOATS.tolist()[0][0], "the value of a tensor decides"),
    "shared": (lambda s, b, h, q, kv: s.detach().add_(1), "add_ writes to a tensor that the function has not made"),
    "bits": (lambda s, b, h, q, kv: s * (s & 1), "bitwise_and takes no floating-point number"),
    "operation": (lambda s, b, h, q, kv: torch.erfinv(s), "aten.erfinv.default is no operation on single scores"),
    "wide": (lambda s, b, h, q, kv: s + (q + 2**31), "the constant 2147483648 does not fit int32 (hint: q_idx.long())"),
    "wide cast": (lambda s, b, h, q, kv: s + (torch.tensor(2**40).int() + q), "1099511627776 does not fit int32"),
    "complex": (lambda s, b, h, q, kv: s * torch.ones(3, dtype=torch.complex64)[b].real, "complex64"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_is_refused_in_a_sentence(name: str) -> None:
    function, words = REFUSED[name]
    line = getattr(getattr(function, "__code__", None), "co_firstlineno", 0) + 1
    q, k, v = qkv(heads=HEADS)
    kept = FLOATS.clone()
    with pytest.raises(portattn.ArgumentError) as raised:
        flex_attention(q, k, v, function)
    assert words.format(line) in str(raised.value)
    assert str(raised.value).count("\n") == 0
    assert torch.equal(FLOATS, kept)
    if name not in ("arguments", "no function", "text", "elsewhere", "tensors", "axes"):
        assert f"{FILE}:" in str(raised.value)


def test_a_mask_function_is_refused_in_a_sentence() -> None:
    q, k, v = qkv(heads=HEADS)
    for function, words in ((lambda b, h, q, kv: q - kv, "must return a bool; it returns an int32"),
                            (lambda b, h, q, kv: q.item() > 3, "the value of a tensor decides")):  # fmt: skip
        with pytest.raises(portattn.ArgumentError, match=words):
            portattn.attention(q, k, v, mask_mod=function)


@pytest.mark.parametrize("text", [
    "t0 f add score\nout t0", "t0 f neg score 1.0\nout t0", "t0 f load q_idx\nout t0", "c0 f 1 0\nout c0",
    "c0 f 9 0\nt0 f load c0 b\nout t0", "t0 f mul grad 2.0\nout t0", "t0 f mul score 007\nout t0",
    "t0 f mul score \u0663\nout t0", "t0 f neg score\nt0 f neg t0\nout t0", "t0 f mul score exit()\nout t0",
])  # fmt: skip
def test_a_malformed_program_is_refused(text: str) -> None:
    with pytest.raises(portattn.ArgumentError, match="score_mod is"):
        portattn.attention(*qkv(heads=HEADS), score_mod=text)
    with pytest.raises(portattn.ArgumentError, match="mask_mod is"):
        portattn.attention(*qkv(heads=HEADS), mask_mod="t0 b gt score 0.0\nout t0")


def test_an_exception_of_the_function_is_raised() -> None:
    with pytest.raises(KeyError, match="own"):
        flex_attention(*qkv(heads=HEADS), Mock(side_effect=KeyError("own")))


def test_what_a_function_writes_to_is_its_own() -> None:
    def added(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        s = s * 2
        s += FLOATS[h, kv]
        return s.masked_fill_(q < kv, -1.0)

    q, k, v = qkv(heads=HEADS)
    right = theirs(q, k, v, lambda s, b, h, q, kv: torch.where(q < kv, -1.0, 2 * s + FLOATS[h, kv]))[0]
    torch.testing.assert_close(flex_attention(q, k, v, added), right, atol=1e-5, rtol=1e-5)


def imported(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    from test_flex_attention_functions import FACTOR

    return s * FACTOR


class Scaled:
    def __init__(self) -> None:
        self.factor, self.table = 1.0, torch.ones(KEYS)

    offset = 0.0

    def __call__(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.scaled(s) + (self.table * 2)[kv] + Scaled.offset * kv

    def scaled(self, s: Any) -> Any:
        return s * self.factor


def test_a_later_call_sees_values_that_changed() -> None:
    """A list, an attribute, a tensor in place and another, a default, and a tensor computed of another."""
    q, k, v = qkv(heads=HEADS)
    factors, table, own = [1.0], torch.ones(KEYS), Scaled()

    def of_list(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * factors[0] + table[kv] * table.sum()

    def of_default(*, factor: float) -> Any:
        return functools.partial(lambda s, b, h, q, kv, *, factor: s * factor, factor=factor)

    def keyword(factor: float) -> Any:
        def function(s: Any, b: Any, h: Any, q: Any, kv: Any, *, factor: float = factor) -> Any:
            return s * factor

        return function

    def differs(first: Any, then: Callable[[], Any], second: Any) -> None:
        before = flex_attention(q, k, v, first)
        assert torch.equal(flex_attention(q, k, v, first), before)
        then()
        assert not torch.equal(flex_attention(q, k, v, second), before)

    differs(of_list, lambda: factors.__setitem__(0, 3.0), of_list)
    differs(of_list, lambda: table.mul_(torch.arange(KEYS)), of_list)
    differs(own, lambda: setattr(own, "factor", 3.0), own)
    differs(own, lambda: own.table.mul_(torch.arange(KEYS)), own)
    differs(own, lambda: setattr(own, "table", torch.rand(KEYS)), own)
    differs(own, lambda: setattr(Scaled, "offset", 0.5), own)
    leaky, module = torch.nn.LeakyReLU(0.1), types.ModuleType("settings_of_a_caller")
    vars(module).update(factors=[1.0])
    of_default_value = eval("lambda s, b, h, q, kv, c=1.0: s * c")
    differs(lambda s, *_: leaky(s), lambda: setattr(leaky, "negative_slope", 0.9), lambda s, *_: leaky(s))
    of_module = lambda s, b, h, q, kv: s * module.factors[0]  # noqa: E731
    differs(of_module, lambda: module.factors.__setitem__(0, 3.0), of_module)
    differs(of_default_value, lambda: setattr(of_default_value, "__defaults__", (3.0,)), of_default_value)
    differs(of_default(factor=1.0), lambda: None, of_default(factor=2.0))
    differs(keyword(1.0), lambda: None, keyword(2.0))


def test_a_trace_is_of_all_values_that_a_function_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of functions with the same code, attributes that another function reads, cycles, a dict's method."""
    (q, k, v), own, values = qkv(heads=HEADS), Scaled(), {"factor": 1.0}
    times = lambda c: lambda s, *_: s * c  # noqa: E731
    first, second = map(times, (1.0, 3.0))
    chain = lambda f, g, h: lambda s, *_: f(g(h(s)))  # noqa: E731
    of_object = lambda a, read: lambda s, *_: s * read(a)  # noqa: E731
    own.own = own  # type: ignore[attr-defined]
    calls: dict[str, Callable[[], Any]] = {
        "order": lambda: chain(first, second, [first, second][own.factor > 1]),
        "attribute": lambda: of_object(own, lambda one: one.factor),
        "cycle": lambda: of_object(own, lambda one: one.own.own.factor),
        "method": lambda: of_object(values.get, lambda get: get("factor")),
        "import": lambda: imported,
        "globals": lambda: lambda s, *_: s * globals()["FACTOR"],
    }
    before = {name: flex_attention(q, k, v, call()) for name, call in calls.items()}
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    own.factor = values["factor"] = 3.0
    for name, call in calls.items():
        right = flex_attention(3 * q, k, v, times(3.0 if name == "order" else 1.0))
        torch.testing.assert_close(flex_attention(q, k, v, call()), right, msg=name)
        assert not torch.equal(before[name], right)


@pytest.mark.parametrize("transform", ["none", "grad"])
def test_operations_on_whole_numbers_are_torchs(transform: str) -> None:
    """Bits of numbers that are no bools, logic of any numbers, narrow and wide ones, and powers of negative scores."""
    (q, k, v), zero = qkv(heads=HEADS), torch.zeros(())
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(KEYS)
    u8, i8, i16 = ((torch.arange(KEYS) * 5).to(dtype) for dtype in (torch.uint8, torch.int8, torch.int16))

    def function(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = s + (u8[i] - u8[j]) * 0.01 + (u8[j] - 1 > u8[i] * 7) + (~i8[j] << 6) * 1e-3 + (i16[j] * i16[i] * 9) * 1e-5
        bits = (~i) * 0.1 + torch.logical_and(i % 4, j % 3) + torch.logical_or(i % 4, j % 3) * 2
        wide, narrow = torch.tensor(2**29) * 9, torch.tensor(2**29, dtype=torch.int32) * 9
        bits = bits + (i < wide) + (i < narrow) + narrow * 1e-9 + (2**40 + torch.tensor(3) + i * 7 - j) % 1000 * 1e-3
        return s**9 * 1e-3 + bits + (i - j).to(torch.uint8) * 0.01 + ((2 ** (i % 5)) & j) * 0.1

    call = lambda x: portattn.attention(q + x, k, v, score_mod=function).sum()  # noqa: E731
    found = call(zero) if transform == "none" else torch.func.grad_and_value(call)(zero)[1]
    scores = function((q.double() @ k.double().mT) * q.shape[3] ** -0.5, 0, 0, rows, keys)
    torch.testing.assert_close(found, (scores.softmax(-1) @ v.double()).sum().float(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("blocks", [False, True])
def test_each_of_vmaps_masks_has_its_own_blocks(blocks: bool) -> None:
    q, k, v = (torch.randn(1, 1, 300, 16) for _ in range(3))
    documents = torch.arange(300) // torch.tensor([[100], [7]])

    def attend(own: Any) -> Any:
        same = lambda b, h, i, j: own[i] == own[j]  # noqa: E731
        if blocks:
            return flex_attention(q, k, v, block_mask=create_block_mask(same, None, None, 300, 300, "cpu"))
        return portattn.attention(q, k, v, mask_mod=same)

    torch.testing.assert_close(torch.vmap(attend)(documents), torch.stack([attend(own) for own in documents]))


def test_tensors_of_inference_beside_gradients() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv(heads=HEADS))
    with torch.inference_mode():
        table = torch.randn(KEYS)
    plus = lambda made: lambda s, b, h, i, j: s + made[j]  # noqa: E731
    found, right = (flex_attention(q, k, v, plus(made)) for made in (table, table.clone()))
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), q) for out in (found, right)))


def test_lists_of_blocks_follow_a_tensors_data() -> None:
    q, k, v = (torch.randn(1, 1, 300, 16) for _ in range(3))
    document = torch.arange(300) // 200
    own, other, third = document, torch.arange(300) // 10, torch.arange(300) // 70
    for write in (lambda: own, lambda: setattr(document, "data", other), lambda: document.copy_(third)):
        write()
        found = portattn.attention(q, k, v, mask_mod=lambda b, h, i, j: document[i] == document[j])
        right = portattn.attention(q, k, v, mask=document[:, None] == document)
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
