"""Decode and pages over NVFP4 caches, rows and scales read as 16-bit words (kernels/attend_packed16.py)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from support import TILE, Device, assert_right, key_tile, problem, random_call, run_core
from test_nvfp4_caches import CACHES, SMALL, quantised, written
from test_quantised_accuracy import INPUTS, assert_exact
from test_quantised_words import BY_PAGE, rounded_once, unpackings

from portattn.planning.kernel_specs import CORES
from portattn.schema.call import Call
from portattn.schema.lowering import Launch, Lowering
from portattn.validate.checks import words_aligned

WHOLE = {"decode_fp16_bshd": 64, "decode_two_parts": 96, "paged_small_pages": 160}  # widths of whole words of scales


def words_of(cache: str) -> dict[str, Any]:
    width = WHOLE.get(cache, 32)
    return {"head_dim": width, "head_dim_v": 32 if cache in ("decode_fp16_bshd", "decode_two_parts") else width}


def on(device: Device, call: Call, unpack: str = "words", **launch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    return run_core(device, call, {"unpack": unpack}, launch)


@pytest.mark.parametrize("scales", ["none", "head"])
@pytest.mark.parametrize("cache", CACHES)
def test_words_are_right(device: Device, cache: str, scales: str) -> None:
    """Scales that are NaN, negative or the largest are wherever a token is not attended."""
    call = quantised(device.name, cache, scales, **words_of(cache))
    assert call.problem.words
    for unpack in unpackings(device):
        assert_right(call, *on(device, call, unpack, splits=1 + (cache != "paged_small_pages")))


@pytest.mark.parametrize("strides", ["spare", "sliced", "combined"])
def test_any_strides_of_whole_words(device: Device, strides: str) -> None:
    """Also those of a page [K | scales of K | V | scales of V]."""
    cache = "paged_small_pages" if strides == "combined" else "decode_fp16_bshd"
    call = quantised(device.name, cache, "head", strides, head_dim=64, head_dim_v=64, aligned=False)
    assert call.problem.words
    for unpack in unpackings(device):
        assert_right(call, *on(device, call, unpack))


@pytest.mark.parametrize("fields", BY_PAGE, ids=str)
def test_pages_that_are_looked_up_a_step_ahead(device: Device, fields: dict[str, Any]) -> None:
    """Ragged lengths, of which some end inside of a tile; pages that no key is in have ids of no page."""
    base = {"op": "paged_attention", "seq_k": 96, "head_dim": 32}
    p = problem(**SMALL | base | fields | {"kv_scales": "head"})
    tile = key_tile(device, p)
    p = msgspec.structs.replace(p, page_size=p.page_size * (tile // TILE))
    call = random_call(p, seed=3, strides="spare" if not p.aligned else "", device=device.name)
    assert call.seqlens_k is not None
    assert call.page_table is not None
    for sequence, length in enumerate(call.seqlens_k.tolist()):
        call.page_table[sequence, -(-max(length, 0) // p.page_size) :] = 2**30
    limits = CORES[p.op].limits(call.problem, Lowering(unpack="words", page_loop="by_page"), Launch(block_n=tile))
    assert not dict(limit[:2] for limit in limits)
    for unpack in unpackings(device):
        assert_right(call, *run_core(device, call, {"unpack": unpack, "page_loop": "by_page"}, {"splits": 2}))


@pytest.mark.parametrize("fields", [{"alibi_slopes": True}, {"mask": True}, {"sinks": True}], ids=str)
def test_features_of_scores(device: Device, fields: dict[str, bool]) -> None:
    call = quantised(device.name, "decode", "head", window_left=-1, leftpad_k=False, **fields)
    for unpack in unpackings(device):
        assert_right(call, *on(device, call, unpack))


@pytest.mark.parametrize("fields", [{"seq_q": 0}, {"seq_k": 0}], ids=str)
def test_nothing_to_attend(device: Device, fields: dict[str, int]) -> None:
    call = quantised(device.name, "decode_two_parts", "head", head_dim=32, **fields)
    for unpack in unpackings(device):
        assert_right(call, *on(device, call, unpack))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_number_under_every_scale_is_read_exactly(device: Device, dtype: str) -> None:
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
    for unpack in unpackings(device):
        out = on(device, call, unpack)[0].float().cpu()
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_every_number_of_keys_is_read_exactly_under_scales_of_every_size(device: Device) -> None:
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
        lse = on(device, call, unpack)[1]
        assert lse is not None
        torch.testing.assert_close(lse.cpu(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("what", INPUTS)
def test_nothing_is_lost_beside_the_results_rounding(
    device: Device, what: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = written(what, dtype, "head", device.name, keys=300)
    for unpack in unpackings(device):
        assert_exact(call, rounded_once(device, call, monkeypatch, unpack))


def test_scales_of_no_weight_round_no_value_away(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key that has nearly all of a row's weight has the smallest scales, and the others, of weight e^-20, the
    largest: both have a part in the result."""
    call = written("normal", "bf16", "head", device.name, keys=100, heads=1)
    assert call.v_block_scale is not None
    call.q = torch.zeros_like(call.q)
    call.q[..., 0] = 1.0
    call.k = torch.zeros_like(call.k)
    call.k[..., 50, 0] = 0x06  # 4
    call.k_block_scale = torch.full_like(call.k_block_scale, 0x38)  # type: ignore[arg-type]  # 1
    call.k_scale = torch.ones_like(call.k_scale)  # type: ignore[arg-type]
    call.scale = 5.0  # times 4
    call.v_block_scale = torch.full_like(call.v_block_scale, 0x7E)
    call.v_block_scale[..., 50, :] = 0x01
    for unpack in unpackings(device):
        assert_right(call, *on(device, call, unpack, splits=2))
    for unpack in unpackings(device):
        assert_exact(call, rounded_once(device, call, monkeypatch, unpack))


def test_what_is_not_read_in_words() -> None:
    """Rows of an odd number of scales, and scales that are not aligned; the plan says why, and takes bytes."""
    kernel, launch, words = CORES["decode_attention"], Launch(block_m=16, block_n=64), Lowering(unpack="ptx")

    def limits(**fields: object) -> dict[str, str]:
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
def test_scales_that_are_not_aligned_are_no_words(width: int, by: int) -> None:
    """A view of scales that begins inside of a word of memory, as a caller's pages may have it."""
    rows = torch.zeros(2, 2, 8, width // 2, dtype=torch.int8)
    scales = torch.zeros(2 * 2 * 8 * width // 16 + 4, dtype=torch.int8)
    here, there = (scales[first:][: 2 * 2 * 8 * width // 16].view(2, 2, 8, -1) for first in (0, by))
    assert words_aligned((rows, rows), (here, here))
    assert not words_aligned((rows, rows), (here, there))
    assert not words_aligned((rows, rows), (there, None))
