"""Gradients of the blockwise path: against those of the float64 oracle, and by gradcheck in float64."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from reference_cases import CHOSEN, PLACED, TERMS, problem

import portattn
from portattn.reference import blockwise
from portattn.schema.call import TENSORS, Call
from portattn.schema.problem import Problem
from portattn.testing.oracle import oracle
from portattn.testing.tolerance import nan_filled_memory, random_call
from portattn.testing.verdict import judge, judge_gradients

FEATURES = [*TERMS, *PLACED]
CASES = [
    *((op, feature) for op in ("dense", "padded", "varlen", "decode") for feature in FEATURES),
    *((op, feature) for op in ("paged", "paged_packed", "mla") for feature in ("plain", "causal_window", "all")),
    *(("sparse", feature) for feature in (*TERMS, *CHOSEN)), *((op, "dropout") for op in ("dense", "padded", "varlen")),
]  # fmt: skip
SMALLER = {"batch": 2, "head_dim": 8, "head_dim_v": 12}


def differentiated(call: Call, function, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gradients of a random function of output and LSE, by tensor name, for copies of the call's tensors."""
    leaves = {}
    for name in TENSORS:
        tensor = getattr(call, name)
        if tensor is not None and tensor.is_floating_point() and not (name == "v" and call.q_rope is not None):
            leaves[name] = tensor.detach().clone().to(dtype).requires_grad_()
    call = Call(**{field: getattr(call, field) for field in Call.__dataclass_fields__} | leaves)
    call.problem = msgspec.structs.replace(call.problem, needs_grad=True)
    if call.q_rope is not None:  # the values are the keys' first columns, and no tensor of their own
        call.v = call.k[..., : call.problem.head_dim_v]
    out, lse = function(call)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    lse_weight = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    loss = (out * weight).sum() + (lse.masked_fill(lse == float("-inf"), 0.0) * lse_weight).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def several_blocks(monkeypatch: pytest.MonkeyPatch, call: Call, rows: int, keys: int) -> None:
    monkeypatch.setattr(blockwise, "KEY_BLOCK", keys)
    monkeypatch.setattr(blockwise, "SCORE_ELEMENTS", keys * rows * call.problem.batch * call.problem.heads_q)


@pytest.mark.parametrize(("op", "feature"), CASES)
@pytest.mark.parametrize("blocks", ["one", "several"])
def test_gradients_are_those_of_the_definition(monkeypatch, op, feature, blocks):
    fields = SMALLER if op != "mla" else {"batch": 2}
    call = random_call(problem(op, "all" if feature == "dropout" else feature, **fields), seed=1)
    if feature == "dropout":
        call.dropout_p, call.dropout_seed = 0.4, torch.tensor([-(2**62) - 3])
    if blocks == "several":
        several_blocks(monkeypatch, call, 5, 7)
    ours = differentiated(call, blockwise.run, torch.float32)
    exact = differentiated(call, oracle, torch.float64)
    assert set(ours) >= {"q", "k"}
    for name, expected in exact.items():
        assert torch.isfinite(ours[name]).all(), name
        limit = 2e-5 * max(float(expected.abs().max()), 1.0) if expected.numel() else 0.0
        torch.testing.assert_close(ours[name].double(), expected, rtol=0.0, atol=limit, msg=name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("op", ["dense", "padded", "varlen"])
@pytest.mark.parametrize("feature", ["plain", "top_left_window", "all", "dropout"])
def test_gradients_are_within_the_budget(op: str, feature: str, dtype: str) -> None:
    """Which kernels are judged by, with NaN in the rows of grad_out and grad_lse that attend nothing."""
    call = random_call(problem(op, "all" if feature == "dropout" else feature, dtype=dtype), seed=6, extremes=True)
    if feature == "dropout":
        call.dropout_p, call.dropout_seed = 0.4, torch.tensor([12])
    leaves = {n: t.requires_grad_() for n in TENSORS if (t := getattr(call, n)) is not None and t.is_floating_point()}
    call = replace(call, problem=msgspec.structs.replace(call.problem, needs_grad=True))
    out, lse = blockwise.run(call)
    generator = torch.Generator().manual_seed(0)
    nothing = torch.isneginf(lse)
    grad_out = torch.randn(out.shape, generator=generator).to(out.dtype).masked_fill(nothing[..., None], float("nan"))
    grad_lse = torch.randn(lse.shape, generator=generator).masked_fill(nothing, float("nan"))
    found = dict(zip(leaves, torch.autograd.grad([out, lse], list(leaves.values()), [grad_out, grad_lse]), strict=True))
    facts = judge_gradients(call, found, grad_out, grad_lse)
    assert facts["wrong"] == 0
    assert facts["error"] <= facts["budget"], facts


@pytest.mark.parametrize(
    ("op", "sizes"),
    [("varlen", {}), ("paged_packed", {}), ("mla_packed", {}), ("dense", {"seq_q": 0}), ("dense", {"seq_k": 0})],
    ids=str,
)
def test_no_rows_and_no_keys_have_gradients_of_zero(op: str, sizes: dict) -> None:
    """Of packed ones all rows belong to no sequence, and so do all keys."""
    call = random_call(problem(op, "plain" if sizes else "sinks", **sizes), seed=2)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k"):
        if getattr(call, name) is not None:
            setattr(call, name, torch.zeros_like(getattr(call, name)))
    assert all(not gradient.any() for gradient in differentiated(call, blockwise.run, torch.float32).values())
    out, lse = blockwise.run(call)
    assert not out.any()
    assert torch.isneginf(lse).all()


def test_without_keys_a_sink_alone_has_a_gradient() -> None:
    call = random_call(problem("decode", "sinks", leftpad_k=False), seed=3)
    call.seqlens_k = torch.zeros_like(call.seqlens_k)
    found = differentiated(call, blockwise.run, torch.float32)
    assert found.pop("sinks").all()
    assert all(not gradient.any() for gradient in found.values())


# Two row blocks and three key blocks, GQA, values wider than keys; a last sequence that is shorter or empty.
TINY = {"batch": 2, "heads_q": 2, "heads_k": 1, "head_dim": 2, "head_dim_v": 3, "seq_q": 4, "seq_k": 6}
CHECKED = [
    *(("dense", feature) for feature in (*TERMS, *PLACED)),
    *((op, feature) for op in ("padded", "varlen") for feature in ("plain", "causal", "top_left", "window", "all")),
    *((op, "dropout") for op in ("dense", "padded", "varlen")),
]


def checked(call: Call, leaves: dict[str, torch.Tensor]) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """out and LSE as a function of these tensors, in float64; what gradcheck takes. An LSE of -inf counts as 0."""
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    rest = {n: t.double() for n in TENSORS if (t := getattr(call, n)) is not None and t.is_floating_point()}
    call = replace(call, problem=msgspec.structs.replace(call.problem, needs_grad=True), **rest)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = {n: t.expand(getattr(call, n).shape) for n, t in zip(leaves, tensors, strict=True)}
        out, lse = blockwise.run(replace(call, **given))
        assert out.dtype is lse.dtype is torch.float64
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    return function, tuple(leaves.values())


def tiny(monkeypatch: pytest.MonkeyPatch, op: str, feature: str, **fields: Any) -> tuple[Call, dict[str, torch.Tensor]]:
    """A call of TINY sizes, and the tensors of it that have gradients."""
    sizes = TINY | ({"total_q": 7, "total_k": 10} if op == "varlen" else {}) | fields
    call = random_call(problem(op, "all" if feature == "dropout" else feature, **sizes), seed=3, extremes=True)
    if feature == "dropout":
        call.dropout_p, call.dropout_seed = 0.4, torch.tensor([11])
    several_blocks(monkeypatch, call, 3, 2)
    return call, {n: t for n in TENSORS if (t := getattr(call, n)) is not None and t.is_floating_point()}


@pytest.mark.parametrize(("op", "feature"), CHECKED)
def test_gradcheck(monkeypatch: pytest.MonkeyPatch, op: str, feature: str) -> None:
    """All tensors at once, with NaN in padding."""
    function, leaves = checked(*tiny(monkeypatch, op, feature))
    assert torch.autograd.gradcheck(function, leaves, atol=1e-6)


@pytest.mark.parametrize("axes", list(itertools.product((True, False), repeat=4)), ids=str)
def test_gradcheck_of_a_broadcast_bias(monkeypatch: pytest.MonkeyPatch, axes: tuple[bool, ...]) -> None:
    call, leaves = tiny(monkeypatch, "dense", "bias")
    shape = [size if own else 1 for size, own in zip(call.bias.shape, axes, strict=True)]
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if axes == (True,) * 4:
        bias[:, :, 1, 2:] = float("-inf")
    function, checking = checked(call, {"k": leaves["k"], "bias": bias})
    assert torch.autograd.gradcheck(function, checking, atol=1e-6)


@pytest.mark.parametrize("op", ["dense", "varlen"])
def test_gradcheck_of_slopes_for_all_sequences(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    call, leaves = tiny(monkeypatch, op, "alibi")
    function, checking = checked(call, {"q": leaves["q"], "alibi_slopes": torch.tensor([0.3, 0.7])})
    assert torch.autograd.gradcheck(function, checking, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "feature"), [("dense", "plain"), ("dense", "all"), ("padded", "dropout"), ("varlen", "all")]
)
def test_gradgradcheck(monkeypatch: pytest.MonkeyPatch, op: str, feature: str) -> None:
    function, leaves = checked(*tiny(monkeypatch, op, feature, seq_q=3, seq_k=4, head_dim_v=2))
    assert torch.autograd.gradgradcheck(function, leaves, atol=1e-5)


def test_one_tensor_may_be_queries_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one may be computed from another: each way counts once, in second derivatives too."""
    call, leaves = tiny(monkeypatch, "dense", "causal", heads_k=2, seq_k=4, head_dim_v=2)
    call.problem = msgspec.structs.replace(call.problem, needs_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return blockwise.run(replace(call, q=x, k=x, v=x.sin()))[0]

    x = leaves["q"].double().requires_grad_()
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sinks", "alibi_slopes"])
def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    call, leaves = tiny(monkeypatch, "padded", "all")
    alone, all_of_them = checked(call, {wanted: leaves[wanted]}), checked(call, leaves)
    found = [
        torch.autograd.grad([x.sum() for x in function(*given)], given) for function, given in (alone, all_of_them)
    ]
    assert torch.equal(found[0][0], found[1][list(leaves).index(wanted)])


@pytest.mark.parametrize("result", [0, 1])
def test_of_one_result_alone(monkeypatch: pytest.MonkeyPatch, result: int) -> None:
    """Where the other one is not used, it counts as one with a gradient of 0."""
    function, leaves = checked(*tiny(monkeypatch, "varlen", "all"))
    results = function(*leaves)
    alone = torch.autograd.grad(results[result].sum(), leaves, retain_graph=True, allow_unused=True)
    both = torch.autograd.grad(results[result].sum() + 0.0 * results[1 - result].sum(), leaves)
    for a, b in zip(alone, both, strict=True):
        torch.testing.assert_close(torch.zeros_like(b) if a is None else a, b)


def test_what_is_written_to_before_the_backward_pass_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    call, leaves = tiny(monkeypatch, "padded", "plain")
    function, given = checked(call, leaves)
    out, _ = function(*given)
    call.seqlens_k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_drawn_dropout_has_the_gradients_of_what_it_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a seed: of values that are the identity, the output is the matrix that the gradient of V holds."""
    call, _ = tiny(monkeypatch, "dense", "plain", heads_k=2, head_dim_v=6)
    v = torch.eye(6).expand(2, 2, 6, 6).clone().requires_grad_()
    call = replace(call, problem=msgspec.structs.replace(call.problem, needs_grad=True), v=v, dropout_p=0.5)
    out, _ = blockwise.run(call)
    assert (out == 0).any()
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    (found,) = torch.autograd.grad(out, v, towards)
    torch.testing.assert_close(found, out.detach().transpose(2, 3) @ towards)


def test_a_backward_pass_inside_autocast_computes_in_the_dtype_of_the_forward() -> None:
    q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))
    out = portattn.attention(q, k, v, causal=True, backend="reference")
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out, (q, k, v), grad)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


DENSE: dict[str, Any] = {
    "op": "attention_backward", "batch": 3, "heads_q": 4, "heads_k": 2, "seq_q": 19, "seq_k": 37, "head_dim": 16,
    "dtype": "fp32",
}  # fmt: skip
PACKED = DENSE | {"op": "varlen_attention_backward", "total_q": 33, "total_k": 70}
LENGTHS = dict.fromkeys(("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k"), True)


@pytest.mark.parametrize("base", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"causal": "bottom_right", "grad_lse": True}, {"causal": "top_left", "window_left": 5}, {"dropout": True},
     {"softcap": True, "alibi_slopes": True, "grad_slopes": True}, {"dtype": "bf16", "head_dim_v": 24}], ids=str,
)  # fmt: skip
def test_gradients(base: dict[str, Any], fields: dict[str, Any]) -> None:
    right(Problem(**(base | fields)), seed=1, extremes=True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("poison", ["apart", "k", "v"])
def test_padding_masks_and_broadcast_biases(seed: int, poison: str) -> None:
    problem = Problem(**(DENSE | LENGTHS), causal="bottom_right", mask=True, bias=True, grad_bias=True)
    right(problem, seed, poison=poison)


def test_slopes_where_the_last_sequences_are_empty() -> None:
    """Their first rows would be behind the last one."""
    problem = Problem(**(PACKED | {"batch": 4, "seq_q": 2, "total_q": 2}), alibi_slopes=True, grad_slopes=True)
    assert any(call.cu_seqlens_q[-2] == 2 for call in [right(problem, seed) for seed in range(6)])


def right(problem: Problem, seed: int, **options: Any) -> Call:
    call = random_call(problem, seed, **options)
    with nan_filled_memory():
        delta, lse = blockwise.run_backward(call)
    assert lse is None
    facts = judge(call, delta, None)
    assert not facts["wrong"]
    assert facts["error"] <= facts["budget"], facts
    return call


@pytest.mark.parametrize("fault", ["no LSE's gradient", "the other row", "something where nothing is attended"])
def test_a_wrong_delta_is_seen(fault: str) -> None:
    """The gradients can be right beside it, where a kernel does not write the delta that it uses."""
    call = random_call(Problem(**DENSE, causal="bottom_right", grad_lse=True), 1)
    delta, _ = blockwise.run_backward(call)
    assert judge(call, delta, None)["wrong"] == 0
    if fault == "no LSE's gradient":
        delta = delta + call.grad_lse.masked_fill(torch.isneginf(call.forward_lse), 0.0)
    elif fault == "the other row":
        delta = delta.roll(1, dims=2)
    else:
        call.forward_lse[0, 0, 0] = -math.inf
        delta[0, 0, 0] = 1e-3
    facts = judge(call, delta, None)
    assert facts["error"] > facts["budget"] or facts["wrong"]
