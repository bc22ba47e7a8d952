"""NVFP4 caches: e2m1 numbers with an e4m3 scale for each 16 of a row, against the float64 oracle of the dequantised;
read by bytes, as 16-bit words (kernels/attend_packed16.py), and written."""

from typing import Any

import pytest
import torch
from places import tables
from support import assert_right, problem, random_call, run_core
from test_quantised_accuracy import INPUTS, written
from test_quantised_words import check_exact_words, check_words, unpackings

from portattn.planning.kernel_specs import CORES
from portattn.reference import blockwise, write
from portattn.schema.lowering import Launch, Lowering
from portattn.testing.random_writing import judge_writing, random_writing
from portattn.validate.checks import words_aligned

TABLES = tables(__file__)

SMALL: dict[str, Any] = {"heads_q": 4, "heads_k": 2, "seq_q": 2, "batch": 3, "dtype": "bf16", "kv_format": "nvfp4"}
CACHES: dict[str, dict[str, Any]] = TABLES["caches"]


def quantised(device, cache, scales, strides="plain", **fields):
    p = problem(**(SMALL | CACHES[cache] | {"kv_scales": scales} | fields))
    return random_call(p, seed=3, device=device, strides=strides)


def on(device, call, lowering=None, **launch):
    return run_core(device, call, lowering, launch)


@pytest.mark.parametrize("scales", ["none", "head"])
@pytest.mark.parametrize("cache", CACHES)
def test_kernels_are_right(device, cache, scales):
    """Scales that are NaN, negative or the largest are wherever a token is not attended."""
    call = quantised(device.name, cache, scales)
    assert_right(call, *blockwise.run(call))
    for splits in (1, 2):
        assert_right(call, *on(device, call, splits=splits))


LOWERINGS: dict[str, dict[str, str]] = {
    "block pointers": {"load": "block_ptr"}, "rows of keys": {"k_tile": "row", "q_operand": "reload"},
    "a rotated loop": {"pipeline": "rotated"}, "exact tiles": {"reads": "inside", "mask_value": "finite", "exp": "exp"},
}  # fmt: skip


@pytest.mark.parametrize("lowering", LOWERINGS.values(), ids=LOWERINGS)
def test_every_way_to_lower_it_is_right(device, lowering):
    width = 32 if "reads" in lowering else 48  # its tiles are as wide as the head
    call = quantised(device.name, "decode", "head", head_dim=width, head_dim_v=32)
    assert_right(call, *on(device, call, lowering))


@pytest.mark.parametrize("strides", ["spare", "transposed", "sliced", "combined"])
def test_any_strides(device, strides):
    """Of scales the last axis alone is contiguous, as in a page [K | scales of K | V | scales of V]."""
    cache = "paged_small_pages" if strides == "combined" else "decode_fp16_bshd"
    fields = {} if strides == "combined" else {"head_dim_v": 32}
    call = quantised(device.name, cache, "head", strides, **fields)
    assert_right(call, *blockwise.run(call))
    assert_right(call, *on(device, call))


WHOLE = {"decode_fp16_bshd": 64, "decode_two_parts": 96, "paged_small_pages": 160}  # widths of whole words of scales


def words_of(cache):
    width = WHOLE.get(cache, 32)
    return {"head_dim": width, "head_dim_v": 32 if cache in ("decode_fp16_bshd", "decode_two_parts") else width}


@pytest.mark.parametrize("scales", ["none", "head"])
@pytest.mark.parametrize("cache", CACHES)
def test_words_are_right(device, cache, scales):
    """Scales that are NaN, negative or the largest are wherever a token is not attended."""
    call = quantised(device.name, cache, scales, **words_of(cache))
    assert call.problem.words
    check_words(device, call, splits=1 + (cache != "paged_small_pages"))


@pytest.mark.parametrize("strides", ["spare", "sliced", "combined"])
def test_any_strides_of_whole_words(device, strides):
    """Also those of a page [K | scales of K | V | scales of V]."""
    cache = "paged_small_pages" if strides == "combined" else "decode_fp16_bshd"
    call = quantised(device.name, cache, "head", strides, head_dim=64, head_dim_v=64, aligned=False)
    assert call.problem.words
    check_words(device, call)


FEATURES = [{"window_left": -1, "leftpad_k": False, one: True} for one in ("alibi_slopes", "mask", "sinks")]
NOTHING = [{"head_dim": 32, "seq_q": 0}, {"head_dim": 32, "seq_k": 0}]
SPECIAL = [*(("decode", one) for one in FEATURES), *(("decode_two_parts", one) for one in NOTHING)]


@pytest.mark.parametrize(("cache", "fields"), SPECIAL, ids=str)
def test_features_of_scores_and_nothing_to_attend(device, cache, fields):
    call = quantised(device.name, cache, "head", **fields)
    assert_right(call, *blockwise.run(call))
    assert_right(call, *on(device, call, {"unpack": "bytes"}))
    check_words(device, call)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_number_under_every_scale_is_read_exactly(device, dtype):
    """One key a sequence: the result is its value. All 16 numbers are in each block, in every place of a word in turn,
    and scales are all 256 bytes: negative ones and NaN are what e4m3 says."""
    p = problem(
        op="decode_attention", batch=64, heads_q=1, heads_k=1, seq_q=1, seq_k=1, head_dim=32, head_dim_v=512,
        dtype=dtype, kv_format="nvfp4", kv_scales="none",
    )  # fmt: skip
    call = random_call(p, device=device.name)
    sequence, column = torch.arange(64)[:, None], torch.arange(512)
    codes = (sequence * 5 + column * 7 + column // 16) % 16  # 7 is odd: each block has all 16
    scales = (sequence * 32 + torch.arange(32)) % 256
    call.v = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)[:, None, None].to(device.name)
    call.v_block_scale = scales.to(torch.uint8).view(torch.int8)[:, None, None].to(device.name)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    factors = scales.to(torch.uint8).view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    expected = (torch.cat((numbers, -numbers))[codes] * factors)[:, None, None]
    found = [on(device, call, {"unpack": unpack})[0] for unpack in ("bytes", *unpackings(device))]
    for out in (*found, blockwise.run(call)[0]):
        torch.testing.assert_close(out.float().cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_every_number_of_keys_is_read_exactly_under_scales_of_every_size(device):
    """The LSE of one key is its score: with a query of one 1 it is one of the key's numbers."""
    p = problem(
        op="decode_attention", batch=16, heads_q=32, heads_k=1, seq_q=1, seq_k=1, head_dim=32, head_dim_v=32,
        dtype="bf16", kv_format="nvfp4", kv_scales="none", return_lse=True,
    )  # fmt: skip
    call = random_call(p, device=device.name, scale=1.0)
    sequence, column = torch.arange(16)[:, None], torch.arange(32)
    codes = (sequence * 5 + column * 7 + column // 16) % 16
    call.k = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)[:, None, None].to(device.name)
    call.q = torch.eye(32).expand(16, 32, 32)[:, :, None].to(call.q)
    scales = ((sequence * 2 + torch.arange(2)) * 4 + sequence % 4).clamp(max=126)  # 127 is NaN
    call.k_block_scale = scales.to(torch.uint8).view(torch.int8)[:, None, None].to(device.name)
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    factors = scales.to(torch.uint8).view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    expected = (torch.cat((levels, -levels))[codes] * factors)[:, :, None]
    for unpack in unpackings(device):
        lse = on(device, call, {"unpack": unpack})[1]
        torch.testing.assert_close(lse.cpu(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("what", INPUTS)
def test_nothing_is_lost_beside_the_results_rounding(device, what, dtype, monkeypatch):
    call = written(what, "nvfp4", dtype, "head", device.name, keys=300)
    check_exact_words(device, call, monkeypatch)


def test_scales_of_no_weight_round_no_value_away(device, monkeypatch):
    """The key that has nearly all of a row's weight has the smallest scales, and the others, of weight e^-20, the
    largest: both have a part in the result."""
    call = written("normal", "nvfp4", "bf16", "head", device.name, keys=100, heads=1)
    call.q = torch.zeros_like(call.q)
    call.q[..., 0] = 1.0
    call.k = torch.zeros_like(call.k)
    call.k[..., 50, 0] = 0x06  # 4
    call.k_block_scale = torch.full_like(call.k_block_scale, 0x38)  # type: ignore[arg-type]  # 1
    call.k_scale = torch.ones_like(call.k_scale)  # type: ignore[arg-type]
    call.scale = 5.0  # times 4
    call.v_block_scale = torch.full_like(call.v_block_scale, 0x7E)
    call.v_block_scale[..., 50, :] = 0x01
    check_words(device, call, splits=2)
    check_exact_words(device, call, monkeypatch)


def test_what_is_not_read_in_words():
    """Rows of an odd number of scales, and scales that are not aligned; the plan says why, and takes bytes."""
    kernel, launch, words = CORES["decode_attention"], Launch(block_m=16, block_n=64), Lowering(unpack="ptx")

    def limits(**fields):
        p = problem(op="decode_attention", seq_q=1, kv_format="nvfp4", **({"dtype": "bf16"} | fields))
        return {choice: why for choice, _, why in kernel.limits(p, words, launch)}

    assert limits(head_dim=64) == {}
    assert limits(head_dim=64, aligned=False) == {}
    for width in (16, 48, 80, 112):
        assert "whole words" in limits(head_dim=width)["unpack"]
    assert "whole words" in limits(head_dim=64, head_dim_v=48)["unpack"]
    assert "whole words" in limits(head_dim=64, word_aligned=False)["unpack"]  # the cache's rows may be aligned still
    assert "512 columns" in limits(head_dim=576, head_dim_v=32)["unpack"]


@pytest.mark.parametrize(("width", "by"), [(128, 1), (128, 2), (64, 2), (32, 1)])
def test_scales_that_are_not_aligned_are_no_words(width, by):
    """A view of scales that begins inside of a word of memory, as a caller's pages may have it."""
    rows = torch.zeros(2, 2, 8, width // 2, dtype=torch.int8)
    scales = torch.zeros(2 * 2 * 8 * width // 16 + 4, dtype=torch.int8)
    here, there = (scales[first:][: 2 * 2 * 8 * width // 16].view(2, 2, 8, -1) for first in (0, by))
    assert words_aligned((rows, rows), (here, here))
    assert not words_aligned((rows, rows), (here, there))
    assert not words_aligned((rows, rows), (there, None))


CASES: dict[str, dict[str, Any]] = TABLES["cases"]


def case(name, scales):
    stored = {"heads_q": 2, "heads_k": 2, "dtype": "bf16", "kv_format": "nvfp4", "kv_scales": scales}
    return problem(**stored | CASES[name])


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("scales", ["none", "head"])
@pytest.mark.parametrize("name", CASES)
def test_every_byte_is_the_nearest_number(device, name, scales, spare):
    """Of ties, NaN, infinity, numbers that are too large or too small, and rows of zeros; nothing else is touched."""
    for way in (lambda call: run_core(device, call), write.run):
        call = random_writing(case(name, scales), seed=5, device=device.name, spare=spare)
        way(call)
        assert judge_writing(call) == {"error": 0.0, "budget": 0.0, "wrong": 0}


def test_ties_go_to_the_even_code(device):
    """Of blocks whose largest number is 6, and whose scale is 1: numbers halfway between two of the format."""
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    row = torch.cat((middle, -middle, torch.tensor([6.0, -0.0])))
    codes = [0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 7, 8]
    for way in (lambda call: run_core(device, call), write.run):
        call = random_writing(case("pages", "none"), seed=5, device=device.name)
        call.q.copy_(row.repeat(3))
        call.slots.copy_(torch.arange(19))
        way(call)
        low, high = (call.k[0, 0, 0, :8].cpu() & 15).tolist(), (call.k[0, 0, 0, :8].cpu() >> 4 & 15).tolist()
        assert [code for pair in zip(low, high, strict=True) for code in pair] == codes
        assert call.k_block_scale[0, 0, 0].view(torch.float8_e4m3fn).float().tolist() == [1.0, 1.0, 1.0]
