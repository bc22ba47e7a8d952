"""portattn.integrations.flash_attn_interface: FlashAttention-3's functions, against the definition in float64."""

import math
from typing import Any

import pytest
import torch
from flash_attn_oracle import beginnings, check_one, ints, one, within

from portattn.errors import ArgumentError
from portattn.integrations.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

E4M3 = torch.float8_e4m3fn
SCORES: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": True},
    "all": {"causal": True, "window_size": (5, 0), "softcap": 2.0, "softmax_scale": 0.4},
    "chunk": {"attention_chunk": 3}, "causal chunk": {"causal": True, "attention_chunk": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_dense(name: str) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 12, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 24)
    out, lse = flash_attn_func(q, k, v, **SCORES[name], pack_gqa=True, num_splits=0, return_attn_probs=True)
    assert torch.equal(flash_attn_func(q, k, v, **SCORES[name]), out)
    for b in range(2):  # causal, the first rows have nothing to attend: -inf here
        check_one(out[b], lse[b], q[b], k[b], v[b], -math.inf, **SCORES[name])


def test_packed_heads() -> None:
    torch.manual_seed(2)
    qkv = torch.randn(2, 6, 8, 16)
    q, k, v = qkv.split((4, 2, 2), dim=2)
    out, lse = flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4, return_attn_probs=True)
    for b in range(2):
        check_one(out[b], lse[b], q[b], k[b], v[b], -math.inf, causal=True)
    stacked = torch.randn(2, 6, 3, 4, 16)
    out = flash_attn_qkvpacked_func(stacked, window_size=(2, 1))
    for b in range(2):
        check_one(out[b], None, *(part[b] for part in stacked.unbind(2)), -math.inf, window_size=(2, 1))
    with pytest.raises(ArgumentError,
            match=r"^flash_attn_qkvpacked_func: num_heads_q is 5, but must be an integer that"):  # fmt: skip
        flash_attn_qkvpacked_func(qkv, num_heads_q=5)


@pytest.mark.parametrize("packed", [False, True])
def test_qv(packed: bool) -> None:
    """Scores are (q·k + qv·v)·scale, with the default of both widths; gradients flow to all four."""
    torch.manual_seed(3)
    tensors = [torch.randn(1, *shape) for shape in ((5, 4, 16), (9, 2, 16), (9, 2, 24), (5, 4, 24))]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    q, k, v, qv = leaves
    if packed:
        cu_q, cu_k = ints(0, 5), ints(0, 9)
        out = flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, 5, 9, causal=True, qv=qv[0])
    else:
        out = flash_attn_func(q, k, v, causal=True, qv=qv)[0]
    out.square().sum().backward()
    found, results = [], []
    for exact in (True, False):
        q, k, v, qv = (t.double().requires_grad_() if exact else t.clone().requires_grad_() for t in tensors)
        both = torch.cat((q, qv), -1)[0], torch.cat((k, v), -1)[0]
        right = one(*both, v[0], causal=True, softmax_scale=40**-0.5, exact=exact)[0]
        right.square().sum().backward()
        found.append([t.grad for t in (q, k, v, qv)])
        results.append(right.detach())
    within(out, *results)
    for ours, expected, same in zip(leaves, *found, strict=True):
        within(ours.grad, expected, same)


@pytest.mark.parametrize("name", SCORES)
def test_used_rows(name: str) -> None:
    """seqused_*: what lies behind is NaN in queries, keys and values, and gets no gradient; results there are 0."""
    torch.manual_seed(4)
    cu_q, cu_k, used_q, used_k = beginnings((6, 0, 9)), beginnings((8, 5, 11)), ints(4, 0, 9), ints(8, 0, 3)
    q, k, v = torch.randn(17, 4, 16), torch.randn(26, 2, 16), torch.randn(26, 2, 24)
    places_q = [range(int(cu_q[b]), int(cu_q[b] + used_q[b])) for b in range(3)]
    places_k = [range(int(cu_k[b]), int(cu_k[b] + used_k[b])) for b in range(3)]
    for tensor, places in ((q, places_q), (k, places_k), (v, places_k)):
        counted = {row for rows in places for row in rows}
        for row in set(range(len(tensor))) - counted:
            tensor[row] = math.nan
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out, lse = flash_attn_varlen_func(*leaves, cu_q, cu_k, 9, 11, used_q, used_k, **SCORES[name],
        return_attn_probs=True)  # fmt: skip
    seen = torch.zeros(17, dtype=torch.bool)
    for rows, keys in zip(places_q, places_k, strict=True):
        mine, its = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
        seen[mine] = True
        check_one(out[mine].detach(), lse[:, mine].detach(), q[mine], k[its], v[its], -math.inf, **SCORES[name])
    assert not out[~seen].any()
    assert (lse[:, ~seen] == -math.inf).all()
    out.square().sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
    only_keys = flash_attn_varlen_func(q[:4], k, v, ints(0, 4), ints(0, 13), 4, 13, seqused_k=ints(8), **SCORES[name])
    check_one(only_keys, None, q[:4], k[:8], v[:8], -math.inf, **SCORES[name])
    with pytest.raises(ArgumentError,
            match=r"^flash_attn_varlen_func: seqused_k\[1\] is 6, but must be in 0\.\.5, the seq"):  # fmt: skip
        flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 11, None, ints(8, 6, 3))


def test_float8() -> None:
    """Products are exact: the definition of the numbers times their scales, in bfloat16."""
    torch.manual_seed(5)
    shapes = ((2, 9, 4, 32), (2, 13, 2, 32), (2, 13, 2, 32))
    q, k, v = (torch.randn(shape).mul(2).to(E4M3) for shape in shapes)
    descales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    names = ("q_descale", "k_descale", "v_descale")
    out, lse = flash_attn_func(q, k, v, causal=True, **dict(zip(names, descales, strict=True)), return_attn_probs=True)
    assert out.dtype is torch.bfloat16
    wide = [t.double() * s.double().repeat_interleave(t.shape[2] // 2, 1)[:, None, :, None]
        for t, s in zip((q, k, v), descales, strict=True)]  # fmt: skip
    for b in range(2):
        expected, expected_lse, _ = one(*(t[b] for t in wide), causal=True)
        same, _, _ = one(*(t[b].bfloat16() for t in wide), causal=True, exact=False)
        within(out[b], expected, same)
        assert (lse[b] - expected_lse).abs().max() < 1e-4


@pytest.mark.parametrize("form", ["own", "pages"])
def test_float8_cache(form: str) -> None:
    """New rows in float8 are stored bit for bit; q_descale counts with the keys' scale."""
    torch.manual_seed(6)
    k_cache, v_cache = (torch.randn(3, 16, 2, 32).to(E4M3) for _ in range(2))
    q, k, v = (torch.randn(3, 2, heads, 32).to(E4M3) for heads in (4, 2, 2))
    table = ints(2, 0, 1)[:, None]
    order = [2, 0, 1] if form == "pages" else [0, 1, 2]
    descales = [torch.rand(3, 2) + 0.5 for _ in range(3)]
    wide_q = q.double() * descales[0].double().repeat_interleave(2, 1)[:, None, :, None]
    out, lse, *rest = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=ints(3, 9, 0),
        page_table=table if form == "pages" else None, q_descale=descales[0], k_descale=descales[1],
        v_descale=descales[2], causal=True, return_softmax_lse=True)  # fmt: skip
    assert ([tuple(t.shape) for t in rest], out.dtype) == ([(0,), (0,)], torch.bfloat16)
    for b, before in enumerate((3, 9, 0)):
        for cache, new in ((k_cache, k), (v_cache, v)):
            assert torch.equal(cache[order[b], before : before + 2].view(torch.int8), new[b].view(torch.int8))
        keys, values = (cache[order[b], : before + 2].double() * scale[b].double()[:, None]
            for cache, scale in ((k_cache, descales[1]), (v_cache, descales[2])))  # fmt: skip
        expected, expected_lse, _ = one(wide_q[b], keys, values, causal=True)
        narrow = (t.bfloat16() for t in (wide_q[b], keys, values))
        within(out[b], expected, one(*narrow, causal=True, exact=False)[0])
        assert (lse[b] - expected_lse).abs().max() < 1e-4


@pytest.mark.parametrize("form", ["own", "pages"])
def test_sixteen_bit_rows_into_a_float8_cache(form: str) -> None:
    """They are divided by their scale, which in pages every sequence shares; other scales are refused before."""
    torch.manual_seed(9)
    k_cache, v_cache = torch.zeros(2, 16, 2, 32).to(E4M3), torch.zeros(2, 16, 2, 32).to(E4M3)
    q, k, v = (torch.randn(2, 3, heads, 32).bfloat16() for heads in (4, 2, 2))
    k_scale, v_scale = torch.tensor([0.5, 2.0]), torch.tensor([4.0, 0.25])
    given: dict[str, Any] = {"k": k, "v": v, "cache_seqlens": 0, "causal": True}
    if form == "pages":
        given["page_table"] = ints(0, 1)[:, None]
        each = {"k_descale": k_scale.expand(2, 2).contiguous(), "v_descale": v_scale.expand(2, 2).contiguous()}
        with pytest.raises(ArgumentError, match=r"^flash_attn_with_kvcache: k_descale\.shape is \(2, 2\)"):
            flash_attn_with_kvcache(q, k_cache, v_cache, **given, **each)
        assert not k_cache.float().any()
    out = flash_attn_with_kvcache(q, k_cache, v_cache, **given, k_descale=k_scale, v_descale=v_scale)
    for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        right = (new.float() / scale[:, None]).to(E4M3)
        assert torch.equal(cache[:, :3].view(torch.int8), right.view(torch.int8))
    for b in range(2):
        keys, values = k_cache[b, :3].double() * k_scale[:, None], v_cache[b, :3].double() * v_scale[:, None]
        same = one(q[b], keys.bfloat16(), values.bfloat16(), causal=True, exact=False)[0]
        within(out[b], one(q[b], keys, values, causal=True)[0], same)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["own", "leftpad", "batch_idx", "pages"])
def test_chunks_of_a_cache(form: str, causal: bool) -> None:
    """The cache outside the chunks of the queries is NaN: two of six queries lie before the boundary at 12."""
    torch.manual_seed(11)
    length, chunk, pad = 16, 6, 5 if form == "leftpad" else 0
    k_cache, v_cache = torch.full((3, 32, 2, 16), math.nan), torch.full((3, 32, 2, 24), math.nan)
    k_cache[:, pad + 6 : pad + length].normal_()
    v_cache[:, pad + 6 : pad + length].normal_()
    given: dict[str, Any] = {
        "own": {}, "leftpad": {"cache_leftpad": ints(pad, pad, pad)}, "batch_idx": {"cache_batch_idx": ints(2, 0, 1)},
        "pages": {"page_table": ints(2, 0, 1)[:, None]},
    }[form]  # fmt: skip
    q = torch.randn(3, 6, 4, 16)
    out, lse, *_ = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=pad + length, causal=causal,
        attention_chunk=chunk, return_softmax_lse=True, **given)  # fmt: skip
    for b, place in enumerate((2, 0, 1) if form in ("batch_idx", "pages") else range(3)):
        keys, values = k_cache[place, pad : pad + length].clone(), v_cache[place, pad : pad + length].clone()
        keys[:6] = values[:6] = 0.0
        check_one(out[b], lse[b], q[b], keys, values, -math.inf, causal=causal, attention_chunk=chunk)


@pytest.mark.parametrize("form", ["own", "batch_idx", "pages"])
def test_packed_queries_and_new_keys(form: str) -> None:
    """cu_seqlens_q and cu_seqlens_k_new of different lengths, rotation from rotary_seqlens, a poisoned cache."""
    torch.manual_seed(7)
    before, rows, new, at = (5, 0, 20), (3, 1, 0), (2, 4, 1), (9, 1, 30)
    cu_q, cu_new = beginnings(rows), beginnings(new)
    given: dict[str, Any] = {"own": {}, "batch_idx": {"cache_batch_idx": ints(2, 0, 3)},
        "pages": {"page_table": ints(5, 1, 0, 3, 4, 2).view(3, 2)}}[form]  # fmt: skip
    sizes = {"own": (3, 32), "batch_idx": (4, 32), "pages": (6, 16)}[form]
    k_cache, v_cache = torch.full((*sizes, 2, 16), math.nan), torch.full((*sizes, 2, 24), math.nan)

    def place(b: int, row: int) -> tuple[int, int]:
        if form == "pages":
            return int(given["page_table"][b, row // 16]), row % 16
        return int(given["cache_batch_idx"][b]) if form == "batch_idx" else b, row

    old = [(torch.randn(length, 2, 16), torch.randn(length, 2, 24)) for length in before]
    for b, (keys, values) in enumerate(old):
        for row in range(before[b]):
            k_cache[place(b, row)], v_cache[place(b, row)] = keys[row], values[row]
    q, k, v = torch.randn(4, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 24)
    angles = torch.randn(40, 8)
    cos, sin = angles.cos(), angles.sin()
    out, lse, *_ = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin,
        cache_seqlens=ints(*before), cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_new, max_seqlen_q=3,
        rotary_seqlens=ints(*at), causal=True, return_softmax_lse=True, **given)  # fmt: skip

    def turned(x: torch.Tensor, b: int) -> torch.Tensor:
        c, s = (t[at[b] : at[b] + len(x)].to(x)[:, None] for t in (cos, sin))
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)

    for b in range(3):
        mine, its = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_new[b]), int(cu_new[b + 1]))
        keys, values = torch.cat((old[b][0], turned(k[its], b))), torch.cat((old[b][1], v[its]))
        for row in range(len(keys)):
            assert torch.equal(k_cache[place(b, row)], keys[row])
            assert torch.equal(v_cache[place(b, row)], values[row])
        expected, expected_lse, _ = one(turned(q[mine].double(), b), keys, values, causal=True)
        same, same_lse, _ = one(turned(q[mine], b), keys, values, causal=True, exact=False)
        within(out[mine], expected, same)
        within(lse[:, mine], expected_lse, same_lse, 8.0)
    assert int(k_cache.isfinite().all(-1).sum()) == 2 * (sum(before) + sum(new))


def test_combine() -> None:
    torch.manual_seed(8)
    q, k, v = torch.randn(1, 5, 4, 16), torch.randn(1, 12, 4, 16), torch.randn(1, 12, 4, 16)
    parts = [flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(5), slice(5, 12), slice(0))]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    out, lse = flash_attn_combine(outs, lses)
    check_one(out[0], lse[0].t(), q[0], k[0], v[0], -math.inf)
    target = torch.empty(1, 5, 4, 16, dtype=torch.float16)
    found, _ = flash_attn_combine(outs, lses, target, torch.float16)
    assert found is target
    assert torch.equal(target, out.half())


Q, CACHE = torch.zeros(2, 1, 4, 16), torch.zeros(2, 8, 2, 16)


NESTED = torch.nested.nested_tensor([torch.zeros(1, 4, 16), torch.zeros(2, 4, 16)])
COS = torch.zeros(8, 4)
DENSE = {"q": Q, "k": CACHE, "v": CACHE}
CACHED = {"q": Q, "k_cache": CACHE, "v_cache": CACHE}
PARTS = {"out_partial": torch.zeros(2, 1, 3, 4, 16), "lse_partial": torch.zeros(2, 1, 3, 4)}
PACKED = {"q": Q[0], "k": Q[0], "v": Q[0], "cu_seqlens_q": ints(0, 1), "cu_seqlens_k": ints(0, 1), "max_seqlen_q": 1,
          "max_seqlen_k": 1}  # fmt: skip
# Function, its arguments, those that are spoiled, and the error.
REFUSED: list[tuple[Any, dict[str, Any], list[tuple[dict[str, Any], str]]]] = [
    (flash_attn_with_kvcache, CACHED, [
        ({"attention_chunk": -1}, r"attention_chunk is -1, but must be an integer ≥ 0"),
        ({"sm_margin": 8}, r"sm_margin is 8, but must be 0"),
        ({"pack_gqa": 3}, r"pack_gqa is 3, but must be True or False"),
        ({"qv": Q}, r"qv is \(2, 1, 4, 16\), but is not taken: portattn\.mla_attention"),
        ({"scheduler_metadata": Q}, r"scheduler_metadata is \(2, 1, 4, 16\), but must be None"),
        ({"q_descale": torch.ones(2, 2)}, r"q_descale is \(2, 2\), but goes with float8 queries"),
        ({"k_descale": torch.ones(2, 2)}, r"k_descale"),
        ({"rotary_seqlens": ints(1, 2).long()}, r"rotary_seqlens\.dtype is torch\.int64, but must be torch\.int32"),
        ({"cu_seqlens_k_new": ints(0, 1, 2)}, r"cu_seqlens_k_new is \(3,\), but goes with k and v"),
        ({"q": Q[0], "cu_seqlens_q": ints(0, 1, 1)}, r"max_seqlen_q is None, but must be given with cu_seqlens_q"),
        ({"q": Q[0], "cu_seqlens_q": ints(0, 1, 2), "max_seqlen_q": 1, "cache_leftpad": ints(0, 1)},
         r"cu_seqlens_q\[2\] is 2, but must be at most the packed rows, 1"),
        ({"q": Q[0], "cu_seqlens_q": ints(0, 1, 1), "max_seqlen_q": "1", "cache_leftpad": ints(0, 1)},
         r"max_seqlen_q is '1', but must be an integer"),
        ({"page_table": ints(0, 1, 2, 3).view(2, 2)}, r"page_table\[1, 0\] is 2, but must be in 0\.\.1"),
    ]),
    (flash_attn_func, DENSE, [
        ({"attention_chunk": 1.0}, r"attention_chunk is 1\.0, but must be an integer ≥ 0"),
        ({"sm_margin": 1}, "sm_margin is 1, but must be 0"),
        ({"num_splits": 2.0}, "num_splits is 2.0, but must be an integer"),
        ({"qv": Q[..., :8]}, r"qv is \(\(2, 1, 4, 8\), torch\.float32\), but must be q's with v's head_dim"),
        ({"k_descale": torch.ones(2, 2)}, "k_descale"),
        ({"k": [1], "deterministic": True}, r"k is 'list', but must be a torch"),
        ({"v": torch.zeros(()), "qv": Q}, r"v\.shape is \(\), but must have q's axes"),
    ]),
    (flash_attn_qkvpacked_func, {}, [({"qkv": NESTED}, r"qkv is 'a nested tensor'")]),
    (flash_attn_varlen_func, PACKED, [({"qv": [1], "deterministic": True}, r"qv is 'list', but must be a torch")]),
    (flash_attn_combine, PARTS, [
        ({"out_dtype": "x"}, "out_dtype is 'x', but must be None or a floating-point"),
        ({"out_dtype": torch.int8}, r"out_dtype is torch\.int8, but must be None or a floating-point"),
        ({"out": [1]}, "out is 'list', but must be None or a torch"),
        ({"out": torch.zeros(1, 3, 4, 16).half()}, "out is"),
        ({"out_partial": PARTS["out_partial"].half()}, r"out_partial is torch\.float16, but must be a torch\.Te"),
        ({"lse_partial": PARTS["lse_partial"][..., 0]}, r"lse_partial\.shape is \(2, 1, 3\), but must be out_par"),
        ({"out_partial": NESTED}, "out_partial is 'a nested tensor'"),
        ({"lse_partial": COS.to_sparse()}, r"lse_partial is 'a torch\.sparse_coo tensor'"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "given", "text"), [(call, base | given, text) for call, base, rows in REFUSED
    for given, text in rows])  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(call: Any, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{call.__name__}: {text}"):
        call(**given)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        call(**given, dropout_p=0.1)


@pytest.mark.parametrize(("name", "dtypes"), [
    ("k", (torch.float16, torch.float16)), ("v", (E4M3, torch.float16)), ("k", (torch.float8_e5m2,) * 2)
])  # fmt: skip
def test_new_rows_beside_float8_queries_have_the_cache_s_dtype(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    k_cache, v_cache = CACHE.to(E4M3), CACHE.to(E4M3)
    k, v = (torch.ones(2, 1, 2, 16).to(dtype) for dtype in dtypes)
    scales = {"k_descale": torch.full((2, 2), 0.25), "v_descale": torch.full((2, 2), 0.25)}
    with pytest.raises(
        ArgumentError, match=rf"^flash_attn_with_kvcache: {name}\.dtype is .* the cache's, torch\.float8_e4m3fn, beside"
    ):
        flash_attn_with_kvcache(Q.to(E4M3), k_cache, v_cache, k, v, cache_seqlens=3, **scales)
    assert not k_cache.float().any()
    assert not v_cache.float().any()


@pytest.mark.parametrize(("beginnings", "text"), [
    (ints(0, 3), r"\.shape is \(2,\), but must be \(batch \+ 1,\), \(3,\)"), (ints(0, 1, 2, 3), r"\.shape is \(4,\)"),
    (ints(0, 1, 3).long(), r"\.dtype is torch\.int64"), (ints(0, 1, 3).to("meta"), r"\.device is 'meta'"),
    (ints(1, 2, 3), r"\[0\] is 1, but must be 0"),
    (ints(0, 5, 3), r"\[1\] is 5, but must be at most the packed rows, 3"),
    (ints(0, 2, 1), r"\[2\] is 1, but must be at least cu_seqlens_k_new\[1\], 2"),
    (ints(0, 1, 4), r"\[2\] is 4, but must be at most the packed rows, 3"),
    ([0, 1, 3], r" is 'list', but must be a torch\.Tensor"),
])  # fmt: skip
def test_beginnings_of_new_keys_are_checked_before_a_row_is_written(beginnings: Any, text: str) -> None:
    k_cache, v_cache, new = CACHE.clone(), CACHE.clone(), torch.ones(3, 2, 16)
    with pytest.raises(ArgumentError, match=f"^flash_attn_with_kvcache: cu_seqlens_k_new{text}"):
        flash_attn_with_kvcache(Q, k_cache, v_cache, new, new, cache_seqlens=3, cu_seqlens_k_new=beginnings)
    assert not k_cache.any()
    assert not v_cache.any()


def test_rows_without_sequences() -> None:
    new, cache, none = torch.ones(3, 2, 16), CACHE[:0].clone(), ints(0)
    tables = {"rotary_cos": torch.ones(8, 4), "rotary_sin": torch.ones(8, 4)}
    out = flash_attn_with_kvcache(Q[:, 0] + 1, cache, cache, new, new, cache_seqlens=none[:0], cu_seqlens_q=none,
        max_seqlen_q=1, cu_seqlens_k_new=none, **tables)  # fmt: skip
    assert torch.equal(out, torch.zeros(2, 4, 16))


JAGGED = torch.nested.nested_tensor([torch.zeros(1, 4, 16), torch.zeros(2, 4, 16)], layout=torch.jagged)
SPARSE = ints(0, 1).to_sparse()


@pytest.mark.parametrize("bad", [NESTED, JAGGED, SPARSE, [1]], ids=["nested", "jagged", "sparse", "list"])
@pytest.mark.parametrize("name", [
    "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "page_table", "cache_batch_idx", "cache_seqlens",
    "cache_leftpad", "rotary_seqlens", "cu_seqlens_q", "cu_seqlens_k_new", "q_descale", "k_descale", "v_descale", "qv",
    "scheduler_metadata",
])  # fmt: skip
def test_what_is_no_dense_tensor_is_one_error(name: str, bad: Any) -> None:
    new = torch.ones(2, 1, 2, 16)
    base = {"q": Q, "k_cache": CACHE.clone(), "v_cache": CACHE.clone()}
    append = {"k": new, "v": new, "cache_seqlens": 3}
    for others in (append if name in ("k", "v") else {}, append, {**append, "rotary_cos": COS, "rotary_sin": COS}):
        with pytest.raises(ArgumentError, match=f"^flash_attn_with_kvcache: {name} is"):
            flash_attn_with_kvcache(**{**base, **others, name: bad})
    assert not base["k_cache"].any()


def test_scheduler_metadata_goes_round() -> None:
    lengths = ints(3, 8)
    metadata: Any = get_scheduler_metadata(2, 1, 8, 4, 2, 16, lengths)
    out = flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=lengths, scheduler_metadata=metadata)
    assert out.shape == (2, 1, 4, 16)


def test_packed_new_keys_in_one_graph() -> None:
    torch.manual_seed(10)
    q, cache, new = torch.randn(2, 1, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(3, 2, 16)
    caches = [cache.clone() for _ in range(4)]

    def call(k_cache: torch.Tensor, v_cache: torch.Tensor, cu_new: torch.Tensor) -> Any:
        return flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=3, cu_seqlens_k_new=cu_new)

    right = call(*caches[:2], ints(0, 1, 3))
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(*caches[2:], ints(0, 1, 3)), right)
    assert torch.equal(caches[0], caches[2])
