"""SDPA as a vendor path, on the CPU or on the GPU where there is one: numbers, gradients, and every refusal."""

import itertools
import warnings
from typing import Any

import msgspec
import pytest
import torch
from oracle64 import assert_close, masked_attention, oracle, random_call, visible_keys

from portattn.backends.sdpa import MAX_HEAD_DIM, SdpaPath
from portattn.config import Settings
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.problem import Problem
from portattn.testing import tolerance as check

pytestmark = pytest.mark.on_device
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SM_90 = parse_target("cuda:sm_90", toolchain="triton==3.6.0")
MI300 = parse_target("rocm:gfx942", toolchain="triton==3.6.0")
BASE = Problem(batch=2, heads_q=4, heads_k=4, seq_q=5, seq_k=7, head_dim=16)


def problem(**changes):
    return msgspec.structs.replace(BASE, **{"head_dim_v": changes.get("head_dim", 16), **changes})


SIZES = [(5, 5), (3, 7), (1, 9), (1, 1), (33, 65), (7, 3)]
HEADS = [(4, 4), (4, 1), (6, 2)]
CAUSAL = ("none", "top_left", "bottom_right")
# Fields and the scale of each problem: sizes and heads, widths of heads, and scales of any sign.
CASES: list[tuple[dict[str, Any], float | None]] = [
    ({"causal": causal, "seq_q": q, "seq_k": k, "heads_q": heads[0], "heads_k": heads[1],
      "layout": "bshd" if q % 2 else "bhsd"}, None)
    for causal, (q, k), heads in itertools.product(CAUSAL, SIZES, HEADS) if causal != "bottom_right" or q <= k
] + [
    ({"causal": causal, "head_dim": dims[0], "head_dim_v": dims[1], "heads_q": 6, "heads_k": 2, "seq_q": 17,
      "seq_k": 33}, None)
    for causal, dims in itertools.product(CAUSAL, ((24, 24), (16, 40), (20, 8), (256, 256)))
] + [
    ({"causal": causal, "seq_q": 19, "seq_k": 40}, scale)
    for causal, scale in itertools.product(CAUSAL, (-0.7, 0.0, 2.0))
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("fields", "scale"), CASES, ids=str)
def test_forward(fields, scale, dtype):
    p = problem(**fields, dtype=dtype)
    assert SdpaPath().rejects(p, SM_90) is None
    call = random_call(p, scale=scale, device=DEVICE)
    out, lse = SdpaPath().run(call)
    assert lse is None
    assert out.dtype == call.q.dtype
    assert_close(out, oracle(call)[0], call)


@pytest.mark.parametrize("strides", ["spare", "transposed", "sliced"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_strides(strides, heads, dtype):
    """Rows that begin anywhere: torch's own kernels do not check where."""
    p = problem(causal="bottom_right", heads_q=heads[0], heads_k=heads[1], seq_q=21, seq_k=37, dtype=dtype)
    assert_right(check.random_call(p, 1, device=DEVICE, strides=strides))


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_gradients(causal, heads, dtype):
    p = problem(causal=causal, heads_q=heads[0], heads_k=heads[1], seq_q=6, seq_k=10, dtype=dtype, needs_grad=True)
    call = random_call(p, device=DEVICE)
    out, _ = SdpaPath().run(call)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(weight.to(out))

    exact = [getattr(call, n).detach().double().cpu().requires_grad_() for n in "qkv"]
    seen = visible_keys(p.seq_q, p.seq_k, causal).expand(p.batch, -1, -1)
    expected, _ = masked_attention(exact[0], exact[1], exact[2], call.scale, seen)
    expected.backward(weight.to(out.dtype).double())
    tolerance = 5e-6 if dtype == "fp32" else 2e-2
    for name, reference in zip("qkv", exact, strict=True):
        grad = getattr(call, name).grad
        torch.testing.assert_close(grad.double().cpu(), reference.grad, rtol=tolerance, atol=tolerance)


def test_bottom_right_is_an_explicit_mask_on_rocm(monkeypatch):
    """There torch's lower-right marker would reach a kernel that aligns at the top left."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43484-123eb5128")
    given: list[Any] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        given.append(kwargs.get("attn_mask"))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    call = random_call(problem(causal="bottom_right", seq_q=3, seq_k=8), device=DEVICE)
    out, _ = SdpaPath().run(call)
    assert_close(out, oracle(call)[0], call)
    assert type(given[0]) is torch.Tensor
    assert torch.equal(given[0].cpu(), visible_keys(3, 8, "bottom_right"))


def test_no_warning_and_no_mask_where_every_key_is_seen(monkeypatch):
    given: list[dict[str, Any]] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        given.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SdpaPath().run(random_call(problem(causal="bottom_right", seq_q=1, seq_k=9), device=DEVICE))
    assert "attn_mask" not in given[0]
    assert "is_causal" not in given[0]


# Seeds give bias and mask four broadcast shapes: whole, (1, 1, Sq, Sk), (B, 1, 1, Sk) and (1, Hq, 1, 1). Rows that
# attend nothing are among them, and so are keys that no row attends, which hold NaN.
GIVEN = [{"mask": True}, {"bias": True}, {"bias": True, "mask": True}]
BROADCAST = range(4)


@pytest.mark.parametrize("seed", BROADCAST)
@pytest.mark.parametrize("given", GIVEN, ids=" ".join)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_bias_and_mask(given, heads, dtype, seed):
    p = problem(heads_q=heads[0], heads_k=heads[1], seq_q=21, seq_k=37, head_dim_v=24, dtype=dtype, **given)
    assert SdpaPath().rejects(p, SM_90) is None
    call = check.random_call(p, seed, device=DEVICE, strides=("plain", "transposed", "sliced", "spare")[seed])
    assert_right(call)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
@pytest.mark.parametrize("given", GIVEN, ids=" ".join)
def test_bias_and_mask_with_scales_of_any_sign(given, scale):
    assert_right(check.random_call(problem(seq_q=9, seq_k=20, **given), 1, device=DEVICE, scale=scale))


def test_a_float32_bias_is_not_rounded():
    """Biases of 100 and 100.1 are the same in bf16, and weights of e^0 and e^0.1 are not."""
    call = check.random_call(problem(seq_q=3, seq_k=2, dtype="bf16", bias=True), 1, device=DEVICE)
    call.q, call.bias = call.q * 0.0, torch.tensor([100.0, 100.1], device=DEVICE).expand(2, 4, 3, 2)
    assert_right(call)


def test_a_single_last_row_may_be_causal_beside_a_mask():
    p = problem(causal="bottom_right", seq_q=1, seq_k=9, mask=True)
    assert SdpaPath().rejects(p, SM_90) is None
    assert_right(check.random_call(p, 2, device=DEVICE))


def assert_right(call):
    out, lse = SdpaPath().run(call)
    assert lse is None
    assert out.dtype == call.q.dtype
    facts = check.judge(call, out, None)
    assert not facts["wrong"]
    assert facts["error"] <= facts["budget"]


@pytest.mark.parametrize("seed", BROADCAST)
@pytest.mark.parametrize("given", GIVEN, ids=" ".join)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_gradients_through_bias_and_mask(given, heads, dtype, seed):
    """Of q, k, v and the bias itself; 0 for keys that no row attends, although they hold NaN."""
    p = problem(heads_q=heads[0], heads_k=heads[1], seq_q=21, seq_k=37, dtype=dtype, needs_grad=True, **given)
    call = check.random_call(p, seed, device=DEVICE)
    names = ["q", "k", "v", *(["bias"] if p.bias else [])]
    if p.bias:
        held = call.bias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in call.bias.stride())]
        ours = {"bias": held.contiguous()}
        call.bias = ours["bias"].requires_grad_().expand_as(call.bias)
    else:
        ours = {}
    ours |= {n: getattr(call, n).requires_grad_() for n in "qkv"}
    out, _ = SdpaPath().run(call)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    out.backward(weight)

    exact = {n: ours[n].detach().double().nan_to_num(0.0).requires_grad_() for n in names}
    scores = exact["q"] @ exact["k"].repeat_interleave(p.group, 1).transpose(-1, -2) * call.scale
    keep = torch.ones_like(scores, dtype=torch.bool) if call.mask is None else call.mask
    if p.bias:
        keep = keep & (call.bias != float("-inf"))
        scores = scores + exact["bias"]
    idle = ~keep.any(dim=3, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~keep, float("-inf")).masked_fill(idle, 0.0), dim=3).masked_fill(idle, 0)
    (weights @ exact["v"].repeat_interleave(p.group, 1)).backward(weight.double())
    tolerance = 1e-5 if dtype == "fp32" else 3e-2
    for name in names:
        grad, reference = ours[name].grad, exact[name].grad
        torch.testing.assert_close(grad.double(), reference, rtol=tolerance, atol=tolerance)


REFUSED = [
    ({"op": "decode_attention", "seqlens_k": True}, ["decode_attention", "no cache"]),
    ({"op": "varlen_attention", "total_q": 9, "total_k": 9}, ["varlen_attention", "no packed sequences"]),
    ({"op": "paged_attention", "page_size": 16}, ["paged_attention"]),
    ({"op": "sparse_attention", "seq_q": 1, "tokens": 4}, ["sparse_attention"]),
    ({"op": "mla_attention", "heads_k": 1, "page_size": 16}, ["mla_attention"]),
    ({"window_left": 3, "window_right": 0}, ["window (3, 0) asked for", "has none"]),
    ({"softcap": True, "alibi_slopes": True}, ["softcap, alibi_slopes asked for"]),
    ({"sinks": True, "mask": True}, ["sinks asked for"]),
    ({"mask": True, "bias": True, "causal": "bottom_right"}, ["bottom_right beside bias, mask", "5 × 7"]),
    ({"mask": True, "causal": "top_left", "seq_q": 1}, ["top_left beside mask"]),
    ({"seqlens_k": True}, ["seqlens_k given"]),
    ({"seqlens_q": True, "leftpad_q": True}, ["seqlens_q, leftpad_q given"]),
    ({"leftpad_k": True}, ["leftpad_k given"]), ({"return_lse": True}, ["return_lse is True"]),
    ({"dropout": True}, ["dropout_p > 0", "not by dropout_seed"]),
    ({"head_dim": 576, "head_dim_v": 512}, ["head_dim is 576", f"up to {MAX_HEAD_DIM}"]),
    ({"head_dim": 64, "head_dim_v": 288}, ["head_dim is 288", f"up to {MAX_HEAD_DIM}"]),
    ({"causal": "bottom_right", "seq_q": 9, "seq_k": 4}, ["seq_q 9", "seq_k 4", "first 5 rows"]),
    ({"seq_k": 0}, ["seq_k is 0"]), ({"seq_q": 0}, ["seq_q is 0"]), ({"batch": 0}, ["batch is 0"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "fragments"), REFUSED)
@pytest.mark.parametrize("target", [SM_90, MI300])
def test_refusals_name_value_and_limit(changes, fragments, target):
    rejection = SdpaPath().rejects(problem(**changes), target)
    assert rejection.path == "sdpa"
    assert rejection.hint
    for fragment in fragments:
        assert fragment in rejection.reason


@pytest.mark.parametrize("target", [SM_90, MI300])
@pytest.mark.parametrize("given", [{}, {"causal": "bottom_right"}, *GIVEN], ids=str)
def test_training_is_planned_on_sdpa_where_no_kernel_runs_or_by_name(target, given):
    p = problem(needs_grad=True, dtype="fp16", **given)
    assert any(note.startswith("gradients by ") for note in plan(p, target).notes)
    assert plan(p, target, settings=Settings(backend="sdpa")).path == "sdpa"
    assert plan(p, parse_target(target.name, toolchain="none")).path == "sdpa"


@pytest.mark.parametrize("target", [SM_90, MI300])
def test_dropout_is_never_planned_on_sdpa(target):
    p = problem(needs_grad=True, dropout=True, causal="bottom_right")
    assert plan(p, target).path == "triton"
    without_compiler = plan(p, parse_target(target.name, toolchain="none"))
    assert without_compiler.path == "reference"
    assert {no.path for no in without_compiler.rejected} >= {"triton", "sdpa"}
