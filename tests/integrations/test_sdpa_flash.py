"""portattn in torch's registry of flash attention: activating, restoring, and each of the aten operators. The
operators' CPU kernels stand for CUDA's: torch has none of its own there but those of `_for_cpu`."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle64 import masked_attention
from sdpa_cases import assert_within_budget, gradient_of, path
from torch.nn import attention, functional

import portattn
from portattn.integrations import sdpa, sdpa_mapping
from portattn.integrations.sdpa_flash import Activation

pytestmark = pytest.mark.skipif(not hasattr(attention, "register_flash_attention_impl"),
    reason="this torch has no such registry")  # fmt: skip

ATEN = torch.ops.aten
IN_PLACE = "_flash_attention_forward_no_dropout_inplace"
NO_IN_PLACE = not hasattr(ATEN, IN_PLACE)  # torch 2.11
FIVE = (
    "_flash_attention_forward", *([] if NO_IN_PLACE else [IN_PLACE]), "_flash_attention_backward",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
)  # fmt: skip


def has_cpu_kernel(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU"))


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def test_nothing_is_active_until_it_is_asked_for() -> None:
    assert sdpa.register_flash_impl("cpu") in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    assert not any(has_cpu_kernel(one) for one in FIVE)


def test_torchs_registry_activates_and_restores() -> None:
    name, q = sdpa.register_flash_impl("cpu", name="mine"), tensors((1, 2, 5, 16))[0]
    right = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    attention.activate_flash_attention_impl(name)
    try:
        assert all(has_cpu_kernel(one) for one in FIVE)
        torch.testing.assert_close(functional.scaled_dot_product_attention(q, q, q, is_causal=True), right)
        assert path() == "portattn"
    finally:
        attention.restore_flash_attention_impl()
    assert not any(has_cpu_kernel(one) for one in FIVE)
    portattn.attention(q, q, q)
    sdpa_mapping.note(None)
    functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert path() == "none"


def test_blocks_restore_what_was_active() -> None:
    def fail() -> None:
        with sdpa.flash_impl("cpu"):
            raise KeyError

    with sdpa.flash_impl("cpu") as outer:
        with pytest.raises(KeyError):
            fail()
        assert attention.current_flash_attention_impl() == outer
        assert has_cpu_kernel(FIVE[0])
        with sdpa.flash_impl("cpu"):
            attention.restore_flash_attention_impl()  # by somebody else
        assert attention.current_flash_attention_impl() == outer
    assert attention.current_flash_attention_impl() is None
    assert not has_cpu_kernel(FIVE[0])


def test_an_implementation_that_was_active_before_is_again() -> None:
    removed = []

    class Handle:
        def remove(self) -> None:
            removed.append(True)

    attention.register_flash_attention_impl("another", register_fn=Handle)
    attention.activate_flash_attention_impl("another")
    try:
        with sdpa.flash_impl("cpu"):
            assert removed == [True]
        assert attention.current_flash_attention_impl() == "another"
    finally:
        attention.restore_flash_attention_impl()


def test_removing_twice_is_once() -> None:
    active = Activation("cpu")
    assert has_cpu_kernel(FIVE[0])
    active.remove()
    active.remove()
    assert not has_cpu_kernel(FIVE[0])


def test_devices_that_are_none() -> None:
    with pytest.raises(portattn.ArgumentError, match="device_type is 'mps', but must be cuda or cpu"):
        sdpa.register_flash_impl("mps")
    if not torch.backends.cuda.is_built():
        with pytest.raises(portattn.PortattnError, match="not built for CUDA"):
            sdpa.register_flash_impl("cuda")


def backward_by_lse(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, seen: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The backward of FlashAttention's paper in float64, (B, H, S, D): of the output and the LSE that it is given."""
    grad, q, k, v, out, lse = (tensor.double() for tensor in (grad, q, k, v, out, lse))
    weights = torch.exp((q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -math.inf) - lse[..., None])
    delta = (grad * out).sum(-1, keepdim=True)
    scores = weights * (grad @ v.transpose(-1, -2) - delta) * scale
    return scores @ k, scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


@pytest.fixture
def torchs_backward() -> Iterator[list[tuple[Any, ...]]]:
    """A backward kernel of torch's own on the CPU, as FA2's is on CUDA, and the arguments that it got."""
    got: list[tuple[Any, ...]] = []

    def dense(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, scale: Any = None) -> Any:
        got.append((lse, *rest))
        causal, seen = rest[5], torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        seen = seen.tril(k.shape[2] - q.shape[2]) if causal else seen
        found = backward_by_lse(grad, q, k, v, out, lse, seen, scale or q.shape[-1] ** -0.5)
        return tuple(one.to(q.dtype) for one in found)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention_backward", dense, "CPU")
    yield got
    library._destroy()


@pytest.mark.filterwarnings("ignore::portattn.FallbackWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "causal"), [(5, True), (3, True), (7, True), (3, False)])
def test_dense_forward_and_backward(rows, causal, dtype, torchs_backward):
    """A causal mask at the bottom right, as FlashAttention's; +inf as the LSE of a row without a key, as FA2 gives."""
    given = tensors((2, 4, rows, 16), (2, 4, 5, 16), (2, 4, 5, 16), dtype=dtype)
    seen = torch.ones(2, rows, 5, dtype=torch.bool)
    seen = seen.tril(5 - rows) if causal else seen
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    with sdpa.flash_impl("cpu"):
        out, lse, cum_q, cum_k, longest_q, longest_k, *state = ATEN._scaled_dot_product_flash_attention(*leaves, 0.0,
            causal, scale=0.3)  # fmt: skip
        assert path() == "portattn"
        found = torch.autograd.grad(out, leaves, gradient_of(out))
        assert path() == "torch"
    assert (cum_q, cum_k, longest_q, longest_k) == (None, None, rows, 5)
    assert ([tensor.numel() for tensor in state], len(torchs_backward)) == ([2, 1, 0], 1)
    results: list[list[torch.Tensor]] = []
    for kind in (dtype, torch.float64):
        inputs = [tensor.detach().to(kind).requires_grad_() for tensor in given]
        one, of_lse = masked_attention(*inputs, 0.3, seen)
        results.append([one.detach(), *torch.autograd.grad(one, inputs, gradient_of(one)), of_lse.detach()])
    same, right = results
    assert_within_budget(out.detach(), same[0], right[0])
    for mine, torchs, exact in zip(found, same[1:4], right[1:4], strict=True):
        assert_within_budget(mine, torchs, exact, least=8.0)
    assert lse.dtype is torch.float32
    torch.testing.assert_close(
        lse.double(), right[4].masked_fill(right[4] == -math.inf, math.inf), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("in_place", [
    False, pytest.param(True, marks=pytest.mark.skipif(NO_IN_PLACE, reason=f"this torch has no {IN_PLACE}"))
])  # fmt: skip
@pytest.mark.parametrize("window", [(None, None), (-1, -1), (2, 1)], ids=str)
def test_packed_and_dense_forwards_are_portattns(window: tuple[int | None, int | None], in_place: bool) -> None:
    q, k, v = tensors((9, 4, 16), (12, 2, 16), (12, 2, 16))
    cu_q, cu_k = torch.tensor([0, 4, 4, 9], dtype=torch.int32), torch.tensor([0, 6, 7, 12], dtype=torch.int32)
    options = {"scale": 0.3, "window_size_left": window[0], "window_size_right": window[1]}
    cases = [
        ((q, k, v, cu_q, cu_k, 5, 6), functools.partial(portattn.varlen_attention, q, k, v, cu_q, cu_k, 5, 6)),
        ((q[None], k[None], v[None], None, None, 9, 12),
         functools.partial(portattn.attention, q[None], k[None], v[None], layout="bshd")),
    ]  # fmt: skip
    for args, ours in cases:
        right, of_lse = ours(scale=0.3, causal=True, window=window, return_lse=True)
        with sdpa.flash_impl("cpu"):
            if in_place:
                out = torch.full_like(right, math.nan)
                lse = ATEN._flash_attention_forward_no_dropout_inplace(out, *args, 0.0, True, False, **options)
            else:
                out, lse, *_ = ATEN._flash_attention_forward(*args, 0.0, True, False, **options)
        assert path() == "portattn"
        torch.testing.assert_close(out, right)
        torch.testing.assert_close(lse, of_lse)


def test_seqused_k_of_a_dense_forward() -> None:
    q, k, v = tensors((2, 3, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16))
    used = torch.tensor([5, 8], dtype=torch.int32)
    with sdpa.flash_impl("cpu"):
        out = ATEN._flash_attention_forward(q, k, v, None, None, 3, 8, 0.0, True, False, seqused_k=used)[0]
    for batch, keys in enumerate(used.tolist()):
        alone = portattn.attention(q[[batch]], k[[batch], :keys], v[[batch], :keys], causal=True, layout="bshd")
        torch.testing.assert_close(out[[batch]], alone)


def test_the_memory_order_is_the_querys() -> None:
    """As torch's kernels have it, and their shapes, on which compiled code relies."""
    q = tensors((2, 5, 4, 16))[0].transpose(1, 2)
    with sdpa.flash_impl("cpu"):
        out = ATEN._scaled_dot_product_flash_attention(q, q, q)[0]
        on_cpu, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    own, own_lse = ATEN._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    assert out.stride() == on_cpu.stride() == own.stride() == q.stride()
    assert lse.stride() == own_lse.stride()
    torch.testing.assert_close(lse, own_lse)


def test_rows_without_keys_have_torchs_lse() -> None:
    q, k = tensors((1, 2, 3, 16), (1, 2, 5, 16))
    mask = torch.zeros(3, 5)
    mask[1] = -math.inf
    right = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, k, attn_mask=mask)
    with sdpa.flash_impl("cpu"):
        found = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, k, attn_mask=mask)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize(("op", "given", "reason"), [
    ("dense", {"dropout_p": 0.5}, "dropout_p is 0.5"),
    ("dense", {"return_debug_mask": True}, "return_debug_mask is True"),
    ("any", {"alibi_slopes": torch.zeros(4)}, "alibi_slopes are given"),
    ("any", {"block_table": torch.zeros(1, 1, dtype=torch.int32)}, "block_table is given"),
    ("any", {"cum_seq_q": torch.tensor([0, 3], dtype=torch.int32)}, "only one of cum_seq_q and cum_seq_k"),
])  # fmt: skip
def test_what_is_not_taken_is_torchs_kernel_or_an_error_that_says_why(op: str, given: Any, reason: str) -> None:
    q = tensors((1, 3, 4, 16))[0]
    if op == "dense":
        call = functools.partial(ATEN._scaled_dot_product_flash_attention, q, q, q, **given)
    else:
        rest = {name: value for name, value in given.items() if name != "cum_seq_q"}
        if not set(rest) <= {argument.name for argument in ATEN._flash_attention_forward.default._schema.arguments}:
            pytest.skip(f"this torch's flash kernel does not take {', '.join(rest)}")
        lengths = given.get("cum_seq_q"), None, 3, 3
        call = functools.partial(ATEN._flash_attention_forward, q, q, q, *lengths, 0.0, True, False, **rest)
    with sdpa.flash_impl("cpu"), pytest.raises(portattn.PathUnavailable, match="no kernel of its own for cpu") as error:
        call()
    assert reason in error.value.rejected[0].reason


def test_float64_is_torchs_own() -> None:
    q = tensors((1, 2, 5, 16), dtype=torch.float64)[0]
    right = functional.scaled_dot_product_attention(q, q, q)
    with sdpa.flash_impl("cpu"), pytest.warns(portattn.FallbackWarning, match="query is torch.float64"):
        assert torch.equal(functional.scaled_dot_product_attention(q, q, q), right)
    assert path() == "torch"


def test_gradients_are_told_and_may_be_forbidden() -> None:
    q = tensors((1, 2, 5, 16))[0].requires_grad_()
    with sdpa.flash_impl("cpu"):
        out = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        with portattn.settings(fallback="error"), pytest.raises(portattn.PathUnavailable, match="no backward kernels"):
            out.sum().backward()
        with pytest.warns(portattn.FallbackWarning, match="portattn has no backward kernels"):
            functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


@pytest.mark.filterwarnings("ignore::portattn.FallbackWarning")
def test_compiled_programs_call_the_operators() -> None:
    """What was compiled before is served as well: the graph holds torch's operator."""
    torch._dynamo.reset()
    q = tensors((1, 2, 5, 16))[0].requires_grad_()
    compiled = torch.compile(lambda q: functional.scaled_dot_product_attention(q * 2, q, q, is_causal=True),
        backend="aot_eager", fullgraph=True)  # fmt: skip
    right = compiled(q)
    (of_q,) = torch.autograd.grad(right.square().sum(), q)
    assert path() == "none"
    with sdpa.flash_impl("cpu"):
        out = compiled(q)
        assert path() == "portattn"
        (grad,) = torch.autograd.grad(out.square().sum(), q)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(grad, of_q, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::portattn.FallbackWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [8, 2])
def test_sdpas_flash_kernel_on_the_accelerator(dtype: torch.dtype, heads: int) -> None:
    """Forward by portattn, backward by torch's own kernel, which gets our output and LSE; masked rows too."""
    shapes = ((2, 8, 128, 64), (2, heads, 128, 64), (2, heads, 128, 64))
    leaves = [tensor.cuda().requires_grad_() for tensor in tensors(*shapes, dtype=dtype)]
    found = []
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        for serve in (False, True):
            with sdpa.flash_impl("cuda") if serve else torch.enable_grad():
                out = functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=heads < 8)
                assert path() == ("portattn" if serve else "none")
                found.append([out.detach(), *torch.autograd.grad(out, leaves, gradient_of(out))])
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    right, _ = masked_attention(*exact, 64**-0.5, torch.ones(2, 128, 128, dtype=torch.bool).tril())
    grads = torch.autograd.grad(right, exact, gradient_of(right))
    for torchs, mine, one in zip(*found, [right.detach(), *grads], strict=True):
        assert_within_budget(mine, torchs, one)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::portattn.FallbackWarning")
def test_the_lse_of_rows_without_keys_on_the_accelerator() -> None:
    """What torch's own kernel gives, and its gradients are 0 there, by either forward."""
    leaves = [tensor.cuda().requires_grad_() for tensor in tensors((1, 2, 7, 64), (1, 2, 5, 64), (1, 2, 5, 64),
                                                                   dtype=torch.float16)]  # fmt: skip
    found = []
    for serve in (False, True):
        with sdpa.flash_impl("cuda") if serve else torch.enable_grad():
            out, lse, *_ = ATEN._scaled_dot_product_flash_attention(*leaves, 0.0, True)
            found.append([out.detach(), lse, *torch.autograd.grad(out, leaves, gradient_of(out))])
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)
