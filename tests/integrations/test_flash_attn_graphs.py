"""flash_attn's functions under torch.compile (whole graphs) and autocast."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flash_attn_oracle import beginnings, check_one, ints

import portattn
from portattn.integrations import flash_attn, flash_attn_interface
from portattn.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache, low_level
from portattn.integrations.flash_attn.core import FlashAttnError

CU = beginnings((5, 9))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(4, 4), return_attn_probs=True)[:2]


def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flash_attn.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    q, k, v = (t[0] for t in (q, k, v))
    return flash_attn.flash_attn_varlen_func(q, k, v, CU, CU, 9, 9, causal=True)


def used(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    q, k, v = (t[0] for t in (q, k, v))
    return flash_attn_interface.flash_attn_varlen_func(q, k, v, CU, CU, 9, 9, ints(2, 9), ints(5, 3), causal=True)


def tensors(grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1, 14, heads, 16, requires_grad=grad) for heads in (4, 2, 2)]


@pytest.mark.parametrize("function", [dense, varlen, used])
def test_compiled_in_one_graph_with_gradients(function: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    eager, compiled = tensors(True), tensors(True)
    first, second = function(*eager), torch.compile(function, backend="aot_eager", fullgraph=True)(*compiled)
    outs = [found[0] if isinstance(found, tuple) else found for found in (first, second)]
    assert torch.allclose(*outs, atol=1e-6)
    if isinstance(first, tuple):
        assert torch.allclose(first[1], second[1], atol=1e-6)
    for out in outs:
        out.square().sum().backward()
    for ours, theirs in zip(compiled, eager, strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)


def test_compiled_dropout() -> None:
    torch._dynamo.reset()
    q, k, v = tensors()
    out, lse, masked = torch.compile(dropped, backend="aot_eager", fullgraph=True)(q, k, v)
    kept = ~torch.signbit(masked)
    assert 0.4 < kept.float().mean() < 0.6
    check_one(out[0], lse[0], q[0], k[0], v[0], math.inf, kept=kept[0], dropout_p=0.5)


@pytest.mark.parametrize(("given", "reason"), [
    ({"window_size": 3}, r"'flash_attn_func', 'window_size', 3, 'must be two integers"),
    ({"deterministic": True}, r"flash_attn: deterministic=True goes with torch.use_deterministic_algorithms\(True\)"),
    ({"window_size": torch.tensor([3, 0])}, r"flash_attn: window_size must be two integers in a graph"),
    ({"window_size": (np.array(3), 0)}, r"flash_attn: window_size must be two integers in a graph"),
    ({"causal": "top_left"}, r"'causal', 'top_left', 'must be True or False'"),
])  # fmt: skip
def test_a_whole_graph_says_why_a_call_is_refused(given: dict[str, Any], reason: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn.flash_attn_func, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        compiled(*tensors(True), **given)


@pytest.mark.interpreter
@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=lambda module: module.__name__)
def test_graphs_end_where_none_can_have_the_call(module: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(module.flash_attn_func, backend="aot_eager")
    for given in ({"deterministic": True}, {"window_size": torch.tensor([3, 0])}, {"window_size": (np.array(3), 0)}):
        first, second = tensors(True), tensors(True)
        with portattn.settings(backend="interpreter"):
            out, right = compiled(*first, **given), module.flash_attn_func(*second, **given)
        assert torch.equal(out, right)
        right.square().sum().backward()
        out.square().sum().backward()
        assert portattn.last_backward_plan().problem.deterministic is ("deterministic" in given)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(first, second, strict=True))
    inlined = torch.compile(lambda *given, **options: module.flash_attn_func(*given, **options), backend="aot_eager")
    for function in (compiled, inlined):
        with pytest.raises(FlashAttnError, match=r"^flash_attn_func: window_size is 3, "):
            function(*tensors(True), window_size=3)


def test_a_whole_graph_takes_windows_that_change() -> None:
    torch._dynamo.reset()
    q, k, v = tensors()
    compiled = torch.compile(flash_attn.flash_attn_func, backend="aot_eager", fullgraph=True)
    for window in ((1, 1), (2, 1), (5, 0), (-1, 2)):
        out = compiled(q, k, v, window_size=window)
        check_one(out[0], None, q[0], k[0], v[0], math.inf, window_size=window)


@pytest.mark.parametrize(("form", "grad"), [("own", False), ("own", True), ("batch_idx", False), ("pages", False)])
def test_compiled_with_a_cache(form: str, grad: bool) -> None:
    """A whole graph that writes in place and takes new lengths without being compiled again. Where gradients are
    recorded and queries require them, it computes without."""
    torch._dynamo.reset()
    torch.manual_seed(2)
    given: dict[str, Any] = {"own": {}, "batch_idx": {"cache_batch_idx": ints(2, 0)},
        "pages": {"block_table": ints(3, 1, 0, 2).view(2, 2)}}[form]  # fmt: skip
    sizes = {"own": (2, 32), "batch_idx": (3, 32), "pages": (4, 16)}[form]
    angles = torch.randn(40, 8)
    cos, sin = angles.cos(), angles.sin()

    def step(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, lengths: Any) -> Any:
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, lengths, causal=True,
            return_softmax_lse=True, **given)  # fmt: skip

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    eager_caches = [torch.randn(*sizes, 2, 16) for _ in range(2)]
    caches = [cache.clone() for cache in eager_caches]
    with torch.set_grad_enabled(grad), torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in (ints(3, 17), ints(4, 18)):
            q, k, v = (torch.randn(2, 1, heads, 16, requires_grad=grad) for heads in (4, 2, 2))
            right = step(q, *eager_caches, k, v, lengths)
            found = compiled(q, *caches, k, v, lengths)
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, right, strict=True))
            assert not any(tensor.requires_grad for tensor in (*found, *right, *caches, *eager_caches))
            assert all(torch.equal(a, b) for a, b in zip(caches, eager_caches, strict=True))


def test_autocast() -> None:
    """Dense calls run in autocast's dtype; a cache keeps its own, and what is computed of it has that one."""
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse, masked = flash_attn.flash_attn_func(q, k, v, 0.2, return_attn_probs=True)
        assert out.dtype is masked.dtype is torch.bfloat16
        rng = torch.get_rng_state()
        found = flash_attn.flash_attn_func(q, k, v, 0.2, return_attn_probs=True)
        torch.set_rng_state(rng)
        apart = low_level._flash_attn_forward(q, k, v, 0.2, None, False, -1, -1, 0.0, None, True)
        assert all(torch.equal(a, b) for a, b in zip(found, apart[:3], strict=True))
        assert apart[2].dtype is torch.bfloat16
        kept = ~torch.signbit(masked[0])
        narrow = (t[0].bfloat16() for t in (q, k, v))
        check_one(out[0], lse[0], *narrow, math.inf, kept=kept, dropout_p=0.2)
        for dtype in (torch.float32, torch.bfloat16):
            k_cache, v_cache = torch.zeros(1, 20, 2, 16, dtype=dtype), torch.zeros(1, 20, 2, 16, dtype=dtype)
            out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0, causal=True)
            assert out.dtype is dtype
            assert torch.equal(k_cache[:, :14], k.to(dtype))
            check_one(out[0], None, *(t[0].to(dtype) for t in (q, k, v)), math.inf, causal=True)


# The flash_attn module on an accelerator: dense calls, and caches that grow in place inside a CUDA graph.
def check(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    check_one(out.cpu(), None, q.cpu(), k.cpu(), v.cpu(), math.inf, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys", "dim"), [(1024, 1024, 128), (100, 900, 64), (1, 513, 256)])
def test_dense(rows: int, keys: int, dim: int, causal: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, rows, 8, dim, device="cuda").bfloat16()
    k, v = (torch.randn(2, keys, 2, dim, device="cuda").bfloat16() for _ in range(2))
    out = flash_attn_func(q, k, v, causal=causal)
    assert isinstance(out, torch.Tensor)
    for b in range(2):
        check(out[b], q[b], k[b], v[b], causal)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [None, 64])
def test_a_cache_grows_inside_a_graph(page: int | None) -> None:
    """Captured once, replayed for six tokens of sequences of different lengths. Rows that hold nothing are NaN."""
    torch.manual_seed(0)
    batch, room, heads, kv_heads, dim = 4, 512, 8, 2, 128
    shape = (batch, room) if page is None else (batch * room // page, page)
    table = None if page is None else torch.randperm(shape[0], dtype=torch.int32, device="cuda").view(batch, -1)
    caches = [torch.full((*shape, kv_heads, dim), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def rows_of(cache: torch.Tensor, b: int) -> torch.Tensor:
        return cache[b] if table is None else cache[table[b].long()].flatten(0, 1)

    lengths = torch.tensor([0, 63, 64, room - 7], dtype=torch.int32, device="cuda")
    known = [[torch.randn(int(n), kv_heads, dim, device="cuda").bfloat16() for n in lengths] for _ in range(2)]
    for cache, of in zip(caches, known, strict=True):
        for b, rows in enumerate(of):
            place = torch.arange(rows.shape[0], device="cuda")
            if table is None:
                cache[b, place] = rows
            else:
                cache[table[b][place // page].long(), place % page] = rows
    q = torch.randn(batch, 1, heads, dim, device="cuda").bfloat16()
    k, v = (torch.randn(batch, 1, kv_heads, dim, device="cuda").bfloat16() for _ in range(2))

    def run() -> torch.Tensor:
        out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, block_table=table, causal=True)
        assert isinstance(out, torch.Tensor)
        return out

    run()  # writes the first token, which the first replay writes again
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(6):
        for tensor in (q, k, v):
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        torch.cuda.synchronize()
        for b in range(batch):
            known[0][b], known[1][b] = torch.cat([known[0][b], k[b]]), torch.cat([known[1][b], v[b]])
            for cache, of in zip(caches, known, strict=True):
                count = of[b].shape[0]
                assert torch.equal(rows_of(cache, b)[:count], of[b])
                assert rows_of(cache, b)[count:].isnan().all()
            check(out[b], q[b], known[0][b], known[1][b], causal=True)
        lengths += 1


@pytest.mark.gpu
def test_a_block_table_with_too_few_pages() -> None:
    """The longest length is read back; the capture of a graph and `validate="never"` read nothing."""
    pages, table = torch.randn(2, 8, 1, 64, device="cuda").half(), torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    q, lengths = torch.randn(1, 1, 1, 64, device="cuda").half(), torch.tensor([9], dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match=r"cache_seqlens\.max\(\) is 9, .* in block_table's 1 pages of 8"):
        flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)
    with portattn.settings(validate="never"):
        out = flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)
    assert torch.isfinite(out).all()
