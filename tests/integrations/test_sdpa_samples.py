"""torch's own samples of SDPA (OpInfo) through every way in, forward and backward, in every dtype."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from sdpa_cases import Around, check, kept_by, samples
from torch.nn.attention import SDPBackend, sdpa_kernel

import portattn
from portattn.integrations import sdpa
from portattn.integrations import sdpa_routes as routes

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WAYS = ("function", "replaced", "flash_impl")


def way_in(way: str, device: str) -> tuple[Callable[..., torch.Tensor], Around]:
    """SDPA as a program would call it, and the block around that."""
    if way == "function":
        return sdpa.scaled_dot_product_attention, contextlib.nullcontext
    block: Around = sdpa.replaced if way == "replaced" else functools.partial(sdpa.flash_impl, device)
    return lambda *args, **kwargs: torch.nn.functional.scaled_dot_product_attention(*args, **kwargs), block


@pytest.mark.filterwarnings("ignore::portattn.FallbackWarning")  # float64, and backwards of the flash kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_samples(way: str, dtype: torch.dtype) -> None:
    ours, around = way_in(way, "cpu")
    torch.manual_seed(0)
    paths = []
    for sample in samples("cpu", dtype):
        args = (sample.input, *sample.args)
        kept = None
        if sample.kwargs.get("dropout_p", 0.0):
            if way == "flash_impl":
                continue  # torch's flash kernel on the CPU has no dropout, and SDPA does not call it
            with around():
                kept = kept_by(seeded(ours), args[0], args[1], **sample.kwargs)
        routes.note(None)
        check(seeded(ours), *args, around=around, kept=kept, **sample.kwargs)
        route = sdpa.last_route()
        paths.append("" if route is None else "backward" if "backward" in route.reason else route.path)
    if way != "flash_impl":
        assert paths == ["torch" if dtype is torch.float64 else "portattn"] * 25
    elif dtype is torch.float64:
        assert set(paths) == {"", "backward"}
    else:  # torch calls its flash kernel for four axes and no mask that requires grad; 2.14 for three axes too
        three = Version(torch.__version__).release >= (2, 14)
        assert [paths.count(path) for path in ("backward", "")] == ([8, 5] if three else [4, 9])


def seeded(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function, drawing the same numbers at each call."""

    def again(*args: Any, **kwargs: Any) -> torch.Tensor:
        torch.manual_seed(1)
        return function(*args, **kwargs)

    return again


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dropout_leaves_what_it_should(device: str) -> None:
    """A share of 1 - p is left, scaled by 1 / (1 - p), and the seed decides which."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 64, 32, device=device, dtype=torch.float32)
    eye = torch.eye(64, device=device).expand(2, 4, 64, 64)
    whole = sdpa.scaled_dot_product_attention(q, k, eye)
    torch.manual_seed(1)
    left = sdpa.scaled_dot_product_attention(q, k, eye, dropout_p=0.25)
    share = (left != 0).float().mean().item()
    assert abs(share - 0.75) < 0.02  # 32,768 draws: 8 standard deviations
    torch.testing.assert_close(left[left != 0], (whole / 0.75)[left != 0], rtol=1e-4, atol=1e-6)
    torch.manual_seed(1)
    first = sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    torch.manual_seed(1)
    assert torch.equal(first, sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.25))
    assert not torch.equal(first, sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.25))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::portattn.FallbackWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "no gradients"])
def test_samples_on_the_accelerator(grad: bool, way: str, dtype: torch.dtype) -> None:
    """Those without dropout: which elements it leaves depends on the kernel, and so on the width of value."""
    ours, around = way_in(way, "cuda")
    count = 0
    for sample in samples("cuda", dtype, requires_grad=grad):
        if not sample.kwargs.get("dropout_p", 0.0):
            check(ours, sample.input, *sample.args, around=around, **sample.kwargs)
            count += 1
    assert count == 13


def test_gradients_of_gradients() -> None:
    """The reference is made of torch's operators: what it gives can be differentiated twice, as torch's definition."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(3))
    found = []
    for function in (sdpa.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention):
        with portattn.settings(backend="reference"), sdpa_kernel(SDPBackend.MATH):
            out = function(q, k, v, is_causal=True)
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (q, k, v)))
    for mine, torchs in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-5)


def test_last_plan_tells_how_portattn_ran_a_sample() -> None:
    sample = next(iter(samples("cpu", torch.float32)))
    sdpa.scaled_dot_product_attention(sample.input, *sample.args, **sample.kwargs)
    plan = portattn.last_plan()
    assert plan is not None
    assert plan.problem.causal == "top_left"
    assert plan.problem.needs_grad
