"""The public functions as a user calls them: layouts, return values, defaults, and what does not change."""

import pytest
import torch
from support import Device, assert_right, problem, random_call
from torch.nn.functional import scaled_dot_product_attention

import portattn
from portattn.schema.call import Call

pytestmark = pytest.mark.on_device


@pytest.fixture
def where(request: pytest.FixtureRequest) -> str:
    """A GPU where there is one, else the CPU; without Triton too."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def given(call: Call) -> dict:
    p = call.problem
    causal = {"none": False, "bottom_right": True, "top_left": "top_left"}[p.causal]
    out = {"causal": causal, "layout": p.layout, "return_lse": p.return_lse, "scale": call.scale}
    names = ("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k")
    return out | {n: getattr(call, n) for n in names if getattr(call, n) is not None}


def in_layout(call: Call, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.transpose(1, 2) if call.problem.layout == "bshd" else t for t in tensors]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
def test_attention(where: str, layout: str, causal: str) -> None:
    fields = {"heads_q": 4, "seqlens_q": True, "seqlens_k": True, "leftpad_q": True, "leftpad_k": True}
    call = random_call(problem(layout=layout, causal=causal, **fields), seed=1, device=where)
    q, k, v = in_layout(call, call.q, call.k, call.v)
    out, lse = portattn.attention(q, k, v, **given(call))
    assert out.shape == q.shape
    assert_right(call, *in_layout(call, out), lse)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_decode_attention(where: str, layout: str) -> None:
    p = problem(
        op="decode_attention", layout=layout, heads_q=4, seq_q=2, causal="bottom_right", seqlens_k=True, leftpad_k=True
    )
    call = random_call(p, seed=2, device=where)
    q, k, v = in_layout(call, call.q, call.k, call.v)
    out, lse = portattn.decode_attention(q, k, v, **given(call))
    assert_right(call, *in_layout(call, out), lse)


def test_it_is_sdpa_where_sdpa_is_defined(where: str) -> None:
    q, k, v = (torch.randn(2, 4, 33, 24, device=where) for _ in range(3))
    torch.testing.assert_close(portattn.attention(q, k, v), scaled_dot_product_attention(q, k, v), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(
        portattn.attention(q, k, v, causal="top_left", scale=0.5),
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5), atol=2e-6, rtol=1e-5,
    )  # fmt: skip


def test_true_means_bottom_right(where: str) -> None:
    q, k, v = (torch.randn(1, 2, s, 16, device=where) for s in (3, 8, 8))
    same = portattn.attention(q, k, v, causal="bottom_right")
    assert torch.equal(portattn.attention(q, k, v, causal=True), same)
    assert not torch.equal(portattn.attention(q, k, v, causal="top_left"), same)


def test_out_has_qs_dtype_and_layout_and_the_values_width(where: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q, k = (torch.randn(2, 5, 4, 16, device=where, dtype=dtype) for _ in range(2))
        v = torch.randn(2, 5, 4, 24, device=where, dtype=dtype)
        out, lse = portattn.attention(q, k, v, layout="bshd", return_lse=True)
        assert (out.shape, out.dtype) == ((2, 5, 4, 24), dtype)
        assert out.is_contiguous()
        assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)


def test_lse_only_when_asked(where: str) -> None:
    q = torch.randn(1, 1, 2, 16, device=where)
    assert isinstance(portattn.attention(q, q, q), torch.Tensor)
    assert isinstance(portattn.decode_attention(q, q, q, None), torch.Tensor)
    assert isinstance(portattn.attention(q, q, q, return_lse=True), tuple)
    assert isinstance(portattn.decode_attention(q, q, q, None, return_lse=True), tuple)


def test_inputs_are_not_changed(where: str) -> None:
    call = random_call(problem(seqlens_k=True, leftpad_k=True), device=where)
    before = [t.clone() for t in (call.q, call.k, call.v, call.seqlens_k, call.leftpad_k)]
    portattn.attention(call.q, call.k, call.v, scale=-1.0, seqlens_k=call.seqlens_k, leftpad_k=call.leftpad_k)
    for ours, copy in zip((call.q, call.k, call.v, call.seqlens_k, call.leftpad_k), before, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), copy.nan_to_num(7.0))


def test_gradients_come_through_the_public_function() -> None:
    q, k, v = (torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3))
    ours = torch.autograd.grad(portattn.attention(q, k, v, causal="top_left").square().sum(), (q, k, v))
    theirs = torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True).square().sum(), (q, k, v))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_a_backend_for_one_call_and_for_a_block(where: str) -> None:
    q = torch.randn(1, 1, 2, 16, device=where)
    portattn.attention(q, q, q, backend="reference")
    assert portattn.last_plan().requested == "reference"
    with portattn.settings(backend="reference"):
        portattn.attention(q, q, q)
        assert portattn.last_plan().requested == "reference"
        portattn.attention(q, q, q, backend="auto")
        assert portattn.last_plan().requested == "auto"


def test_the_interpreter_and_the_reference_agree(device: Device) -> None:
    if device.path != "interpreter":
        pytest.skip("Triton compiles for the accelerator in this process")
    for dtype in ("fp32", "bf16"):
        for scale in (None, -0.3):
            call = random_call(problem(dtype=dtype, causal="bottom_right", seqlens_k=True), scale=scale)
            ours, lse = portattn.attention(call.q, call.k, call.v, **given(call), backend="interpreter")
            assert portattn.last_plan().kernel == "dense_forward"
            assert_right(call, ours, lse)


@pytest.mark.gpu
def test_a_cuda_graph_replays_decode_with_new_lengths() -> None:
    q = torch.randn(2, 4, 1, 64, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(2, 2, 300, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    lengths = torch.tensor([300, 10], dtype=torch.int32, device="cuda")
    portattn.decode_attention(q, k, v, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = portattn.decode_attention(q, k, v, lengths)
    for values in ([300, 10], [1, 299], [0, 150]):
        lengths.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, portattn.decode_attention(q, k, v, lengths))


@pytest.mark.gpu
def test_on_an_accelerator_the_core_path_runs_by_itself() -> None:
    for dtype in ("fp16", "bf16", "fp32"):
        p = problem(dtype=dtype, heads_q=4, seq_q=200, seq_k=333, head_dim=64, causal="bottom_right", seqlens_k=True)
        call = random_call(p, device="cuda")
        assert_right(call, *portattn.attention(call.q, call.k, call.v, **given(call)))
        assert portattn.last_plan().path == "triton"
