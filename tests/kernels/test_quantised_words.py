"""Decode and pages over quantised caches whose rows are read as 16-bit words (kernels/attend_packed16.py)."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from kernel_cases import check, run, with_lengths
from kernel_cases import problem as named_problem
from support import TILE, Device, assert_right, core_plan, key_tile, problem, random_call, run_core
from test_quantised_accuracy import INPUTS, assert_exact
from test_quantised_accuracy import run as run_rounded
from test_quantised_caches import CACHES, IN_WORDS, SMALL, quantised
from test_wild_numbers import run_watched

from portattn.planning.kernel_specs import CORES
from portattn.reference.blocks import dequantize
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem_limits import FORMATS
from portattn.schema.tensors import KV_DTYPE
from portattn.testing.oracle import oracle

WORDS = [cache for cache in CACHES if cache.startswith(("decode", "paged"))]


def unpackings(device):
    """Triton's interpreter knows no PTX."""
    return ("words",) if device.name == "cpu" else ("words", "ptx")


def on(device, call, unpack="words", **launch):
    return run_core(device, call, {"unpack": unpack}, launch)


def check_words(device, call, lowering=None, **launch):
    for unpack in unpackings(device):
        assert_right(call, *run_core(device, call, {"unpack": unpack} | (lowering or {}), launch))


def check_exact_words(device, call, monkeypatch, **launch):
    for unpack in unpackings(device):
        assert_exact(call, run_rounded(device, call, monkeypatch, {"unpack": unpack}, **{"block_n": 64} | launch))


def without_pages(call):
    if call.page_table is not None and call.seqlens_k is not None:
        for sequence, length in enumerate(call.seqlens_k.tolist()):
            call.page_table[sequence, -(-max(length, 0) // call.problem.page_size) :] = 2**30
    return call


@pytest.mark.parametrize("cache", WORDS)
@pytest.mark.parametrize(("kind", "scales"), IN_WORDS)
def test_words_are_right(device, kind, scales, cache):
    """NaN, or a scale that is NaN, infinite, negative or 0, is wherever a token is not attended."""
    call = quantised(device.name, cache, kind, scales)
    check_words(device, call, splits=1 + (cache != "paged_small_pages"))


@pytest.mark.parametrize("kind", ["e4m3", "int4"])
@pytest.mark.parametrize("page_size", [4, 8, 32])
def test_pages_of_every_size(device, page_size, kind):
    """Tiles of whole pages, and parts of a page; rows are longer than wide, as those with their scales inside are."""
    p = problem(
        **SMALL, op="paged_attention", seq_k=64, page_size=page_size, head_dim=24, head_dim_v=40, kv_format=kind,
        kv_scales="token", aligned=False, causal="bottom_right",
    )  # fmt: skip
    call = random_call(p, seed=page_size, strides="spare", device=device.name)
    assert call.k.stride(-2) > call.k.shape[-1]
    assert call.problem.words
    check_words(device, call, splits=2)


def test_neighbours_read_heads_that_lie_side_by_side():
    """Of pages that hold a token's heads together, as words alone: others were not timed."""

    def heads_first(op, unpack, **fields):
        p = problem(
            **SMALL | {"op": op, "seq_k": 64, "head_dim": 64, "kv_format": "int4", "kv_scales": "token"} | fields
        )
        return bool(CORES[op].constexprs(p, Lowering(unpack=unpack), Launch())["HEADS_FIRST"])

    assert heads_first("paged_attention", "ptx", page_size=16)
    assert not heads_first("paged_attention", "bytes", page_size=16)
    assert not heads_first("paged_attention", "ptx", page_size=16, page_layout="hpd")
    assert not heads_first("decode_attention", "ptx")


BY_PAGE = [
    {"page_size": 4}, {"page_size": 8}, {"page_size": 8, "window_left": 21, "window_right": 0},
    {"page_size": 4, "window_left": 9}, {"page_size": 8, "seq_q": 5, "causal": "bottom_right", "sinks": True},
    {"page_size": 8, "mask": True, "kv_scales": "head"}, {"page_size": 4, "seq_q": 3, "tree_mask": True},
    {"page_size": 8, "aligned": False, "page_layout": "hpd"},
]  # fmt: skip


def looked_up(device, fields, kind):
    """A problem of BY_PAGE: of a device's wider tiles the pages are longer, so that a tile has as many."""
    base = {"op": "paged_attention", "seq_k": 96, "kv_format": kind}
    own = {"head_dim": 32, "kv_scales": "head"} if kind == "nvfp4" else {"head_dim": 24, "kv_scales": "token"}
    p = problem(**SMALL | base | own | fields)
    return msgspec.structs.replace(p, page_size=p.page_size * (key_tile(device, p) // TILE))


KINDS_BY_PAGE = [*zip(BY_PAGE, ["int4", "e4m3"] * 4, strict=True), *((fields, "nvfp4") for fields in BY_PAGE)]


@pytest.mark.parametrize(("fields", "kind"), KINDS_BY_PAGE, ids=str)
def test_pages_that_are_looked_up_a_step_ahead(device, fields, kind):
    """Ragged lengths, of which some end inside of a tile; pages that no key is in have ids of no page."""
    p = looked_up(device, fields, kind)
    call = without_pages(random_call(p, seed=3, strides="spare" if not p.aligned else "", device=device.name))
    check_words(device, call, {"page_loop": "by_page"}, splits=2)


def test_tiles_of_a_chip_fit_pages_as_those_here_do():
    """A chip's tiles of int4 are wider (support.key_tile): what reads pages of them is what may be planned."""
    chip = Device("cuda", "triton")
    for kind, scales in IN_WORDS:
        for cache in (cache for cache in WORDS if CACHES[cache].get("page_size")):
            p = problem(**SMALL | CACHES[cache] | {"kv_format": kind, "kv_scales": scales})
            core_plan(chip, p, {"unpack": "words"})
    for fields, kind in KINDS_BY_PAGE:
        core_plan(chip, looked_up(chip, fields, kind), {"page_loop": "by_page", "unpack": "words"})
    p = problem(**SMALL, op="paged_attention", seq_k=64, page_size=16, kv_format="int4", kv_scales="token")
    with pytest.raises(AssertionError, match="a tile of 32 keys does not lie in one page of 16"):
        core_plan(chip, p, {"page_loop": "per_page", "unpack": "words"})


@pytest.mark.interpreter
@pytest.mark.parametrize("page_id", [-1, -(2**31), 2**31 - 1])
@pytest.mark.parametrize(("page_size", "page_loop"), [(8, "by_page"), (8, "flat_masked"), (32, "per_page")])
def test_ids_of_no_page_are_read_inside_the_cache(monkeypatch, device, page_size, page_loop, page_id):
    """A sequence whose ids are all wrong reads nothing outside of the cache, and changes nothing for the others."""
    call = random_call(
        looked_up(device, {"page_size": page_size, "window_left": 21, "return_lse": True}, "e4m3"), 3,
        device=device.name,
    )  # fmt: skip
    clean, _ = run_watched(monkeypatch, device, call, 2, unpack="words", page_loop=page_loop)
    call.page_table[0] = page_id
    beside, _ = run_watched(monkeypatch, device, call, 2, unpack="words", page_loop=page_loop)
    assert torch.equal(beside[1:], clean[1:])


@pytest.mark.parametrize("page_id", [-1, 2**30])
@pytest.mark.parametrize("page_loop", ["by_page", "flat_masked"])
def test_pages_that_a_window_hides_have_any_id(device, page_loop, page_id):
    p = looked_up(device, {"page_size": 8, "window_left": 21, "causal": "bottom_right", "seq_q": 2}, "e4m3")
    call = random_call(p, 3, device=device.name)
    for sequence, length in enumerate(call.seqlens_k.tolist()):
        call.page_table[sequence, : max(length - p.seq_q - p.window_left, 0) // p.page_size] = page_id
    assert (call.page_table == page_id).any()
    check_words(device, call, {"page_loop": page_loop}, splits=2)


@pytest.mark.parametrize("fields", [{"alibi_slopes": True}, {"mask": True}, {"tree_mask": True}], ids=str)
@pytest.mark.parametrize("kind", ["e4m3", "int4"])
def test_features_of_scores(device, kind, fields):
    call = quantised(device.name, "decode", kind, "token", window_left=-1, leftpad_k=False, **fields)
    check_words(device, call)


def narrow(what, kind, dtype, scales, device, keys=300):
    """Eight queries of each key/value head over a cache whose numbers fill the format's range."""
    q, k, v = INPUTS[what](8, keys)
    p = problem(
        op="decode_attention", batch=1, heads_q=16, heads_k=2, seq_q=1, seq_k=keys, head_dim=64, dtype=dtype,
        kv_format=kind, kv_scales=scales,
    )  # fmt: skip
    call = random_call(p, device=device)
    for name, values in (("k", k), ("v", v)):
        scale = values.abs().amax((2, 3) if scales == "head" else 3) / FORMATS[kind].largest
        numbers = values / (scale[..., None, None] if scales == "head" else scale[..., None])
        if kind == "int4":
            codes = (numbers.round() + 8.0).to(torch.int32)
            stored = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8).view(torch.int8)
            if scales == "token":
                scale = ((scale.view(torch.int32) & -16) | 8).view(torch.float32)
        else:
            numbers = numbers.round() if kind == "int8" else numbers
            stored = numbers.to(KV_DTYPE[kind]).view(torch.int8)
        setattr(call, name, stored.to(device))
        setattr(call, f"{name}_scale", scale.contiguous().to(device))
    call.q = q.reshape(1, 16, 1, 64).to(call.q)
    return call


@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", "bf16"), ("e4m3", "fp16"), ("int8", "bf16"), ("int4", "fp16")])
@pytest.mark.parametrize("what", INPUTS)
def test_nothing_is_lost_beside_the_results_rounding(device, what, kind, dtype, scales, monkeypatch):
    call = narrow(what, kind, dtype, scales, device.name)
    check_exact_words(device, call, monkeypatch)


@pytest.mark.parametrize("kind", KV_DTYPE)
def test_every_number_of_a_format_is_read_exactly(device, kind):
    """One key a sequence: the result is its value, in 16 bits exact. All numbers are in either place of a word."""
    codes = torch.arange(256, dtype=torch.uint8, device=device.name)
    codes = torch.stack((codes, codes.flip(0))).flatten()
    for dtype in ("fp16", "bf16"):
        p = problem(
            op="decode_attention", batch=16, heads_q=1, heads_k=1, seq_q=1, seq_k=1, head_dim=32, dtype=dtype,
            kv_format=kind, kv_scales="none" if kind != "int8" else "head",
        )  # fmt: skip
        call = random_call(p, device=device.name)
        call.k = torch.zeros_like(call.k)
        call.v = codes.view(call.v.dtype).reshape(call.v.shape)
        if call.k_scale is not None:
            call.k_scale, call.v_scale = torch.ones_like(call.k_scale), torch.ones_like(call.k_scale)
        expected = codes.view(KV_DTYPE[kind]).to(call.dtype).reshape(call.new_out().shape)
        for unpack in ("bytes", *unpackings(device)):
            out, _ = run_core(device, call, {"unpack": unpack})
            torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def check_bytes_of_int4(device, scales, dtype, unpacks, launch=None):
    """Attend one key a sequence: every byte in both bytes of a word, and all tokens' scales that may stand for 0."""
    p = problem(
        op="decode_attention", batch=16, heads_q=1, heads_k=1, seq_q=1, seq_k=1, head_dim=64, head_dim_v=512,
        dtype=dtype, kv_format="int4", kv_scales=scales,
    )  # fmt: skip
    call = random_call(p, device=device.name)
    codes = torch.arange(256, dtype=torch.uint8).roll(1).view(torch.int8).expand(16, 1, 1, 256)
    scale = torch.ones(16, 1)
    if scales == "token":
        zeros = torch.arange(16, dtype=torch.int32)[:, None, None]
        scale = (torch.ones(16, 1, 1).view(torch.int32) | zeros).view(torch.float32)
    call.v, call.v_scale = codes.contiguous().to(device.name), scale.to(device.name)
    by_token = scales == "token"
    expected = dequantize(call.v, "int4", call.v_scale if by_token else call.v_scale[..., None], by_token)
    first = torch.stack((torch.arange(256) % 16, torch.arange(256) // 16), dim=1).roll(1, 0).flatten() - 8.0
    assert scales == "token" or torch.equal(expected[0, 0, 0].cpu(), first)
    for unpack in unpacks:
        out, _ = run_core(device, call, {"unpack": unpack}, launch)
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("scales", ["head", "token"])
def test_every_byte_of_int4_is_read_exactly(device, scales, dtype):
    check_bytes_of_int4(device, scales, dtype, ("bytes", *unpackings(device)))


@pytest.mark.parametrize("kind", ["e4m3", "int4"])
def test_a_scale_of_no_weight_rounds_no_other_away(device, kind):
    """A token whose values are 2^60 times as large as all others, and which nobody attends as its score is so low; one
    whose values are tiny, and which every row attends most; and scales at both ends of what float32 holds."""
    call = narrow("normal", kind, "bf16", "token", device.name, keys=100)
    zero = call.v_scale.view(torch.int32) & 15
    exact = (call.v_scale.view(torch.int32) & -16).view(torch.float32)

    def scaled(key, by):
        exact[..., key] = (exact[..., key] * by).clamp(2.0**-126, 2.0**126)

    call.q = torch.ones_like(call.q)
    shift = call.k.new_full((64 if kind == "e4m3" else 32,), 0x38 if kind == "e4m3" else 0x11)  # 1.0; 1 - 8
    call.k[:, :, 7] = shift | -128 if kind == "e4m3" else shift  # a score of -8 or -56 before the scale
    call.k_scale[..., 7] = 2.0**8 * (1.0 + 8 * 2.0**-23)  # its lowest bits: of int4, 8 stands for 0
    scaled(7, 2.0**60)
    scaled(30, 2.0**-40)
    scaled(50, 2.0**-126)
    call.v_scale = (exact.view(torch.int32) | zero).view(torch.float32)
    expected, _ = oracle(call)
    assert expected.abs().max() < 100.0
    check_words(device, call, splits=2)


def test_values_all_of_whose_scales_are_tiny(device):
    """Sums of probabilities, which such scales divide, stay finite, and the LSE is that of the scores."""
    call = narrow("normal", "e4m3", "fp16", "token", device.name, keys=100)
    call.v_scale = torch.full_like(call.v_scale, 2.0**-126)  # type: ignore[arg-type]
    for unpack in unpackings(device):
        out, lse = on(device, call, unpack, splits=2)
        assert not out.any()
        torch.testing.assert_close(lse.double(), oracle(call)[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by", [2.0**100, 2.0**-100])
def test_queries_beyond_float16(device, by):
    """Each row of bfloat16 queries has a factor of its own: rows of other sizes beside it lose nothing."""
    call = narrow("normal", "int8", "bf16", "head", device.name, keys=100)
    call.q[:, ::2] *= by
    if by > 1.0:  # else the other rows' scores would be beyond what a base-2 exponential's argument holds exactly
        call.k_scale /= by
    assert all(torch.isfinite(result).all() for result in oracle(call))
    check_words(device, call)


def test_what_is_not_read_in_words():
    """The plan says why, and takes bytes; nothing else is left to the tile's choices where words are read."""
    kernel, launch, words = CORES["decode_attention"], Launch(block_m=16, block_n=64), Lowering(unpack="ptx")

    def limits(lowering=words, **fields):
        p = problem(
            op="decode_attention", seq_q=1, **({"dtype": "bf16", "kv_format": "int8", "kv_scales": "head"} | fields)
        )
        return {choice: why for choice, value, why in kernel.limits(p, lowering, launch)}

    assert limits() == {}
    assert "not quantised" in limits(kv_format="as_q", kv_scales="none")["unpack"]
    assert "whole words of 2" in limits(head_dim=17)["unpack"]
    assert "whole words of 4" in limits(kv_format="int4", head_dim=18, head_dim_v=16)["unpack"]
    assert "multiples of 4 bytes" in limits(aligned=False, word_aligned=False)["unpack"]
    assert limits(aligned=False) == {}
    assert "512 columns" in limits(head_dim=528, head_dim_v=32)["unpack"]
    others = Lowering(unpack="words", load="descriptor", pipeline="rotated")
    assert limits(others) == {"load": "words are read by pointers", "pipeline": "the loop over words has no other"}


@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
@pytest.mark.parametrize("above", [5.0, 10.0, 20.0])
def test_a_sink_that_weighs_most_rounds_no_value_away(device, above, kind, scales, monkeypatch):
    """A sink has no value: what it leaves of the keys' weights is not to be float16's smallest numbers."""
    call = narrow("normal", kind, "bf16", scales, device.name, keys=100)
    call.problem = msgspec.structs.replace(call.problem, sinks=True)
    call.sinks = torch.full((16,), above, device=device.name)
    check_exact_words(device, call, monkeypatch)


@pytest.mark.parametrize("by", [2.0**40, 2.0**-40])
@pytest.mark.parametrize("feature", ["alibi_slopes", "bias"])
def test_scales_of_any_size_beside_scores_in_the_natural_base(device, feature, by, monkeypatch):
    """ALiBi and a bias keep scores natural, and so must the scales' logarithms be: with those of base 2 the products of
    probabilities and scales would be 200,000 times too large or too small for float16."""
    call = narrow("normal", "e4m3", "bf16", "token", device.name, keys=100)
    call.problem = msgspec.structs.replace(call.problem, **{feature: True})
    generator = torch.Generator().manual_seed(1)
    shape = (1, 16) if feature == "alibi_slopes" else (1, 16, 1, 100)
    setattr(call, feature, (torch.rand(shape, generator=generator) * 0.1).to(device.name))
    call.v_scale = call.v_scale * by
    check_exact_words(device, call, monkeypatch)


OPS = ("decode", "paged", "whole pages", "ragged", "mla", "mla ragged")
FEATURES: dict[str, dict[str, Any]] = {
    "alone": {}, "causal": {"causal": "bottom_right"}, "top left": {"causal": "top_left"},
    "window": {"window_left": 3, "window_right": 1},
    "more": {"causal": "bottom_right", "window_left": 9, "softcap": True, "alibi_slopes": True, "sinks": True},
}  # fmt: skip
LOWERINGS: dict[str, dict[str, str]] = {
    "finite": {"mask_value": "finite"}, "exp": {"exp": "exp"}, "persistent": {"grid": "persistent"},
    "reload": {"q_operand": "reload"}, "inside": {"reads": "inside"}, "rotated": {"pipeline": "rotated"},
    "block_ptr": {"load": "block_ptr"}, "transposed": {"k_tile": "transposed"},
}  # fmt: skip


def with_words(call, words):
    """The call with the same words for every sequence; of packed queries one for each row."""
    words = [word - 2**64 if word >= 2**63 else word for word in words]
    mask = torch.tensor(words, dtype=torch.int64, device=call.q.device)
    return replace(call, tree_mask=mask.expand(call.problem.query_rows[0], -1))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", OPS)
def test_random_words_are_right(device, name, feature):
    seed = list(FEATURES).index(feature) % 2
    call = random_call(named_problem(name, tree_mask=True, **FEATURES[feature]), seed, device=device.name)
    check(device, call, 1 + seed * 2 if "ragged" not in name else 1)


@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize("name", OPS)
def test_what_no_query_sees_may_be_nan(device, name, poison):
    call = random_call(
        named_problem(name, tree_mask=True, dtype="fp16"), 2, device=device.name, poison=poison, extremes=True
    )
    assert call.k.isnan().any() or call.v.isnan().any()
    check(device, call)


@pytest.mark.parametrize(("lowering", "name"), [(one, "ragged" if one == "inside" else "decode") for one in LOWERINGS])
def test_every_way_to_lower_it(device, lowering, name):
    call = random_call(named_problem(name, tree_mask=True, mask=name != "ragged"), 3, device=device.name)
    check(device, call, **LOWERINGS[lowering])


@pytest.mark.parametrize("queries", [1, 64])
def test_every_bit_by_itself(device, queries):
    """Query i sees new token (7·i) mod n, in each half of its word and at both halves' ends, and no other."""
    call = random_call(named_problem("decode", seq_q=queries, seq_k=80, seqlens_k=False, leftpad_k=False), 0,
                       device=device.name)  # fmt: skip
    call = with_words(call, [1 << (7 * i % queries) for i in range(queries)])
    call.problem = msgspec.structs.replace(call.problem, tree_mask=True)
    assert_right(call, *run(device, call))


def test_a_word_of_zero_leaves_the_keys_before(device):
    call = random_call(
        named_problem("decode", batch=1, seq_q=1, seqlens_k=False, leftpad_k=False), 0, device=device.name
    )
    call = with_words(call, [0])
    call.problem = msgspec.structs.replace(call.problem, tree_mask=True)
    call.k[:, :, -1] = call.v[:, :, -1] = float("nan")
    shorter = replace(call, tree_mask=None, k=call.k[:, :, :-1], v=call.v[:, :, :-1], problem=msgspec.structs.replace(
        call.problem, tree_mask=False, seq_k=call.problem.seq_k - 1))  # fmt: skip
    torch.testing.assert_close(run(device, call), run(device, shorter))


@pytest.mark.parametrize("name", ["decode", "ragged"])
def test_a_chain_is_the_causal_mask(device, name):
    call = random_call(named_problem(name), 5, device=device.name)
    keys, queries = [21, 2, 0][: call.problem.batch], None
    if call.problem.packed:
        queries = [9, 0, 13]
        keys = [37, 4, 13]
    call = with_lengths(replace(call, leftpad_k=None), keys, queries)
    p = msgspec.structs.replace(call.problem, leftpad_k=False)
    count = p.query_rows[1] if queries is None else 22
    numbers = list(range(count)) if queries is None else [i for n in queries for i in range(n)]
    chain = with_words(call, [(2 << i) - 1 for i in numbers])
    chain.problem = msgspec.structs.replace(p, tree_mask=True)
    causal = replace(call, problem=msgspec.structs.replace(p, causal="bottom_right"))
    both = replace(chain, problem=msgspec.structs.replace(chain.problem, causal="bottom_right"))
    wanted = run(device, causal)
    for found in (run(device, chain), run(device, both)):
        torch.testing.assert_close(found, wanted)


def test_rows_without_a_key(device):
    """More new tokens than keys: the first nodes are none, and a word that shows only those shows nothing."""
    call = random_call(named_problem("decode", leftpad_k=False), 0, device=device.name)
    call.problem = msgspec.structs.replace(call.problem, tree_mask=True)
    call = with_words(with_lengths(call, [2, 0]), [0b001, 0b011, 0b111])
    out, lse = run(device, call)
    assert_right(call, out, lse)
    assert not out[0, :, 0].any()
    assert lse[0, :, 0].eq(float("-inf")).all()
    assert not out[1].any()
