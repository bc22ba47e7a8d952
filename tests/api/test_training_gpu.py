"""Training calls on an accelerator: every path that kernels take, against the reference path in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import portattn

pytestmark = pytest.mark.gpu

WIDTHS = (64, 128, 256, 80)


def tensors(heads_k: int, rows: int, keys: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows + width)
    shapes = ((2, 4, rows, width), (2, heads_k, keys, width), (2, heads_k, keys, width))
    return [torch.randn(s, device="cuda", generator=generator).to(dtype).requires_grad_() for s in shapes]


def close(inputs: list[torch.Tensor], found: Any, call: Any) -> None:
    """Gradients against those of the same values in float32; a bf16 product is off by some 2⁻⁸ of its terms."""
    exact = [t.detach().float().requires_grad_() for t in inputs]
    out = call(exact, "reference")
    towards = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(9))
    expected = torch.autograd.grad(out, exact, towards)
    ours = torch.autograd.grad(found, inputs, towards.to(found.dtype))
    for name, one, right in zip("qkv", ours, expected, strict=False):
        error = (one.float() - right).norm() / right.norm()
        assert error < (2e-2 if inputs[0].dtype is torch.bfloat16 else 4e-3), (name, float(error))


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("fields", [{}, {"causal": True}, {"causal": True, "window": (100, 0)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients(dtype: torch.dtype, fields: dict[str, Any], width: int, backend: str) -> None:
    inputs = tensors(2, 300, 300, width, dtype)

    def call(given: list[torch.Tensor], path: str) -> torch.Tensor:
        return portattn.attention(*given, backend=path, **fields)

    out = call(inputs, backend)
    assert portattn.plan("attention", *inputs, backend=backend, **fields).path not in ("sdpa", "reference")
    close(inputs, out, call)


@pytest.mark.parametrize("width", WIDTHS)
def test_packed_gradients(width: int) -> None:
    generator = torch.Generator("cuda").manual_seed(width)
    inputs = [
        torch.randn(700, heads, width, device="cuda", generator=generator).bfloat16().requires_grad_()
        for heads in (4, 2, 2)
    ]
    ends = torch.tensor([0, 130, 130, 403, 690], dtype=torch.int32, device="cuda")

    def call(given: list[torch.Tensor], path: str) -> torch.Tensor:
        return portattn.varlen_attention(*given, ends, ends, 290, 290, causal=True, backend=path)

    close(inputs, call(inputs, "auto"), call)


def test_float32_and_features() -> None:
    inputs = tensors(2, 200, 260, 64, torch.float32)
    bias = torch.randn(1, 4, 200, 260, device="cuda").requires_grad_()
    slopes = torch.rand(4, device="cuda").requires_grad_()
    sinks = torch.randn(4, device="cuda").requires_grad_()

    def call(given: list[torch.Tensor], path: str) -> torch.Tensor:
        *qkv, b, a, s = given
        return portattn.attention(*qkv, bias=b, alibi_slopes=a, sinks=s, softcap=5.0, causal=True, backend=path)

    everything = [*inputs, bias, slopes, sinks]
    close(everything, call(everything, "auto"), call)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_deterministic_runs_repeat_bit_by_bit(width: int) -> None:
    q, k, v = tensors(2, 1500, 1500, width, torch.bfloat16)
    grad = torch.randn_like(q)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(portattn.attention(q, k, v, causal=True), (q, k, v), grad) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_a_compiled_and_a_checkpointed_call() -> None:
    inputs = tensors(2, 256, 256, 128, torch.bfloat16)

    def call(*given: torch.Tensor) -> torch.Tensor:
        return portattn.attention(*given, causal=True)

    torch.use_deterministic_algorithms(True)  # adding up in turns is what makes runs alike
    try:
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        grad = torch.randn_like(inputs[0])
        expected = torch.autograd.grad(call(*inputs), inputs, grad)
        for one in (compiled(*inputs), torch.utils.checkpoint.checkpoint(call, *inputs, use_reentrant=False)):
            found = torch.autograd.grad(one, inputs, grad)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_dropout_is_the_same_as_on_a_cpu() -> None:
    q, k, v = tensors(2, 130, 140, 64, torch.float32)
    seed = torch.tensor([77])
    found = torch.autograd.grad(
        portattn.attention(q, k, v, dropout_p=0.3, dropout_seed=seed.cuda(), causal=True).sum(), (q, k, v)
    )
    cpu = [t.detach().cpu().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(portattn.attention(*cpu, dropout_p=0.3, dropout_seed=seed, causal=True).sum(), cpu)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), right, atol=2e-3, rtol=2e-3)


def test_a_second_call_launches_what_was_kept() -> None:
    q, k, v = tensors(2, 300, 300, 128, torch.bfloat16)
    for _ in range(2):
        torch.autograd.grad(portattn.attention(q, k, v, causal=True).sum(), (q, k, v))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(portattn.attention(q, k, v, causal=True), (q, k, v), torch.ones_like(q))
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any("backward" in name or "dkdv" in name or "keys" in name for name in names), names
    assert not any("Memcpy DtoH" in name for name in names), "nothing is read back"
