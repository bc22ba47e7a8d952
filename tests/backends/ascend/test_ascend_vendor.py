"""torch_npu's attention functions as vendor paths, over kernels of their documented semantics and limits."""

import math
import re
import sys
import types
from typing import Any

import msgspec
import pytest
import torch
from vendor_cases import CASES, FUSION, INFER, LACKS, LOSSES, TOLERANCE, case, error, exact_gradients, loss_of, trained
from vendor_kernels import RELEASE, RELEASES, SCHEMAS, VendorKernels

from portattn import attention, varlen_attention
from portattn.api import dispatch
from portattn.backends.ascend import vendor
from portattn.errors import ArgumentError
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.problem import Problem
from portattn.testing.oracle import oracle
from portattn.testing.random_calls import random_call
from portattn.tools.matrix.cell_text import recorded_evidence

B2 = parse_target("ascend:ascend910b2", toolchain="triton-ascend==3.2.0")
A3 = parse_target("ascend:ascend910_93", toolchain="triton-ascend==3.2.0")
P310 = parse_target("ascend:ascend310p", toolchain="triton-ascend==3.2.0")
BASE = Problem(batch=2, heads_q=4, heads_k=4, seq_q=5, seq_k=7, head_dim=16)
TRAINED = [name for name, (_, fields) in CASES.items() if "needs_grad" in fields]
SEEDS = {name: 4 for name in CASES if "bias" in name}  # a bias's broadcast axes follow the seed
FEW_ROWS = 1e-4  # of a float32 gradient, added up over a sequence's rows


def problem(**changes: Any) -> Problem:
    return msgspec.structs.replace(BASE, **{"head_dim_v": changes.get("head_dim", 16), **changes})


@pytest.fixture
def npu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> VendorKernels:
    kernels = VendorKernels(getattr(request, "param", RELEASE))
    monkeypatch.setitem(sys.modules, "torch_npu", kernels)
    register(monkeypatch, kernels.schemas)
    return kernels


def register(monkeypatch: pytest.MonkeyPatch, schemas: dict[str, Any]) -> None:
    """Let torch.ops.npu have these schemas alone."""
    operators = {
        name.removeprefix("npu::"): types.SimpleNamespace(default=types.SimpleNamespace(_schema=schema))
        for name, schema in schemas.items()
    }
    monkeypatch.setattr(torch.ops, "npu", types.SimpleNamespace(**operators), raising=False)


# Results and gradients of every feature


def test_the_recorded_evidence_is_of_the_cases() -> None:
    """Each case runs here and through the vendor's library (tests/engines/torch_npu), with and without gradients."""
    wanted: dict[tuple[str, bool], set[str]] = {}
    for path, fields in CASES.values():
        for trains in {False, fields.get("needs_grad", False)}:
            wanted.setdefault((path.name, trains), set()).add(Problem(**fields).op)
    rows = [row for row in recorded_evidence("ascend") if row.path != "triton"]
    assert {(row.path, row.needs_grad): set(row.ops) for row in rows} == wanted
    assert all(row.evidence == ("vendor's autograd" if row.needs_grad else "vendor's schema") for row in rows)


@pytest.mark.parametrize("npu", RELEASES, indirect=True)
@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in CASES for seed in range(SEEDS.get(name, 2))])
def test_results(name: str, seed: int, npu: VendorKernels) -> None:
    path, call = case(name, seed)
    rejection = path.rejects(call.problem, A3)
    assert (rejection.reason if rejection else "") == LACKS.get(npu.__version__, {}).get(name, "")
    if rejection:
        return
    out, lse = path.run(call)
    exact, exact_lse = oracle(call)
    assert out.dtype == call.dtype
    assert lse.dtype == torch.float32
    assert error(out, exact) <= TOLERANCE[call.problem.dtype]
    assert error(lse, exact_lse) <= TOLERANCE["fp32"]
    assert len(npu.calls) == 1
    call.problem = msgspec.structs.replace(call.problem, return_lse=False, needs_grad=False)
    again, none = path.run(call)
    assert none is None
    assert torch.equal(again, out)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("name", "npu"), [(n, r) for n in TRAINED for r in RELEASES if n not in LACKS.get(r, {})], indirect=["npu"]
)
def test_gradients(name: str, loss: str, npu: VendorKernels) -> None:
    path, call = case(name, 1)
    found = torch.autograd.grad(loss_of(loss, *path.run(call)), [*trained(call).values()], allow_unused=True)
    for (tensor, exact), gradient in zip(exact_gradients(call, loss).items(), found, strict=True):
        assert error(torch.zeros_like(exact) if gradient is None else gradient, exact) <= FEW_ROWS, tensor
    # The LSE's gradient is computed where a loss depends on the LSE alone.
    assert len(npu.calls) == (1 if loss == "out" else 2)


@pytest.mark.parametrize("tensor", ["q", "k", "v", "sinks"])
def test_the_lse_has_the_gradient_of_one_tensor_alone(tensor: str, npu: VendorKernels) -> None:
    path, call = case("sinks, packed", 0)
    exact = exact_gradients(call, "out and lse")[tensor]
    for name, leaf in trained(call).items():
        leaf.requires_grad_(name == tensor)
    loss_of("out and lse", *path.run(call)).backward()
    assert error(getattr(call, tensor).grad, exact) <= FEW_ROWS


@pytest.mark.parametrize("transform", ["backward", "packed", "func.grad", "autocast"])
@pytest.mark.filterwarnings("ignore::portattn.errors.FallbackWarning")
def test_gradients_of_a_public_call(transform: str, npu: VendorKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler = parse_target("ascend:ascend910b2", toolchain="none")
    monkeypatch.setattr(dispatch, "detect_target", lambda device_type, index: (without_compiler, ""))
    packed = transform == "packed"
    _, call = case("sinks, packed" if packed else "sinks", 1)
    p, tensors = call.problem, tuple(trained(call).values())

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        if packed:
            rows = [tensor[0].transpose(0, 1) for tensor in (q, k, v)]
            lengths = (call.cu_seqlens_q, call.cu_seqlens_k, p.seq_q, p.seq_k)
            given = {"causal": True, "sinks": sinks, "return_lse": True, "backend": "vendor"}
            out, lse = varlen_attention(*rows, *lengths, **given)
            return loss_of("out and lse", out.transpose(0, 1), lse)
        return loss_of("out and lse", *attention(q, k, v, sinks=sinks, return_lse=True, backend="vendor"))

    if transform == "func.grad":
        found = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*(tensor.detach() for tensor in tensors))
    else:
        made = loss(*tensors)
        with torch.autocast("cpu", torch.bfloat16, enabled=transform == "autocast"):  # begun in it, still in float32
            found = torch.autograd.grad(made, tensors)
    assert npu.calls
    for ours, exact in zip(found, exact_gradients(call, "out and lse").values(), strict=True):
        assert error(ours, exact) <= FEW_ROWS


def test_the_compressed_mask_is_made_once_and_is_no_inference_tensor() -> None:
    vendor.compressed_causal_mask.cache_clear()
    with torch.inference_mode():
        mask = vendor.compressed_causal_mask(torch.device("cpu"))
    assert not mask.is_inference()
    assert vendor.compressed_causal_mask(torch.device("cpu")) is mask
    assert not mask[7, 7]
    assert mask[7, 8]


@pytest.mark.parametrize("bounds", ["cu_seqlens_q", "cu_seqlens_k"])
def test_packed_sequences_without_rows_or_keys_give_zeros_and_zero_gradients(bounds: str, npu: VendorKernels) -> None:
    path, call = case("packed", 0)
    getattr(call, bounds).zero_()
    out, lse = path.run(call)
    assert not out.any()
    assert lse.isneginf().all()
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), [call.q, call.k, call.v]))
    assert not npu.calls


@pytest.mark.parametrize("name", ["sinks", "sinks, packed"])
def test_a_sink_of_infinity_takes_all_of_its_heads_weight(name: str, npu: VendorKernels) -> None:
    path, call = case(name, 2)
    call.sinks = call.sinks.detach().clone()
    call.sinks[0], call.sinks[1] = math.inf, -math.inf
    out, lse = path.run(call)
    exact, exact_lse = oracle(call)
    assert error(out, exact) <= TOLERANCE[call.problem.dtype]
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    assert error(lse.nan_to_num(0.0, 0.0, 0.0), exact_lse.nan_to_num(0.0, 0.0, 0.0)) <= TOLERANCE["fp32"]


# Arguments that a result does not show


def test_a_bias_of_the_queries_dtype_is_computed_in_it_and_alibi_in_float32(npu: VendorKernels) -> None:
    for name in ("ALiBi", "bias, ALiBi, sinks", "bias"):
        path, call = case(name, 0)
        path.run(call)
        given = npu.calls[-1][1]
        assert given["query"].dtype == given["pse"].dtype == (call.bias.dtype if name == "bias" else torch.float32)


@pytest.mark.parametrize("name", ["decode", "pages, heads first", "pages, tokens first", "pages, int8", "inference"])
def test_no_cache_is_copied(name: str, npu: VendorKernels) -> None:
    path, call = case(name, 0)
    path.run(call)
    given = npu.calls[0][1]
    assert [given["key"].data_ptr(), given["value"].data_ptr()] == [call.k.data_ptr(), call.v.data_ptr()]


@pytest.mark.parametrize("strides", ["spare", "combined", "expanded", "shared"])
@pytest.mark.parametrize("page_layout", ["phd", "hpd"])
def test_pages_that_lie_apart_or_are_shared_are_gathered(strides: str, page_layout: str, npu: VendorKernels) -> None:
    asked = Problem(**CASES["pages, tokens first"][1] | {"page_layout": page_layout})
    call = random_call(asked, strides=strides.replace("shared", "plain"), extremes=True)
    if strides == "shared":
        call.seqlens_k[:], call.page_table[:] = call.seqlens_k[0] - 3, call.page_table[0]
    assert error(INFER.run(call)[0], oracle(call)[0]) <= TOLERANCE["fp16"]
    assert len(npu.calls[0][1]["key"]) == sum(max(-(-length // 16), 1) for length in call.seqlens_k.tolist())


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_cache_of_more_numbers_than_int32_counts_is_refused(name: str, npu: VendorKernels) -> None:
    """No plan knows how many pages a cache has."""
    most = (1 << 31) - 1
    _, call = case("pages, heads first", 0)
    fields = {"seq_q": 1, "seq_k": 4, "page_size": 1, "heads_k": 1, "head_dim": 1, "page_layout": "hpd"}
    call.problem = msgspec.structs.replace(call.problem, **fields)
    call.page_table, call.seqlens_k = torch.zeros(3, 4, dtype=torch.int32), torch.full((3,), 4, dtype=torch.int32)
    for pages, rows in ((most, 1), (most + 1, 1), (most + 1, 2)):
        caches = {one: torch.empty(most if one != name else pages, 1, 1, 1, device="meta") for one in ("k", "v")}
        call.k = caches["k"]
        call.problem = msgspec.structs.replace(call.problem, seq_q=rows)
        if pages == most or rows == 2:
            assert vendor._pages(call, caches, [4, 4, 4])[0] == caches, "several rows have no such limit"
        else:
            with pytest.raises(ArgumentError, match=rf"{name}_pages\.numel\(\) is {pages}.* must be at most {most}"):
                vendor._pages(call, caches, [4, 4, 4])
    assert not npu.calls


def test_lengths_beyond_the_cache_are_clamped(npu: VendorKernels) -> None:
    _, call = case("decode", 0)
    call.seqlens_k = torch.tensor([1000, -3], dtype=torch.int32)
    INFER.run(call)
    assert npu.calls[0][1]["actual_seq_lengths_kv"] == [7, 1]


def test_page_ids_behind_a_sequence_are_anything(npu: VendorKernels) -> None:
    _, call = case("pages, heads first", 0)
    call.seqlens_k[1], call.page_table[1], call.page_table[0, -1] = 0, -1, -1
    out, lse = INFER.run(call)
    assert not out[1].any()
    assert lse[1].isneginf().all()


# Other releases of torch_npu


# The function and the argument that a release lacks -> the problems that it does not take, and words of the reason
OLDER: dict[tuple[str, str], tuple[Any, str]] = {
    ("npu_fusion_attention", "sink"): (lambda path, p: p.sinks, "has no sink in npu_fusion_attention"),
    ("npu_fusion_attention", "softmax_layout"): (
        lambda path, p: path is FUSION and p.packed and p.return_lse, "the LSE of packed sequences"),
    ("npu_fusion_attention_v2", ""): (lambda path, p: p.bias or p.alibi_slopes, "has no npu_fusion_attention_v2"),
    ("npu_fusion_attention_v2", "sink"): (
        lambda path, p: p.sinks and (p.bias or p.alibi_slopes), "has no sink in npu_fusion_attention_v2"),
    ("npu_fused_infer_attention_score_v2", ""): (
        lambda path, p: path is INFER and p.packed, "has no npu_fused_infer_attention_score_v2"),
    ("npu_fused_infer_attention_score", "key_antiquant_scale"): (
        lambda path, p: p.kv_format == "int8", "no key_antiquant_scale in"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "argument"), OLDER)
def test_a_feature_that_the_loaded_torch_npu_lacks(
    function: str, argument: str, npu: VendorKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks, fragment = OLDER[function, argument]
    older = dict(SCHEMAS)
    whole = older.pop(f"npu::{function}")
    if argument:
        kept = [str(part) for part in str(whole).split(", ") if f" {argument}=" not in part]
        older[f"npu::{function}"] = torch._C.parse_schema(", ".join(kept))
    cases = [
        (path, Problem(**fields | {"return_lse": lse})) for path, fields in CASES.values() for lse in (True, False)
    ]
    assert not any(path.rejects(asked, B2) for path, asked in cases)
    register(monkeypatch, older)
    for path, asked in cases:
        rejection = path.rejects(asked, B2)
        assert bool(rejection) == bool(lacks(path, asked)), asked
        assert rejection is None or (fragment in rejection.reason and "torch_npu 2.13.0" in rejection.reason)
    monkeypatch.delitem(sys.modules, "torch_npu")
    assert not any(path.rejects(asked, B2) for path, asked in cases), "a plan without the machine is for the newest"


# Refusals


BOTH = [
    ({"leftpad_k": True}, ["leftpad_k given"]), ({"seq_k": 0}, ["seq_k is 0"]),
    ({"leftpad_q": True, "leftpad_k": True}, ["leftpad_q, leftpad_k given"]),
    ({"seq_q": 0, "batch": 0}, ["batch, seq_q is 0"]), ({"heads_q": 257, "heads_k": 257}, ["heads_q is 257", "to 256"]),
    ({"op": "sparse_attention", "seq_q": 1, "tokens": 4}, ["op is sparse_attention"]),
    ({"op": "mla_attention", "heads_k": 1, "page_size": 16}, ["op is mla_attention"]),
    ({"softcap": True, "mask": True}, ["softcap, mask asked for", "called without"]),
    ({"window_left": 3, "causal": "top_left"}, ["window (3, -1)", "top-left", "seq_q 5", "seq_k 7"]),
]  # fmt: skip
VARLEN = {"op": "varlen_attention", "total_q": 9, "total_k": 9, "head_dim": 128, "dtype": "bf16"}
ROW = {"seq_q": 1, "seqlens_k": True}
PAGES = ROW | {"op": "paged_attention", "page_size": 16, "seq_k": 512, "pages_in_line": True}
CODES = ROW | {"op": "decode_attention", "kv_format": "int8", "kv_scales": "token"}
FUSION_ONLY = [
    (ROW | {"op": "decode_attention"}, ["op is decode_attention"]), (PAGES, ["op is paged_attention"]),
    ({"seqlens_q": True, "seqlens_k": True}, ["seqlens_q, seqlens_k given"]),
    ({"causal": "bottom_right", "seq_q": 5, "seq_k": 4}, ["seq_q 5", "seq_k 4", "first 1 rows"]),
    ({"window_right": 1, "seq_q": 9, "seq_k": 4}, ["window (-1, 1)", "first 4 rows"]),
    ({"head_dim": 32, "head_dim_v": 64}, ["head_dim_v is 64", "head_dim, 32"]),
    ({"alibi_slopes": True, "needs_grad": True}, ["gradients", "alibi_slopes", "no gradient of a bias"]),
    (VARLEN | {"alibi_slopes": True}, ["alibi_slopes asked for", "dense scores alone"]),
    (VARLEN | {"batch": 1025}, ["batch is 1025", "1024"]), ({"batch": 2097153}, ["batch is 2097153", "2097152"]),
    (VARLEN | {"total_q": 1048577}, ["total_q is 1048577", "up to 1048576"]),
    (VARLEN | {"total_k": 1048577}, ["total_k is 1048577"]),
    ({"seq_q": 1048577}, ["seq_q is 1048577", "1048576"]), ({"seq_k": 1048577}, ["seq_k is 1048577", "1048576"]),
    ({"dropout": True}, ["dropout_p > 0", "not by dropout_seed"]),
]  # fmt: skip
INFER_ONLY = [
    ({"op": "decode_attention", "num_splits": 2}, ["num_splits is 2"]), ({"dropout": True}, ["dropout_p > 0"]),
    ({"bias": True, "sinks": True}, ["sinks, bias asked for", "called without"]),
    ({"dtype": "fp32"}, ["dtype is fp32", "fp16 and bf16"]), ({"head_dim": 72}, ["head_dim is 72", "multiples of 16"]),
    ({"needs_grad": True}, ["gradients are asked for", "inference"]),
    ({"head_dim": 528}, ["head_dim is 528", "up to 512"]), ({"batch": 65537}, ["batch is 65537", "up to 65536"]),
    ({"head_dim": 64, "head_dim_v": 32}, ["head_dim_v is 32", "head_dim 64"]),
    (ROW | {"window_left": 0}, ["window (0, -1) with lengths"]), (PAGES | {"window_left": 2}, ["NaN in keys before"]),
    ({"seq_q": 20971521}, ["seq_q is 20971521", "20971520"]), ({"seq_k": 20971521}, ["seq_k is 20971521", "20971520"]),
    ({"seq_q": 1, "seq_k": 262145}, ["seq_k is 262145", "up to 262144"]),
    (VARLEN | {"dtype": "fp16"}, ["dtype is fp16", "bf16 alone"]), (VARLEN | {"batch": 4097}, ["batch is 4097"]),
    (VARLEN | {"head_dim": 64}, ["head_dim, head_dim_v are (64, 64)", "(128, 128), (192, 128), (192, 192)"]),
    (VARLEN | {"causal": "top_left"}, ["causal top-left", "bottom-right masks"]),
    *((VARLEN | {name: 1048577}, [f"{name} is 1048577", "up to 1048576"]) for name in ("total_q", "total_k")),
    ({"heads_q": 65, "heads_k": 1}, ["query heads for each key/value head is 65", "up to 64"]),
    (PAGES | {"page_size": 24}, ["page_size is 24", "multiples of 16 up to 512", "seq_q 1"]),
    (PAGES | {"page_size": 528}, ["page_size is 528", "up to 512"]), (PAGES | {"total_q": 2}, ["packed queries"]),
    (PAGES | {"seq_q": 2, "page_size": 64}, ["page_size is 64", "multiples of 128", "seq_q 2"]),
    (PAGES | {"heads_q": 256, "heads_k": 256, "head_dim": 256}, ["heads_k · head_dim is 65536", "up to 65535"]),
    (PAGES | CODES | {"op": "paged_attention", "page_layout": "hpd"}, ["page_size is 16", "multiples of 32"]),
    (PAGES | CODES | {"op": "paged_attention", "page_size": 32, "heads_k": 2}, ["page's 32 tokens", "2 heads"]),
    (CODES | {"kv_format": "e4m3"}, ["kv_format is e4m3", "int8 caches"]), (CODES | {"seq_q": 2}, ["seq_q 2"]),
    (CODES | {"kv_scales": "head"}, ["kv_scales head", "each token and head"]),
    ({"kv_format": "int8", "kv_scales": "token"}, ["int8", "attention of seq_q 5"]),
]  # fmt: skip
REFUSED = (
    [(path, *case) for case in BOTH for path in (FUSION, INFER)]
    + [(FUSION, *case) for case in FUSION_ONLY]
    + [(INFER, *case) for case in INFER_ONLY]
)


# The largest sizes, and the smallest, that a plan takes; REFUSED has the next ones.
AT_LIMITS = [
    (FUSION, {"head_dim": 576}), (FUSION, {"heads_q": 256, "heads_k": 256, "seq_q": 1 << 20, "seq_k": 1 << 20}),
    (FUSION, {"batch": 2 << 20}), (FUSION, VARLEN | {"batch": 1024, "total_q": 1 << 20, "total_k": 1 << 20}),
    (FUSION, {"batch": 1, "heads_q": 1, "heads_k": 1, "seq_q": 1, "seq_k": 1, "head_dim": 1}),
    (FUSION, {"causal": "bottom_right", "seq_q": 7}), (FUSION, {"window_right": 1, "seq_q": 8}),
    (FUSION, {"causal": "top_left", "seq_q": 9}), (FUSION, VARLEN | {"batch": 1, "total_q": 1, "total_k": 1}),
    (FUSION, {"window_left": 3, "causal": "top_left", "seq_q": 7}), (INFER, {"seq_q": 1, "seq_k": 262144}),
    (FUSION, VARLEN | {"seq_q": 9, "causal": "bottom_right"}), (INFER, {"heads_q": 64, "heads_k": 1}),
    (INFER, {"head_dim": 512, "batch": 65536, "heads_q": 256, "heads_k": 4}), (INFER, {"seq_q": 2, "seq_k": 262145}),
    (INFER, {"seq_q": 20971520, "seq_k": 20971520}), (INFER, VARLEN), (INFER, VARLEN | {"head_dim": 192}),
    (INFER, VARLEN | {"batch": 4096, "total_q": 1 << 20, "total_k": 1 << 20, "seq_q": 1, "seq_k": 262145}),
    (INFER, VARLEN | {"head_dim": 192, "head_dim_v": 128}),
    (INFER, PAGES | {"page_size": 512}), (INFER, PAGES | {"seq_q": 2, "page_size": 128}),
    (INFER, PAGES | {"seq_q": 2, "page_size": 512}), (INFER, PAGES | {"heads_q": 255, "heads_k": 255, "head_dim": 256}),
    (INFER, PAGES | {"heads_q": 256, "heads_k": 256, "head_dim": 256, "page_layout": "hpd"}),
    (INFER, {"heads_q": 256, "heads_k": 256, "head_dim": 256}), (INFER, CODES), (INFER, {"window_left": 0}),
    (INFER, PAGES | CODES | {"op": "paged_attention", "page_size": 32, "page_layout": "hpd"}),
    (INFER, PAGES | CODES | {"op": "paged_attention", "page_size": 512, "heads_q": 1, "heads_k": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "changes"), AT_LIMITS)
def test_sizes_at_the_limits_are_taken(path: Any, changes: dict[str, Any]) -> None:
    """On the chips that the documents list alone."""
    assert path.rejects(problem(**changes), B2) is path.rejects(problem(**changes), A3) is None
    unlisted = path.rejects(problem(**changes), P310).reason
    assert re.match(r"arch is ascend310p, .* documented for ascend910b\*", unlisted)


@pytest.mark.parametrize(("path", "changes", "fragments"), REFUSED)
def test_refusals_name_value_and_limit(path: Any, changes: dict[str, Any], fragments: list[str]) -> None:
    assert path.rejects(problem(), B2) is None
    rejection = path.rejects(problem(**changes), B2)
    assert rejection.path == path.name
    assert rejection.hint
    for fragment in fragments:
        assert fragment in rejection.reason


def test_plans_on_ascend() -> None:
    without_compiler = parse_target("ascend:ascend910b2", toolchain="none")
    assert plan(problem(needs_grad=True), B2).path == "triton"
    assert plan(problem(needs_grad=True), without_compiler).path == "npu_fusion_attention"
    assert plan(problem(), without_compiler).path == "npu_fused_infer_attention_score"
    assert plan(problem(sinks=True), without_compiler).path == "npu_fusion_attention"
    assert plan(problem(needs_grad=True, dropout=True), without_compiler).path == "reference"
    decode = plan(problem(op="decode_attention", seq_q=1, seqlens_k=True), without_compiler)
    assert decode.path == "npu_fused_infer_attention_score"
    assert [r.path for r in decode.rejected] == ["triton"]
    refused = plan(problem(), P310)
    assert refused.path == "reference"
    assert "ascend310p is no target of triton-ascend" in refused.rejected[0].reason
