"""torch_npu's attention functions as vendor paths, against a stand-in that checks every argument."""

import inspect
import math
import sys
from typing import Any

import msgspec
import pytest
import torch
from oracle64 import DTYPES, LOSSES, assert_close, gradients, oracle, random_call
from recorded_torch_npu import RecordedTorchNpu

from portattn import attention
from portattn.api import dispatch
from portattn.backends.ascend import NpuFusedInferAttentionScore, NpuFusionAttention, compressed_causal_mask
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.problem import Problem

FUSION, INFER = NpuFusionAttention(), NpuFusedInferAttentionScore()
B2 = parse_target("ascend:ascend910b2", toolchain="triton-ascend==3.2.0")
A3 = parse_target("ascend:ascend910_93", toolchain="triton-ascend==3.2.0")
P310 = parse_target("ascend:ascend310p", toolchain="triton-ascend==3.2.0")
BASE = Problem(batch=2, heads_q=4, heads_k=4, seq_q=5, seq_k=7, head_dim=16)


def problem(**changes: Any) -> Problem:
    return msgspec.structs.replace(BASE, **{"head_dim_v": changes.get("head_dim", 16), **changes})


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> RecordedTorchNpu:
    stand_in = RecordedTorchNpu()
    monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
    return stand_in


def test_the_stand_in_has_the_published_signatures() -> None:
    fusion = inspect.signature(RecordedTorchNpu.npu_fusion_attention).parameters
    assert list(fusion)[1:6] == ["query", "key", "value", "head_num", "input_layout"]
    assert fusion["scale"].default == fusion["keep_prob"].default == 1.0
    infer = inspect.signature(RecordedTorchNpu.npu_fused_infer_attention_score).parameters
    keyword_only = [n for n, p in infer.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert list(infer)[1:4] == ["query", "key", "value"]
    assert keyword_only == list(infer)[4:]
    assert infer["input_layout"].default == "BSH"


# Training and dense attention


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("sizes", [(5, 5), (3, 7), (1, 9), (33, 65)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_fusion_attention(causal, sizes, heads, dtype, npu):
    layout = "bshd" if heads[0] == 6 else "bhsd"
    p = problem(causal=causal, seq_q=sizes[0], seq_k=sizes[1], heads_q=heads[0], heads_k=heads[1], dtype=dtype)
    p = msgspec.structs.replace(p, return_lse=True, layout=layout)
    assert FUSION.rejects(p, B2) is None
    call = random_call(p)
    out, lse = FUSION.run(call)
    expected, expected_lse = oracle(call)
    assert out.dtype == call.q.dtype
    assert_close(out, expected, call)
    assert lse.dtype == torch.float32
    assert lse.shape == (p.batch, p.heads_q, p.seq_q)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    assert [name for name, _ in npu.calls] == ["npu_fusion_attention"]


def test_fusion_attention_gives_no_lse_unasked(npu: RecordedTorchNpu) -> None:
    assert FUSION.run(random_call(problem()))[1] is None


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize(("heads_k", "scale", "dtype"), [(4, None, "fp32"), (2, -0.3, "fp32"), (1, 0.5, "bf16")])
def test_fusion_attention_is_differentiable(loss, causal, heads_k, scale, dtype, npu):
    p = problem(causal=causal, dtype=dtype, needs_grad=True, return_lse=True, heads_k=heads_k, layout="bshd")
    assert FUSION.rejects(p, B2) is None
    call = random_call(p, scale=scale)
    LOSSES[loss](*FUSION.run(call)).backward()
    exact, plain = gradients(call, loss), gradients(call, loss, DTYPES[dtype])
    tiny = {"fp32": 1e-5, "bf16": 1e-2}[dtype]
    for name, reference, rounded in zip("qkv", exact, plain, strict=True):
        found = getattr(call, name).grad
        if loss == "lse" and name == "v":
            assert found is None
            continue
        budget = 2 * float((rounded.double() - reference).abs().max()) + tiny
        assert float((found.double() - reference).abs().max()) <= budget, name
    # The LSE's gradient is computed where a loss depends on the LSE alone.
    assert len(npu.calls) == (1 if loss == "out" else 2)


@pytest.mark.parametrize("tensor", ["q", "k", "v"])
def test_the_lse_has_the_gradient_of_one_tensor_alone(tensor: str, npu: RecordedTorchNpu) -> None:
    call = random_call(problem(dtype="fp32", needs_grad=True, return_lse=True))
    exact = gradients(call, "out and lse")["qkv".index(tensor)]
    for name in "qkv":
        getattr(call, name).requires_grad_(name == tensor)
    LOSSES["out and lse"](*FUSION.run(call)).backward()
    torch.testing.assert_close(getattr(call, tensor).grad.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", ["backward", "func.grad", "autocast"])
@pytest.mark.filterwarnings("ignore::portattn.errors.FallbackWarning")
def test_gradients_of_a_public_call(transform: str, npu: RecordedTorchNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler = parse_target("ascend:ascend910b2", toolchain="none")
    monkeypatch.setattr(dispatch, "detect_target", lambda device_type, index: (without_compiler, ""))
    call = random_call(problem(dtype="fp32", causal="bottom_right", needs_grad=True, heads_k=2))
    tensors = call.q, call.k, call.v

    def loss(*given: torch.Tensor) -> torch.Tensor:
        return LOSSES["out and lse"](*attention(*given, causal=True, return_lse=True, backend="vendor"))

    if transform == "func.grad":
        found = torch.func.grad(loss, argnums=(0, 1, 2))(*(tensor.detach() for tensor in tensors))
    elif transform == "autocast":
        made = loss(*tensors)
        with torch.autocast("cpu", torch.bfloat16):  # begun inside the block, and still in float32
            found = torch.autograd.grad(made, tensors)
    else:
        found = torch.autograd.grad(loss(*tensors), tensors)
    assert npu.calls
    for ours, exact in zip(found, gradients(call, "out and lse"), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_compressed_mask_is_made_once_and_is_no_inference_tensor() -> None:
    compressed_causal_mask.cache_clear()
    with torch.inference_mode():
        mask = compressed_causal_mask(torch.device("cpu"))
    assert not mask.is_inference()
    assert compressed_causal_mask(torch.device("cpu")) is mask
    assert not mask[7, 7]
    assert mask[7, 8]


# Inference: decode, and right-padded sequences


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("sizes", [(5, 5), (3, 7), (1, 9), (33, 65), (7, 3)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_infer_dense(causal, sizes, heads, dtype, npu):
    layout = "bshd" if heads[0] == 6 else "bhsd"
    p = problem(causal=causal, seq_q=sizes[0], seq_k=sizes[1], heads_q=heads[0], heads_k=heads[1], dtype=dtype)
    p = msgspec.structs.replace(p, return_lse=True, layout=layout)
    if causal == "top_left" and sizes[0] == 1:
        assert INFER.rejects(p, B2) is not None
        return
    assert INFER.rejects(p, B2) is None
    check_infer(random_call(p))
    assert [name for name, _ in npu.calls] == ["npu_fused_infer_attention_score"]


@pytest.mark.parametrize("seq_q", [1, 3])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("seqlens_k", [[9, 4], [0, 7], [2, 1]])
def test_decode(seq_q: int, causal: str, seqlens_k: list[int], npu: RecordedTorchNpu) -> None:
    p = problem(op="decode_attention", seq_q=seq_q, seq_k=9, heads_k=1, causal=causal, seqlens_k=True, return_lse=True)
    assert INFER.rejects(p, B2) is None
    call = random_call(p, seqlens_k=seqlens_k)
    for b, length in enumerate(seqlens_k):  # what lies behind a sequence's end is anything
        call.k[b, :, max(length, 1) :] = math.nan
        call.v[b, :, max(length, 1) :] = math.nan
    check_infer(call, ignore_nan_behind=seqlens_k)
    given = npu.calls[0][1]
    assert given["actual_seq_lengths_kv"] == [max(n, 1) for n in seqlens_k]
    assert given["inner_precise"] == (2 if seq_q > 1 else 0)


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize(
    ("seqlens_q", "seqlens_k"),
    [([5, 2], [7, 3]), ([5, 5], [2, 0]), ([0, 4], [7, 7]), (None, [1, 7]), ([3, 1], None)],
)
def test_padded(causal: str, seqlens_q: list[int] | None, seqlens_k: list[int] | None, npu: RecordedTorchNpu) -> None:
    p = problem(
        causal=causal, seqlens_q=seqlens_q is not None, seqlens_k=seqlens_k is not None, return_lse=True, heads_k=2
    )
    assert INFER.rejects(p, A3) is None
    check_infer(random_call(p, seqlens_q=seqlens_q, seqlens_k=seqlens_k))


def test_lengths_beyond_the_cache_are_clamped(npu: RecordedTorchNpu) -> None:
    p = problem(op="decode_attention", seq_q=1, seqlens_k=True)
    INFER.run(random_call(p, seqlens_k=[1000, -3]))
    assert npu.calls[0][1]["actual_seq_lengths_kv"] == [7, 1]


def check_infer(call: Any, ignore_nan_behind: list[int] | None = None) -> None:
    out, lse = INFER.run(call)
    if ignore_nan_behind is not None:
        # The oracle in float64 multiplies whole matrices: give it numbers where the call has none.
        call.k, call.v = call.k.nan_to_num(0.0), call.v.nan_to_num(0.0)
    expected, expected_lse = oracle(call)
    assert out.dtype == call.q.dtype
    assert_close(out, expected, call)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


# Refusals


BOTH = [
    ({"leftpad_k": True}, ["leftpad_k given"]),
    ({"leftpad_q": True, "leftpad_k": True}, ["leftpad_q, leftpad_k given"]), ({"seq_k": 0}, ["seq_k is 0"]),
    ({"seq_q": 0, "batch": 0}, ["batch, seq_q is 0"]),
    ({"head_dim": 64, "head_dim_v": 32}, ["head_dim_v is 32", "head_dim 64"]),
    ({"heads_q": 512, "heads_k": 512}, ["heads_q is 512", "up to 256"]),
    ({"op": "varlen_attention", "total_q": 9, "total_k": 9}, ["op is varlen_attention"]),
    ({"op": "paged_attention", "page_size": 16}, ["op is paged_attention"]),
    ({"op": "sparse_attention", "seq_q": 1, "tokens": 4}, ["op is sparse_attention"]),
    ({"op": "mla_attention", "heads_k": 1, "page_size": 16}, ["op is mla_attention"]),
    ({"window_left": 3}, ["window (3, -1) asked for", "called without"]),
    ({"softcap": True, "sinks": True}, ["softcap, sinks asked for"]),
    ({"alibi_slopes": True}, ["alibi_slopes asked for"]), ({"bias": True, "mask": True}, ["bias, mask asked for"]),
]  # fmt: skip
FUSION_ONLY = [
    ({"op": "decode_attention", "seqlens_k": True}, ["op is decode_attention"]),
    ({"seqlens_q": True, "seqlens_k": True}, ["seqlens_q, seqlens_k given"]),
    ({"causal": "bottom_right", "seq_q": 9, "seq_k": 4}, ["seq_q 9", "seq_k 4", "first 5 rows"]),
    ({"seq_q": 1048577}, ["seq_q is 1048577", "up to 1048576"]),
    ({"seq_k": 1048577}, ["seq_k is 1048577", "up to 1048576"]),
    ({"batch": 2097153}, ["batch is 2097153", "up to 2097152"]),
    ({"dropout": True}, ["dropout_p > 0", "not by dropout_seed"]),
]
INFER_ONLY = [
    ({"op": "decode_attention", "num_splits": 2}, ["num_splits is 2"]),
    ({"dtype": "fp32"}, ["dtype is fp32", "fp16 and bf16"]),
    ({"needs_grad": True}, ["gradients are asked for", "inference"]), ({"dropout": True}, ["dropout_p > 0"]),
    ({"causal": "top_left", "seq_q": 1}, ["seq_q 1"]), ({"head_dim": 576}, ["head_dim is 576", "up to 512"]),
    ({"head_dim": 72}, ["head_dim is 72", "multiples of 16"]),
    ({"heads_q": 128, "heads_k": 1}, ["query heads for each key/value head is 128", "up to 64"]),
    ({"batch": 65537}, ["batch is 65537", "up to 65536"]),
    ({"seq_q": 20971521}, ["seq_q is 20971521", "up to 20971520"]),
    ({"seq_k": 20971521}, ["seq_k is 20971521", "up to 20971520"]),
    ({"seq_q": 1, "seq_k": 262145}, ["seq_k is 262145", "up to 262144"]),
]  # fmt: skip
REFUSED = (
    [(path, *case) for case in BOTH for path in (FUSION, INFER)]
    + [(FUSION, *case) for case in FUSION_ONLY]
    + [(INFER, *case) for case in INFER_ONLY]
)


@pytest.mark.parametrize(("path", "changes", "fragments"), REFUSED)
def test_refusals_name_value_and_limit(path: Any, changes: dict[str, Any], fragments: list[str]) -> None:
    assert path.rejects(problem(), B2) is None
    rejection = path.rejects(problem(**changes), B2)
    assert rejection.path == path.name
    assert rejection.hint
    for fragment in fragments:
        assert fragment in rejection.reason


@pytest.mark.parametrize("path", [FUSION, INFER])
def test_chips_that_the_documents_do_not_list(path: Any) -> None:
    assert path.rejects(problem(), A3) is None
    rejection = path.rejects(problem(), P310)
    assert "ascend310p" in rejection.reason
    assert "ascend910b*" in rejection.reason


def test_plans_on_ascend() -> None:
    without_compiler = parse_target("ascend:ascend910b2", toolchain="none")
    assert plan(problem(needs_grad=True), B2).path == "triton"
    assert plan(problem(needs_grad=True), without_compiler).path == "npu_fusion_attention"
    assert plan(problem(needs_grad=True, dropout=True), without_compiler).path == "reference"
    decode = plan(problem(op="decode_attention", seq_q=1, seqlens_k=True), without_compiler)
    assert decode.path == "npu_fused_infer_attention_score"
    assert [r.path for r in decode.rejected] == ["triton", "npu_fusion_attention"]
    refused = plan(problem(), P310)
    assert refused.path == "reference"
    assert "ascend310p is no target of triton-ascend" in refused.rejected[0].reason
