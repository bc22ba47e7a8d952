"""portattn.integrations.flash_attn.flash_attn_with_kvcache: results against the definition in float64, the cache bit
for bit. What lies beyond a sequence's rows is NaN in keys or in values, so that a read of it would show."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from flash_attn_oracle import check_one, ints, one, strided, within

import portattn
from portattn.errors import ArgumentError
from portattn.integrations import flash_attn, flash_attn_interface
from portattn.integrations.flash_attn import flash_attn_with_kvcache, hub

HEADS, KV_HEADS, WIDTH, V_WIDTH, ROOM, PAGE = 4, 2, 16, 24, 48, 16
BEFORE, PADS = (17, 0, 40), (5, 0, 33)
PLACES = ("own", "batch_idx", "pages")
POISONED = ("keys", "values")
SCORES: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": True},
    "all": {"causal": True, "window_size": (9, 0), "softcap": 2.0, "softmax_scale": 0.4},
    "window": {"window_size": (6, 1)},
    "alibi": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.06])},
}  # fmt: skip


@dataclass
class Cache:
    """A cache in one of the forms, and where each sequence's rows lie in it."""

    k: torch.Tensor
    v: torch.Tensor
    given: dict[str, Any]
    rows: list[list[tuple[int, int]]]  # of each sequence: (first axis, second axis) of each row

    def of(self, tensor: torch.Tensor, b: int, first: int, end: int) -> torch.Tensor:
        places = self.rows[b][first:end]
        return torch.stack([tensor[place] for place in places]) if places else tensor[0, :0]


def cache_of(form: str, poisoned: str, dtype: torch.dtype = torch.float32, pads: tuple[int, ...] = (0, 0, 0)) -> Cache:
    torch.manual_seed(1)
    sizes = {"own": (3, ROOM), "batch_idx": (5, ROOM), "pages": (12, PAGE)}[form]
    k, v = strided(*sizes, KV_HEADS, WIDTH, dtype=dtype), strided(*sizes, KV_HEADS, V_WIDTH, dtype=dtype)
    if form == "pages":
        table = torch.randperm(12)[:9].view(3, 3).to(torch.int32)
        given: dict[str, Any] = {"block_table": table}
        rows = [[(int(table[b, at // PAGE]), at % PAGE) for at in range(ROOM)] for b in range(3)]
    else:
        index = ints(3, 0, 4) if form == "batch_idx" else ints(0, 1, 2)
        given = {"cache_batch_idx": index} if form == "batch_idx" else {}
        rows = [[(int(index[b]), at) for at in range(ROOM)] for b in range(3)]
    bad = {"keys": k, "values": v}[poisoned]
    good = bad.clone()
    bad.fill_(math.nan)
    for b, (first, length) in enumerate(zip(pads, BEFORE, strict=True)):
        for place in rows[b][first:length]:
            bad[place] = good[place]
    return Cache(k, v, given, rows)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a, 12345.0), torch.nan_to_num(b, 12345.0))


@pytest.mark.parametrize("poisoned", POISONED)
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("form", PLACES)
def test_append_and_attend(form: str, name: str, poisoned: str) -> None:
    cache = cache_of(form, poisoned)
    q, k, v = strided(3, 3, HEADS, WIDTH), strided(3, 3, KV_HEADS, WIDTH), strided(3, 3, KV_HEADS, V_WIDTH)
    right_k, right_v = cache.k.clone(), cache.v.clone()
    for b, before in enumerate(BEFORE):
        for i in range(3):
            right_k[cache.rows[b][before + i]], right_v[cache.rows[b][before + i]] = k[b, i], v[b, i]
    lengths = ints(*BEFORE)
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, cache_seqlens=lengths, **cache.given, **SCORES[name],
        return_softmax_lse=True)  # fmt: skip
    assert lengths.tolist() == list(BEFORE)
    assert same_bits(cache.k, right_k)
    assert same_bits(cache.v, right_v)
    assert (out.shape, lse.shape) == ((3, 3, HEADS, V_WIDTH), (3, HEADS, 3))
    for b, before in enumerate(BEFORE):
        keys, values = (cache.of(tensor, b, 0, before + 3) for tensor in (cache.k, cache.v))
        check_one(out[b], lse[b], q[b], keys, values, math.inf, **SCORES[name])


@pytest.mark.parametrize("poisoned", POISONED)
@pytest.mark.parametrize("rows", [1, 4, 20])  # 20: more than decode_attention is for
@pytest.mark.parametrize("form", ["own", "batch_idx"])
def test_left_padding_without_new_rows(form: str, rows: int, poisoned: str) -> None:
    cache, q = cache_of(form, poisoned, pads=PADS), torch.randn(3, rows, HEADS, WIDTH)
    before = cache.k.clone(), cache.v.clone()
    for scores in (SCORES["causal"], SCORES["alibi"], SCORES["window"]):
        out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=ints(*BEFORE), cache_leftpad=ints(*PADS),
            **cache.given, **scores, return_softmax_lse=True)  # fmt: skip
        for b, (pad, length) in enumerate(zip(PADS, BEFORE, strict=True)):
            keys, values = (cache.of(tensor, b, pad, length) for tensor in (cache.k, cache.v))
            check_one(out[b], lse[b], q[b], keys, values, math.inf, **scores)
    assert same_bits(cache.k, before[0])
    assert same_bits(cache.v, before[1])


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: list[int], interleaved: bool) -> Any:
    """(S, H, D) rotated column by column, in the dtype of x."""
    out, half = x.clone(), cos.shape[1]
    for row, position in enumerate(positions):
        for i in range(half):
            one_, two = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            a, b, c, s = x[row, :, one_], x[row, :, two], cos[position, i].to(x), sin[position, i].to(x)
            out[row, :, one_], out[row, :, two] = a * c - b * s, b * c + a * s
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("name", ["plain", "causal", "window"])
@pytest.mark.parametrize("form", PLACES)
def test_rotation(form: str, name: str, interleaved: bool) -> None:
    """Keys by their rows in the cache; queries too, but for calls without a mask: all at cache_seqlens."""
    pads = (0, 0, 0) if form == "pages" else PADS
    cache, angles = cache_of(form, "keys", pads=pads), torch.randn(ROOM, 6) * 3
    cos, sin = angles.cos(), angles.sin()
    q, k, v = torch.randn(3, 3, HEADS, WIDTH), torch.randn(3, 3, KV_HEADS, WIDTH), torch.randn(3, 3, KV_HEADS, V_WIDTH)
    given = cache.given if form == "pages" else {**cache.given, "cache_leftpad": ints(*pads)}
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, cos, sin, cache_seqlens=ints(*BEFORE),
        rotary_interleaved=interleaved, **given, **SCORES[name], return_softmax_lse=True)  # fmt: skip
    for b, (pad, before) in enumerate(zip(pads, BEFORE, strict=True)):
        at = [before, before + 1, before + 2]
        assert torch.equal(cache.of(cache.k, b, before, before + 3), turned(k[b], cos, sin, at, interleaved))
        assert torch.equal(cache.of(cache.v, b, before, before + 3), v[b])
        keys, values = (cache.of(tensor, b, pad, before + 3) for tensor in (cache.k, cache.v))
        at = [before] * 3 if name == "plain" else at
        exact = turned(q[b].double(), cos.double(), sin.double(), at, interleaved)
        expected, expected_lse, _ = one(exact, keys, values, **SCORES[name])
        same, same_lse, _ = one(turned(q[b], cos, sin, at, interleaved), keys, values, **SCORES[name], exact=False)
        within(out[b], expected, same)
        within(lse[b], expected_lse, same_lse, 8.0)


@pytest.mark.interpreter
@pytest.mark.parametrize("form", PLACES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_by_the_kernels(form: str, dtype: torch.dtype) -> None:
    """Under the interpreter the writers and the attention are portattn's own kernels; keys split over programs."""
    cache = cache_of(form, "values", dtype)
    q, k, v = (torch.randn(3, 1, h, d).to(dtype) for h, d in ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, V_WIDTH)))
    angles = torch.randn(ROOM, 8)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    with portattn.settings(backend="interpreter"):
        out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, cos, sin, ints(*BEFORE), **cache.given,
            causal=True, num_splits=2, return_softmax_lse=True)  # fmt: skip
    for b, before in enumerate(BEFORE):
        new = turned(k[b].float(), cos.float(), sin.float(), [before], True).to(dtype)
        assert torch.equal(cache.of(cache.k, b, before, before + 1), new)
        assert torch.equal(cache.of(cache.v, b, before, before + 1), v[b])
        keys, values = (cache.of(tensor, b, 0, before + 1) for tensor in (cache.k, cache.v))
        query = turned(q[b].float(), cos.float(), sin.float(), [before], True).to(dtype)
        check_one(out[b], lse[b], query, keys, values, math.inf)


@pytest.mark.parametrize("form", ["own", "pages"])
def test_one_length_for_all_and_full_caches(form: str) -> None:
    cache = cache_of(form, "values")
    cache.v.nan_to_num_(0.5)
    q = torch.randn(3, 2, HEADS, WIDTH)
    for length in (None, 31):
        out = flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=length, causal=True, **cache.given)
        for b in range(3):
            keys, values = (cache.of(tensor, b, 0, ROOM if length is None else length) for tensor in (cache.k, cache.v))
            check_one(out[b], None, q[b], keys, values, math.inf, causal=True)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("form", PLACES)
def test_a_negative_length_takes_no_part(form: str, is_packed: bool) -> None:
    """Several new rows of a length just below 0 would lie at 0 and behind it."""
    cache = cache_of(form, "keys")
    before = cache.k.clone(), cache.v.clone()
    q, k, v = torch.randn(3, 1, HEADS, WIDTH), torch.randn(3, 3, KV_HEADS, WIDTH), torch.randn(3, 3, KV_HEADS, V_WIDTH)
    given: dict[str, Any] = {"cache_seqlens": ints(BEFORE[0], -1, -1), "return_softmax_lse": True}
    if is_packed:
        table = {"page_table" if name == "block_table" else name: value for name, value in cache.given.items()}
        given |= table | {"cu_seqlens_k_new": ints(0, 3, 6, 9)}
        new_rows = k.flatten(0, 1), v.flatten(0, 1)
        out, lse, *_ = flash_attn_interface.flash_attn_with_kvcache(q, cache.k, cache.v, *new_rows, **given)
    else:
        out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **given, **cache.given)
    for tensor, new, old in ((cache.k, k, before[0]), (cache.v, v, before[1])):
        for i in range(3):
            old[cache.rows[0][BEFORE[0] + i]] = new[0, i]
        assert same_bits(tensor, old)
    assert not out[1:].any()
    assert (lse[1:] == (-math.inf if is_packed else math.inf)).all()


@pytest.mark.parametrize("form", PLACES)
def test_rows_beyond_a_sequence_s_room_go_nowhere(form: str) -> None:
    """Where lengths are not read back, as on an accelerator: what does not fit must not reach another sequence."""
    cache = cache_of(form, "keys")
    right = cache.k.clone()
    q, k, v = torch.randn(3, 3, HEADS, WIDTH), torch.randn(3, 3, KV_HEADS, WIDTH), torch.randn(3, 3, KV_HEADS, V_WIDTH)
    with portattn.settings(validate="never"):
        flash_attn_with_kvcache(q, cache.k, cache.v, k, v, cache_seqlens=ROOM - 1, **cache.given)
    for b in range(3):
        right[cache.rows[b][ROOM - 1]] = k[b, 0]
    assert same_bits(cache.k, right)


def test_sequences_without_keys() -> None:
    out, lse = flash_attn_with_kvcache(torch.randn(2, 3, 4, 16), *torch.full((2, 2, 8, 2, 16), math.nan).unbind(),
        cache_seqlens=0, return_softmax_lse=True)  # fmt: skip
    assert not out.any()
    assert (lse == math.inf).all()


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("form", PLACES)
@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface, hub], ids=lambda module: module.__name__)
def test_what_requires_gradients_is_computed_without_a_graph(module: Any, form: str, rows: int, new: bool) -> None:
    """A serving loop outside of torch.no_grad(): queries come from weights that require gradients."""
    caches = cache_of(form, "values"), cache_of(form, "values")
    for cache in caches:
        cache.v.nan_to_num_(0.5)
    given = dict(caches[0].given)
    leaves = {"q": torch.randn(3, rows, HEADS, WIDTH)}
    if new:
        leaves |= {"k": torch.randn(3, 3, KV_HEADS, WIDTH), "v": torch.randn(3, 3, KV_HEADS, V_WIDTH)}
        leaves |= {"rotary_cos": torch.rand(64, 4), "rotary_sin": torch.rand(64, 4)}
    if module is flash_attn_interface:
        given = {"page_table" if name == "block_table" else name: value for name, value in given.items()}
    else:
        leaves["alibi_slopes"] = torch.rand(HEADS)
    if module is hub:
        leaves["s_aux"] = torch.rand(HEADS)
    found = []
    for cache, graph in zip(caches, (True, False), strict=True):
        tensors = {name: leaf.clone().requires_grad_(graph) * 1 for name, leaf in leaves.items()}
        assert all(tensor.requires_grad == graph for tensor in tensors.values())
        found.append(module.flash_attn_with_kvcache(k_cache=cache.k, v_cache=cache.v, cache_seqlens=ints(17, 0, 28),
            causal=True, return_softmax_lse=True, **given, **tensors))  # fmt: skip
        assert torch.is_grad_enabled()
        assert not any(tensor.requires_grad for tensor in (*found[-1], cache.k, cache.v))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert same_bits(caches[0].k, caches[1].k)
    assert same_bits(caches[0].v, caches[1].v)


Q, KV = torch.zeros(2, 1, 4, 16), torch.zeros(2, 1, 2, 16)
TABLE = torch.zeros(2, 1, dtype=torch.int32)
APPEND = {"k": KV, "v": KV, "cache_seqlens": 3}
COS = torch.zeros(8, 4)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"k": KV}, r"v is 'NoneType', but must be a torch\.Tensor; k and v are given together"),
        ({"v": KV}, r"k is 'NoneType', but must be a torch\.Tensor; k and v are given together"),
        ({"k": KV, "v": KV}, r"cache_seqlens is None, but must say where k and v go"),
        ({**APPEND, "k": KV[..., :8]}, r"k_cache's head_dim is 16, but must be k's, 8"),
        ({**APPEND, "v": KV.half()}, r"v\.dtype is torch\.float16"),
        ({**APPEND, "cache_seqlens": 8}, r"cache_seqlens\[0\] is 8, but must be in 0\.\.7, for 1 new rows of 8"),
        ({"cache_seqlens": 2**40}, r"cache_seqlens is 1099511627776, but must be in 0\.\.8"),
        ({"cache_seqlens": -1}, r"cache_seqlens\[0\] is -1, but must be in 0\.\.8"),
        ({"cache_seqlens": ints(1, 2).long()},
         r"cache_seqlens\.dtype is torch\.int64, .*\(hint: cache_seqlens\.int\(\)\)"),
        ({"cache_seqlens": 9}, r"cache_seqlens\[0\] is 9, but must be in 0\.\.8, the rows there are$"),
        ({"cache_seqlens": ints(1)}, r"cache_seqlens\.shape is \(1,\), but must be \(batch,\), \(2,\)"),
        ({"cache_seqlens": 2.0}, r"cache_seqlens is 'float', but must be an integer, or an int32"),
        ({"cache_seqlens": 4, "cache_leftpad": ints(5, 0)}, r"cache_leftpad\[0\] is 5, but must be in 0\.\.4"),
        ({"cache_batch_idx": ints(0, 2)},
         r"cache_batch_idx\[1\] is 2, but must be in 0\.\.1, the sequences of the cac"),
        ({"block_table": TABLE.long()}, r"block_table\.dtype is torch\.int64"),
        ({"block_table": TABLE - 1}, r"block_table\[0, 0\] is -1, but must be in 0\.\.1"),
        ({"block_table": TABLE[0]},
         r"block_table is \(1,\), but must be an int32 torch\.Tensor \(batch, pages a seque"),
        ({"rotary_cos": COS, "rotary_sin": COS}, r"rotary_cos is \(8, 4\), but goes with k and v"),
        ({**APPEND, "rotary_cos": COS}, r"rotary_sin is None, but must be given too"),
        ({**APPEND, "rotary_cos": COS, "rotary_sin": COS[:, :2]},
         r"rotary_sin\.shape is \(8, 2\), but must be rotary_"),
        ({**APPEND, "rotary_cos": COS.int(), "rotary_sin": COS},
         r"rotary_cos\.dtype is torch\.int32, but must be a floating-point dtype"),
        ({**APPEND, "rotary_cos": COS[:3], "rotary_sin": COS[:3]}, r"rotary_cos\.shape\[0\] is 3, but must be more"),
        ({"num_splits": 500}, r"num_splits is 500, but must be None or an integer in 1\.\.128"),
        ({"num_splits": 1.5}, r"num_splits is 1\.5, but must be an integer"),
        ({"rotary_interleaved": "no"}, r"rotary_interleaved is 'no', but must be True or False"),
        ({**APPEND, "alibi_slopes": torch.zeros(3)}, r"alibi_slopes\.shape is \(3,\)"),
        ({**APPEND, "window_size": (1, 2, 3)}, r"window_size is \(1, 2, 3\)"),
        ({"q": Q.half()}, r"k_cache\.dtype is torch\.float32, but must be q's"),
        ({"q": torch.zeros(2, 1, 3, 16)}, r"heads_q is 3, but must be a multiple"),
        ({"q": torch.zeros(3, 1, 4, 16)}, r"k_cache's batch is 2, but must be q's, 3"),
    ],
)  # fmt: skip
def test_bad_input_is_one_error_and_writes_nothing(given: dict[str, Any], text: str) -> None:
    k_cache, v_cache = torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 16)
    new = {name: tensor + 1 for name, tensor in given.items() if name in ("k", "v")}
    with pytest.raises(ArgumentError, match=f"^flash_attn_with_kvcache: {text}"):
        flash_attn_with_kvcache(**{"q": Q, "k_cache": k_cache, "v_cache": v_cache, **given, **new})
    assert not k_cache.any()
    assert not v_cache.any()
