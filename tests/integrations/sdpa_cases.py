"""What the SDPA tests share: the definition of torch's SDPA in float64, torch's samples of it, and the error budget."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from portattn.integrations import sdpa
from portattn.testing.tolerance import budget, largest

Around = Callable[[], contextlib.AbstractContextManager[Any]]
ATTENTION = "nn.functional.scaled_dot_product_attention"


def definition(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
        kept: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    """torch's definition (its documentation's code) in the dtype given; a row that may attend nothing gives 0.

    kept  the probabilities that dropout left, bool (..., Hq, L, S)"""
    rows, keys = query.shape[-2], key.shape[-2]
    scores = query @ _repeated(key, query, enable_gqa).transpose(-1, -2)
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    idle = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(idle, 0.0), -1).masked_fill(idle, 0.0)
    if kept is not None:
        weights = weights * kept / (1.0 - dropout_p)
    return weights @ _repeated(value, query, enable_gqa)


def _repeated(tensor: torch.Tensor, query: torch.Tensor, enable_gqa: bool) -> torch.Tensor:
    return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3) if enable_gqa else tensor


def path() -> str:
    route = sdpa.last_route()
    return "none" if route is None else route.path


def samples(device: str, dtype: torch.dtype, requires_grad: bool = True) -> Iterator[Any]:
    """torch's OpInfo samples of SDPA: input, args and kwargs each. Skips where torch's testing code is incomplete."""
    pytest.importorskip("expecttest", reason="torch's testing code needs expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    # The import forbids changes of torch.backends' flags for the whole process; other tests make some.
    vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True
    info = next(op for op in op_db if op.name == ATTENTION)
    yield from info.sample_inputs(device, dtype, requires_grad=requires_grad)


def gradient_of(out: torch.Tensor) -> torch.Tensor:
    """A random gradient of the output, the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).bfloat16().to(out.device, out.dtype)


def largest_term(out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: Any) -> float:
    """No summand of a gradient of query, key or attn_mask is larger, before they cancel: P · (g·v) · k · scale."""
    if not (out.numel() and value.numel()):
        return 0.0
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale)
    product = gradient_of(out).norm(dim=-1).max() * value.norm(dim=-1).max()
    return float(product * max(1.0, factor * largest(query), factor * largest(key)))


def assert_within_budget(ours: torch.Tensor, torchs: torch.Tensor, right: torch.Tensor, least: float = 0.0) -> None:
    """The rule of all tests: max|ours - right| ≤ 2 · max|torch's - right| + tiny. No NaN where torch has none.

    least  what `right` counts as at least, for tiny"""
    assert ours.shape == torchs.shape == right.shape
    assert ours.dtype is torchs.dtype
    assert not (ours.isnan() & ~torchs.isnan()).any()
    if ours.numel():
        error = (ours.double() - right.double()).abs().max().item()
        assert error <= budget(ours.dtype, right.double(), torchs.double(), least)


def check(ours: Callable[..., torch.Tensor], *args: torch.Tensor, around: Around = contextlib.nullcontext,
        kept: torch.Tensor | None = None, **kwargs: Any) -> None:  # fmt: skip
    """Forward and, where something requires grad, backward of a call, beside torch's own and the definition in float64.

    around  the block in which `ours` is called, and its gradients are computed
    kept    what dropout left of the probabilities; torch's own would draw others, and the definition stands for it"""
    theirs = torch._C._nn.scaled_dot_product_attention
    in_64 = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in args]
    mask = kwargs.pop("attn_mask", None)
    mask_64 = mask
    if mask is not None and mask.dtype is not torch.bool:
        mask_64 = mask.detach().double().requires_grad_(mask.requires_grad)
    with around():
        mine = results(ours, args, mask, kwargs)
    try:
        torchs = results(theirs if kept is None else definition, args, mask, kwargs, kept)
    except RuntimeError as error:  # torch 2.11's fused kernels on CUDA refuse some masks; its own products take them
        if "must be contiguous" not in str(error) and "not correctly aligned" not in str(error):
            raise
        with sdpa_kernel(SDPBackend.MATH):
            torchs = results(theirs, args, mask, kwargs)
    right = results(definition, in_64, mask_64, kwargs, kept)
    least = largest_term(right[0], *(tensor.detach() for tensor in in_64), kwargs.get("scale"))
    assert_within_budget(mine[0], torchs[0], right[0])
    for gradients in zip(mine[1:], torchs[1:], right[1:], strict=True):
        assert_within_budget(*gradients, least=least)


def results(function: Callable[..., torch.Tensor], args: Any, mask: torch.Tensor | None, kwargs: dict[str, Any],
        kept: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:  # fmt: skip
    given = {"attn_mask": mask, "kept": kept}
    out = function(*args, **kwargs, **{name: tensor for name, tensor in given.items() if tensor is not None})
    inputs = [tensor for tensor in (*args, mask) if tensor is not None and tensor.requires_grad]
    return (out.detach(), *(torch.autograd.grad(out, inputs, gradient_of(out)) if inputs else ()))


def kept_by(ours: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Which probabilities dropout leaves of a call: with the unit matrix as value they are the output."""
    keys = key.shape[-2]
    eye = torch.eye(keys, dtype=query.dtype, device=query.device).expand(*key.shape[:-2], keys, keys)
    return ours(query.detach(), key.detach(), eye, **kwargs) != 0
