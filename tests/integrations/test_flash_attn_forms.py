"""Forms of calls that flash_attn takes, one by one: each against the definition in float64. Its own tests call it so
(scripts/flash_attn_suite.py runs those)."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from flash_attn_oracle import beginnings, check_one, ints, one, within, within_gradients

import portattn
from portattn.errors import ArgumentError
from portattn.integrations import flash_attn, flash_attn_interface
from portattn.integrations.flash_attn import flash_attn_interface as inner
from portattn.integrations.flash_attn.kvcache import _beyond_padding

F8 = torch.float8_e4m3fn
LENGTHS_Q, LENGTHS_K = (3, 6, 0), (5, 9, 4)
CU_Q, CU_K = beginnings(LENGTHS_Q), beginnings(LENGTHS_K)


def dense(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, rows, heads, 16).to(dtype) for rows, heads in ((5, 4), (9, 2), (9, 2))]


def packed() -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(rows, heads, 16) for rows, heads in ((9, 4), (18, 2), (18, 2))]


def normalised(signed: torch.Tensor, scores: torch.Tensor, block: int) -> torch.Tensor:
    """Probabilities of S_dmask: each block of columns counts by the largest score of it and of all later columns."""
    lse = torch.logsumexp(scores, -1)
    parts = [part.abs() * torch.exp(scores[..., first:].amax(-1) - lse)[..., None]
        for first, part in zip(range(0, scores.shape[-1], block), signed.split(block, -1), strict=True)]  # fmt: skip
    return torch.cat(parts, -1)


WINDOWS = {
    "list": [2, 1], "tensor": torch.tensor([2, 1]), "tensors": (torch.tensor(2), torch.tensor(1)),
    "array": np.array([2, 1]), "numbers": (np.int32(2), np.int64(1)), "int32": torch.tensor([2, 1], dtype=torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=lambda module: module.__name__)
@pytest.mark.parametrize("form", WINDOWS)
def test_windows(module: Any, form: str) -> None:
    q, k, v = dense()
    out = module.flash_attn_func(q, k, v, window_size=WINDOWS[form])
    for b in range(2):
        check_one(out[b], None, q[b], k[b], v[b], math.inf, window_size=(2, 1))
    q, k, v = packed()
    out = module.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 6, 9, causal=True, window_size=WINDOWS[form])
    for b in range(3):
        mine, its = slice(*CU_Q[b : b + 2].tolist()), slice(*CU_K[b : b + 2].tolist())
        check_one(out[mine], None, q[mine], k[its], v[its], math.inf, window_size=(2, 0), causal=True)


@pytest.mark.parametrize("wrong", [torch.tensor([1.5, 0.0]), torch.tensor([1, 2, 3]), torch.tensor(4), (np.nan, 1)])
def test_windows_that_are_none(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^flash_attn_func: window_size is .* but must be two integers"):
        flash_attn.flash_attn_func(*dense(), window_size=wrong)


@pytest.mark.parametrize("softcap", [-3.0, -1e-30, 0.0])
def test_a_softcap_up_to_0_is_none(softcap: float) -> None:
    q, k, v = dense()
    out = flash_attn.flash_attn_func(4 * q, k, v, softcap=softcap)
    for b in range(2):
        check_one(out[b], None, 4 * q[b], k[b], v[b], math.inf)


@pytest.mark.interpreter
@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=lambda module: module.__name__)
@pytest.mark.parametrize("is_packed", [False, True])
def test_deterministic_of_one_call(module: Any, is_packed: bool) -> None:
    """The gradients' kernels are told so, in the thread that runs them; torch's own setting stays off."""
    tensors = packed() if is_packed else dense()
    results = []
    for deterministic in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        with portattn.settings(backend="interpreter"):
            if is_packed:
                out = module.flash_attn_varlen_func(*leaves, CU_Q, CU_K, 6, 9, deterministic=deterministic)
            else:
                out = module.flash_attn_func(*leaves, deterministic=deterministic)
        results.append(torch.autograd.grad(out.square().sum(), leaves))
        assert portattn.last_backward_plan().problem.deterministic is deterministic
        assert not torch.are_deterministic_algorithms_enabled()
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_gradients_that_torch_computes_follow_its_switch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from portattn.api import backward

    seen, by_torch = [], backward.by_torch

    def watched(request: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(not seen[-1])  # as the user may, in any thread
        return by_torch(request)

    monkeypatch.setattr(backward, "by_torch", watched)
    q, k, v = dense()
    try:
        for _ in range(2):
            torch.func.grad(lambda q: flash_attn.flash_attn_func(q, k, v, deterministic=True).square().sum())(q)
        assert seen == [False, True]
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_pages_beside_queries_that_require_gradients() -> None:
    """The forward pass runs; a backward pass raises, as flash_attn's does."""
    q, k, v = packed()
    pages_k, pages_v = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 6)).view(-1, 4, 2, 16) for t in (k, v))
    table, cu = ints(0, 1, 2, 3, 4, 5).view(3, 2), ints(0, 5, 13, 17)
    leaf = q.clone().requires_grad_()
    out, lse, _ = flash_attn.flash_attn_varlen_func(leaf, pages_k, pages_v, CU_Q, cu, 6, 8, causal=True,
        block_table=table, return_attn_probs=True)  # fmt: skip
    assert out.requires_grad
    for b, length in enumerate((5, 8, 4)):
        mine = slice(*CU_Q[b : b + 2].tolist())
        keys, values = (pages[table[b].long()].flatten(0, 1)[:length] for pages in (pages_k, pages_v))
        check_one(out[mine].detach(), lse[:, mine].detach(), q[mine], keys, values, math.inf, causal=True)
    for result in (out, lse):
        with pytest.raises(RuntimeError,
                match=r"^flash_attn_varlen_func: block_table is \(3, 2\), but has no gradient"):  # fmt: skip
            result.sum().backward()
    assert leaf.grad is None


@pytest.mark.parametrize("is_packed", [False, True])
def test_float8_that_requires_gradients(is_packed: bool) -> None:
    q, k, v = (t.to(F8) for t in (packed() if is_packed else dense()))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    if is_packed:
        out = flash_attn_interface.flash_attn_varlen_func(*leaves, CU_Q, CU_K, 6, 9, seqused_q=ints(*LENGTHS_Q),
            seqused_k=ints(*LENGTHS_K), num_splits=3)  # fmt: skip
        parts = [(slice(*CU_Q[b : b + 2].tolist()), slice(*CU_K[b : b + 2].tolist())) for b in range(3)]
    else:
        out = flash_attn_interface.flash_attn_func(*leaves, num_splits=3)
        parts = [(b, b) for b in range(2)]
    for mine, its in parts:
        expected, _, _ = one(q[mine].float(), k[its].float(), v[its].float())
        same, _, _ = one(q[mine].bfloat16(), k[its].bfloat16(), v[its].bfloat16(), exact=False)
        within(out[mine].detach(), expected, same)
    with pytest.raises(RuntimeError, match=r"q\.dtype is torch\.float8_e4m3fn, but has no gradient"):
        out.sum().backward()


@pytest.mark.parametrize("num_splits", [-1, 0, 1, 7, 1000])
def test_splits_are_a_hint(num_splits: int) -> None:
    q, k, v = dense()
    whole = flash_attn_interface.flash_attn_func(q, k, v)
    assert torch.equal(flash_attn_interface.flash_attn_func(q, k, v, num_splits=num_splits), whole)
    for wrong in (1.5, "2", True):
        with pytest.raises(ArgumentError, match=r"^flash_attn_func: num_splits is .* but must be an integer"):
            flash_attn_interface.flash_attn_func(q, k, v, num_splits=wrong)


@pytest.mark.parametrize("tables", [None, torch.float32, torch.bfloat16, torch.float64, F8], ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("pads", [None, (2, 0, 0)])
@pytest.mark.parametrize("form", ["own", "batch_idx", "pages", "pages_batch_idx"])
def test_cache(form: str, pads: tuple[int, ...] | None, is_packed: bool, tables: torch.dtype | None) -> None:
    """Every place of the keys, with left padding and without, packed queries and a batch; rotary_seqlens come along."""
    torch.manual_seed(3)
    before, size = (5, 0, 9), 4 if form.startswith("pages") else 16
    index = ints(3, 0, 2)
    given: dict[str, Any] = {"cache_batch_idx": index} if form.endswith("batch_idx") else {}
    if form.startswith("pages"):
        given["page_table"] = torch.randperm(20)[:16].view(4, 4).to(torch.int32)
        if form == "pages":
            given["page_table"] = given["page_table"][:3]
    table = given.get("page_table", torch.arange(4, dtype=torch.int32)[: 4 if given else 3, None])
    mine = [table[int(index[b]) if given.get("cache_batch_idx") is not None else b].long() for b in range(3)]
    k_cache, v_cache = (torch.randn(20 if size == 4 else table.shape[0], size, 2, 16) for _ in range(2))
    angles = torch.rand(40, 4) * 6
    cos, sin = (None, None) if tables is None else (angles.cos().to(tables), angles.sin().to(tables))
    lengths = LENGTHS_Q if is_packed else (4, 4, 4)
    q, k, v = torch.randn(sum(lengths), 4, 16), torch.randn(3, 2, 2, 16), torch.randn(3, 2, 2, 16)
    old = [[cache[mine[b]].flatten(0, 1)[: before[b]] for b in range(3)] for cache in (k_cache, v_cache)]
    if is_packed:
        given |= {"cu_seqlens_q": beginnings(lengths), "max_seqlen_q": 7}
    if pads:
        given["cache_leftpad"] = ints(*pads)
    out, lse, *_ = flash_attn_interface.flash_attn_with_kvcache(
        q if is_packed else q.view(3, 4, 4, 16), k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin,
        cache_seqlens=ints(*before), rotary_seqlens=ints(*before), causal=True, window_size=torch.tensor([6, 3]),
        rotary_interleaved=False, return_softmax_lse=True, **given,
    )  # fmt: skip

    def turned(x: torch.Tensor, first: int) -> torch.Tensor:
        if cos is None or sin is None:
            return x
        c, s = (t[first : first + len(x)].to(torch.float32).to(x.dtype)[:, None] for t in (cos, sin))
        low, high, rest = x[..., :4], x[..., 4:8], x[..., 8:]
        return torch.cat((low * c - high * s, high * c + low * s, rest), -1)

    first = 0
    for b, rows in enumerate(lengths):
        queries, pad = q[first : first + rows], pads[b] if pads else 0
        keys, values = torch.cat((old[0][b], turned(k[b], before[b]))), torch.cat((old[1][b], v[b]))
        assert torch.equal(v_cache[mine[b]].flatten(0, 1)[: before[b] + 2], values)
        assert torch.allclose(k_cache[mine[b]].flatten(0, 1)[: before[b] + 2], keys, atol=1e-6)
        got = (out[first : first + rows], lse[:, first : first + rows]) if is_packed else (out[b], lse[b])
        scores = {"causal": True, "window_size": (6, 3)}
        check_one(*got, turned(queries, before[b]), keys[pad:], values[pad:], -math.inf, **scores)
        first += rows


@pytest.mark.parametrize("chunk", [None, 3, 8])
def test_chunks_count_from_the_first_key_after_the_padding(chunk: int | None) -> None:
    """By the definition: query i is at i + keys - rows, and sees the keys of its own chunk."""
    mask = _beyond_padding(ints(2, 0), ints(9, 4), 5, 12, chunk)
    for b, (pad, length) in enumerate(((2, 9), (0, 4))):
        for i in range(5):
            at = i + length - pad - 5
            for j in range(12):
                sees = j >= pad and (chunk is None or (j - pad) // chunk == at // chunk)
                assert bool(mask[b, 0, min(i, mask.shape[2] - 1), j]) is sees


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=["2", "3"])
def test_numbers_and_flags_of_numpy(module: Any) -> None:
    plain: dict[str, Any] = {"softcap": 3.0, "softmax_scale": 0.1, "causal": True}
    given: dict[str, Any] = {"softcap": np.float32(3), "softmax_scale": torch.tensor(0.1), "causal": np.True_}
    if module is flash_attn_interface:
        plain |= {"attention_chunk": 4, "num_splits": 1}
        given |= {"attention_chunk": np.int64(4), "num_splits": np.int64(1)}
    assert torch.equal(module.flash_attn_func(*dense(), **given), module.flash_attn_func(*dense(), **plain))
    with pytest.raises(ArgumentError, match=r"softcap\.requires_grad is True, but softcap has no gradient"):
        module.flash_attn_func(*dense(), softcap=torch.nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize("rows", [0, 1])
def test_keys_beyond_the_pages(rows: int) -> None:
    """A RuntimeError that names block_table, as flash_attn's; a cache that is just full is none."""
    pages, table = torch.randn(4, 8, 1, 16), ints(0)[None]
    q, new = torch.randn(1, 1, 1, 16), torch.randn(1, rows, 1, 16) if rows else None
    with pytest.raises(
        RuntimeError, match=r"cache_seqlens\[0\] is 9, .*(1 new rows of 8|the rows there are) in block_table's 1 pages"
    ):
        flash_attn.flash_attn_with_kvcache(q, pages, pages.clone(), new, new, cache_seqlens=9, block_table=table)
    flash_attn.flash_attn_with_kvcache(q, pages, pages.clone(), new, new, cache_seqlens=8 - rows, block_table=table)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_forward_and_backward_apart(is_packed: bool, dropout_p: float) -> None:
    tensors = packed() if is_packed else dense()
    given: tuple[Any, ...] = (dropout_p, None, True, -1, -1, 0.0, None)
    sizes: tuple[Any, ...] = (CU_Q, CU_K, 6, 9) if is_packed else ()
    forward = inner._flash_attn_varlen_forward if is_packed else inner._flash_attn_forward
    backward = inner._flash_attn_varlen_backward if is_packed else inner._flash_attn_backward
    before = torch.get_rng_state()
    if is_packed:
        out, lse, signed, state = forward(*tensors, *sizes, *given[:5], return_softmax=True)
    else:
        out, lse, signed, state = forward(*tensors, *given, True)
    assert torch.equal(before, torch.get_rng_state()) is (dropout_p == 0.0) is not bool(state)
    assert signed.numel() == (0 if not dropout_p else 3 * 4 * 6 * 9 if is_packed else 2 * 4 * 5 * 9)
    dout = torch.randn_like(out, requires_grad=True)
    grads = [torch.full_like(tensor, math.nan) for tensor in tensors]
    rows = backward(dout, *tensors, out, lse, *grads, *sizes, *given, False, state)
    assert rows.shape == lse.shape
    assert not rows.requires_grad
    for wrong in [None, state.int()] if dropout_p else []:
        with pytest.raises(RuntimeError, match=rf"^{backward.__name__}: rng_state.* must be "):
            backward(dout, *tensors, out, lse, *grads, *sizes, *given, False, wrong)
    assert torch.allclose(rows.transpose(-1, -2), (out * dout).sum(-1), atol=1e-5)
    results: list[list[Any]] = []
    for exact in (True, False):
        theirs = [t.double().requires_grad_() if exact else t.clone().requires_grad_() for t in tensors]
        q, k, v = theirs
        for b in range(3 if is_packed else 2):
            mine = slice(*CU_Q[b : b + 2].tolist()) if is_packed else b
            its = slice(*CU_K[b : b + 2].tolist()) if is_packed else b
            kept = ~torch.signbit(signed[b])[:, : len(q[mine]), : len(k[its])] if dropout_p else None
            scores = {"causal": True, "kept": kept, "dropout_p": dropout_p, "exact": exact}
            right = one(q[mine], k[its], v[its], **scores)[0]
            assert torch.allclose(right.detach().float(), out[mine], atol=1e-5)
            (right * dout[mine]).sum().backward()
        results.append([t.grad for t in theirs])
    for ours, right, same in zip(grads, *results, strict=True):
        within(ours, right, same)


@pytest.mark.interpreter
@pytest.mark.parametrize("backend", ["auto", "reference", "interpreter"])
@pytest.mark.parametrize("width", [16, 264])
@pytest.mark.parametrize("is_packed", [False, True])
def test_backward_by_parts_of_the_keys(is_packed: bool, width: int, backend: str) -> None:
    """Ring attention: gradients of some of the keys, by out and LSE of all of them, add up to the whole's."""
    torch.manual_seed(6)
    q, k, v, dout = (torch.randn(2, 8, heads, width) for heads in (4, 2, 2, 4))
    grads, scores = [torch.zeros_like(t) for t in (q, k, v)], (0.0, None, False, -1, -1, 0.0, None)
    with portattn.settings(backend=backend):
        out, lse, *_ = inner._flash_attn_forward(q, k, v, *scores, False)
        for part in (slice(0, 3), slice(3, 8)):
            given = [dout, q, k[:, part], v[:, part], out, lse]
            made = [torch.full_like(t, math.nan) for t in given[1:4]]
            if is_packed:
                given = [*(t.flatten(0, 1) for t in given[:5]), lse.transpose(0, 1).flatten(1)]
                made, keys = [t.flatten(0, 1) for t in made], part.stop - part.start
                cu = beginnings((8, 8)), beginnings((keys, keys))
                inner._flash_attn_varlen_backward(*given, *made, *cu, 8, keys, *scores, False)
                made = [t.unflatten(0, (2, -1)) for t in made]
            else:
                inner._flash_attn_backward(*given, *made, *scores, False)
            grads[0] += made[0]
            grads[1][:, part], grads[2][:, part] = made[1:]

    def loss(*tensors: torch.Tensor, exact: bool) -> Any:
        return sum((one(*(t[b] for t in tensors), exact=exact)[0] * dout[b]).sum() for b in range(2))

    within_gradients(grads, (q, k, v), loss)


def test_forward_over_pages_and_used_rows() -> None:
    q, k, v = packed()
    used = ints(3, 9, 0)
    lengths = {"seqused_k": used, "causal": False, "dropout_p": 0.0, "softmax_scale": None}
    sizes = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 6, "max_seqlen_k": 9}
    out, lse, *_ = inner._flash_attn_varlen_forward(q, k, v, **sizes, **lengths, window_size_right=0)
    pages_k, pages_v = (torch.randn(3, 9, 2, 16) for _ in range(2))
    for b, length in enumerate(LENGTHS_K):
        its = slice(*CU_K[b : b + 2].tolist())
        pages_k[b, :length], pages_v[b, :length] = k[its], v[its]
    paged = {**sizes, **lengths, "window_size_right": 0, "block_table": ints(0, 1, 2)[:, None]}
    by_pages, lse_by_pages, *_ = inner._flash_attn_varlen_forward(q, pages_k, pages_v, **paged)
    for b in range(3):
        mine, first = slice(*CU_Q[b : b + 2].tolist()), int(CU_K[b])
        its = slice(first, first + int(used[b]))
        for found, found_lse in ((out, lse), (by_pages, lse_by_pages)):
            check_one(found[mine], found_lse[:, mine], q[mine], k[its], v[its], math.inf, window_size=(-1, 0))
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        inner._flash_attn_varlen_forward(q, pages_k, pages_v, **paged, num_splits=2)
    for given, name in (({"leftpad_k": used}, "leftpad_k"), ({**paged, "dropout_p": 0.1}, "dropout_p")):
        with pytest.raises(ArgumentError, match=rf"^_flash_attn_varlen_forward: {name} is "):
            inner._flash_attn_varlen_forward(q, pages_k, pages_v, **{**sizes, **lengths, **given})


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_memory_for_other_results(name: str, is_packed: bool) -> None:
    """Shape, dtype and device are the result's, whichever function writes; nothing is written otherwise."""
    gpu, (q, k, v) = inner.flash_attn_gpu, packed() if is_packed else dense()
    tail, sizes = (0.25, True, -1, -1, 0.0), (CU_Q, CU_K, None, 6, 9, 0.0, 0.25, False, True, -1, -1, 0.0, False, None)
    right = {"out": q, "dq": q, "dk": k, "dv": v}
    for wrong in (torch.zeros(3, *right[name].shape[1:]), right[name].int(), right[name].to("meta"), [1.0]):
        into = {other: torch.zeros_like(like) for other, like in right.items()} | {name: wrong}
        function, given = (gpu.varlen_fwd if is_packed else gpu.fwd), [q, k, v, into["out"]]
        if name == "out" and is_packed:
            given += [*sizes[:2], None, None, None, None, *sizes[3:]]
        elif name == "out":
            given += [None, 0.0, *tail, False, None]
        else:
            function = gpu.varlen_bwd if is_packed else gpu.bwd
            lse = torch.zeros(4, 9) if is_packed else torch.zeros(2, 4, 5)
            given = [q, q, k, v, q, lse, into["dq"], into["dk"], into["dv"]]
            given += [*sizes, None] if is_packed else [None, 0.0, *tail, False, None, None]
        with pytest.raises(RuntimeError,
                match=rf"^{function.__name__}: {name} is .*, but must (have the shape|be a to)"):  # fmt: skip
            function(*given)
        written = [t for t in into.values() if isinstance(t, torch.Tensor) and t is not wrong]
        assert not any(t.any() for t in written)


def test_the_extension_s_argument_orders() -> None:
    """Its four functions give what those with names give, and have a slot for a generator that must be empty."""
    gpu, (q, k, v) = inner.flash_attn_gpu, dense()
    tail = (0.25, True, -1, -1, 0.0)
    target = torch.zeros(2, 5, 4, 16)
    out, lse, _, state = gpu.fwd(q, k, v, target, None, 0.0, *tail, False, None)
    assert out is target
    assert torch.equal(out, inner._flash_attn_forward(q, k, v, 0.0, *tail, None, False)[0])
    *grads, rows = gpu.bwd(out, q, k, v, out, lse, None, None, None, None, 0.0, *tail, False, None, state)
    others = [torch.empty_like(t) for t in (q, k, v)]
    assert torch.equal(rows, inner._flash_attn_backward(out, q, k, v, out, lse, *others, 0.0, *tail, None, False))
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    p, pk, pv = packed()
    middle = (None, CU_Q, CU_K, None, None, None, None, 6, 9, 0.0, 0.25, False, True, -1, -1, 0.0)
    packed_out, packed_lse, _, state = gpu.varlen_fwd(p, pk, pv, *middle, False, None, 0)
    assert torch.equal(packed_out, inner._flash_attn_varlen_forward(p, pk, pv, CU_Q, CU_K, 6, 9, 0.0, 0.25, True)[0])
    end = (CU_Q, CU_K, None, 6, 9, 0.0, 0.25, False, True, -1, -1, 0.0, True)
    whole = (packed_out, p, pk, pv, packed_out, packed_lse, None, None, None)
    assert gpu.varlen_bwd(*whole, *end, None, state)[0].shape == p.shape
    for function, given in (
        (gpu.fwd, (q, k, v, None, None, 0.0, *tail, False, state)), (gpu.varlen_bwd, (*whole, *end, state, None)),
        (gpu.bwd, (out, q, k, v, out, lse, None, None, None, None, 0.0, *tail, False, state, None)),
        (gpu.varlen_fwd, (p, pk, pv, *middle, False, state, 0)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="`generator` argument is no longer supported"):
            function(*given)


@pytest.mark.parametrize("width", [16, 80])
def test_probabilities_by_blocks_of_columns(width: int) -> None:
    torch.manual_seed(4)
    q, k = torch.randn(1, 7, 2, width), torch.randn(1, 150, 2, width)
    _, _, signed = flash_attn.flash_attn_func(q, k, k, 0.2, causal=True, return_attn_probs=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).double() / math.sqrt(width)
    scores.masked_fill_(torch.ones(7, 150).tril(143).logical_not(), -math.inf)
    block = inner._get_block_size_n(q.device, width, True, True)
    assert (normalised(signed.double(), scores, block) - scores.softmax(-1)).abs().max() < 2e-6
    assert signed.abs().max() <= 1.0


def test_columns_of_a_block() -> None:
    """Facts of flash_attn 2.8, for a chip that is no 8.6 or 8.9."""
    widths, cpu = (32, 64, 96, 128, 192, 256), torch.device("cpu")
    assert [inner._get_block_size_n(cpu, width, False, False) for width in widths] == [128, 128, 64, 64, 64, 64]
    assert [inner._get_block_size_n(cpu, width, True, True) for width in widths] == [128, 64, 64, 32, 64, 64]
