"""Decode, pages and chosen tokens over quantised caches, against the float64 oracle of the dequantised numbers."""

from typing import Any

import pytest
import torch
from places import tables
from support import Device, assert_right, problem, random_call, run_core

from portattn.reference import blockwise
from portattn.schema.call import Call
from portattn.schema.problem_limits import FORMATS, ONE_SCALE

TABLES = tables(__file__)

SMALL: dict[str, Any] = {"heads_q": 4, "heads_k": 2, "seq_q": 2, "batch": 3, "dtype": "bf16"}
# Caches, each with features that decide how scales are read: hidden tokens, paddings, pages, packed queries.
CACHES: dict[str, dict[str, Any]] = TABLES["caches"]
# Of latent rows with their scales inside.
DS = {"kv_format": "fp8_ds_mla", "head_dim": 272, "head_dim_v": 256, "dtype": "bf16"}  # fmt: skip
SCALED = [(kind, scales) for kind in ONE_SCALE for scales in FORMATS[kind].scales]
IN_WORDS = [(kind, scales) for kind, scales in SCALED if FORMATS[kind].words]
EVERY = [(kind, scales, cache) for kind, scales in SCALED for cache, fields in CACHES.items()
         if fields["op"] in FORMATS[kind].ops]  # fmt: skip


def quantised(device: str, cache: str, kind: str, scales: str, **fields: Any) -> Call:
    p = problem(**(SMALL | CACHES[cache] | {"kv_format": kind, "kv_scales": scales} | fields))
    return random_call(p, seed=3, device=device)


def on(device: Device, call: Call, **launch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    return run_core(device, call, launch=launch)


@pytest.mark.parametrize(("kind", "scales", "cache"), EVERY)
def test_kernels_are_right(device: Device, kind: str, scales: str, cache: str) -> None:
    """NaN, or a scale that is NaN, infinite, negative or 0, is wherever a token is not attended."""
    call = quantised(device.name, cache, kind, scales)
    for splits in (1, 2):
        assert_right(call, *on(device, call, splits=splits))


@pytest.mark.parametrize(("kind", "scales", "cache"), EVERY)
def test_the_reference_is_right(kind: str, scales: str, cache: str) -> None:
    call = quantised("cpu", cache, kind, scales)
    assert_right(call, *blockwise.run(call))


@pytest.mark.parametrize("fields", [{}, {"mask": True}, {"bias": True, "return_lse": True}], ids=str)
@pytest.mark.parametrize("cache", ["latent", "latent_small_pages_packed"])
def test_rows_with_their_scales_inside(device: Device, cache: str, fields: dict[str, Any]) -> None:
    """vLLM's fp8_ds_mla. NaN and wild scales are wherever a token is not attended."""
    if "total_q" in CACHES[cache]:
        fields = {name: value for name, value in fields.items() if name not in ("mask", "bias")}
    call = random_call(problem(**(SMALL | CACHES[cache] | DS | fields)), seed=4, device=device.name)
    assert_right(call, *blockwise.run(call))
    for splits in (1, 2):
        assert_right(call, *on(device, call, splits=splits))


def test_scales_inside_rows_that_are_no_powers_of_two(device: Device) -> None:
    """Kernels round the dequantised row to the queries' dtype: the LSE is that of rows with 8 bits of each number."""
    call = random_call(problem(**(SMALL | CACHES["latent"] | DS)), seed=5, device=device.name)
    scales = call.k[..., 256:264].contiguous().view(torch.float32) * 1.3
    call.k[..., 256:264] = scales.view(torch.int8)
    assert_right(call, *blockwise.run(call))
    assert_right(call, *run_core(device, call), extra=0.02)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("cache", "kind"),
    [("decode", "e4m3"), ("decode", "int8"), ("decode", "int4"), ("sparse", "e4m3"), ("sparse", "int4")],
)
def test_the_scales_of_an_empty_sequence_count_for_nothing(device: Device, cache: str, kind: str, sinks: bool) -> None:
    """A batch that is padded for a graph has sequences without keys, whose scales may be anything."""
    call = quantised(device.name, cache, kind, "head", leftpad_k=False, log_weights=False, sinks=sinks)
    call.seqlens_k = torch.tensor([37, 0, 7], dtype=torch.int32, device=device.name)
    if call.counts is not None:
        call.counts[1] = 0
    call.k, call.v = torch.ones_like(call.k), torch.ones_like(call.v)
    call.k_scale[1], call.v_scale[1] = float("nan"), float("inf")
    for splits in (1, 2):
        out, lse = on(device, call, splits=splits)
        assert not out[1].any()
        if call.sinks is None:
            assert torch.isneginf(lse[1]).all()
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("scales", ["head", "token"])
def test_small_scales_lose_nothing_in_float16(device: Device, scales: str) -> None:
    """Times a probability, a scale of 2e-6 is below float16's range; the values themselves are not."""
    call = quantised(device.name, "decode_fp16_bshd", "e5m2", scales, mask=False)
    call.v = torch.full_like(call.v, 0x77)  # 28672
    call.v_scale = torch.full_like(call.v_scale, 2e-6)
    out, lse = run_core(device, call)
    assert_right(call, out, lse)
    torch.testing.assert_close(out.float(), torch.full_like(out, 28672 * 2e-6).float(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("load", ["pointer", "block_ptr", "descriptor"])
@pytest.mark.parametrize("cache", ["decode", "paged_packed_hpd"])
@pytest.mark.parametrize("kind", ["e4m3", "int4"])
def test_each_way_to_load_tiles(device: Device, load: str, cache: str, kind: str) -> None:
    lowering, pages = {"load": load, "k_tile": "row"}, {}
    if cache.startswith("paged"):
        lowering["page_loop"] = "per_page"
        pages = {"page_size": 32, "seq_k": 64}  # whole tiles, on a chip as well
    call = quantised(
        device.name, cache, kind, "token", page_layout="phd", heads_k=1, heads_q=2, head_dim=32, leftpad_k=False,
        **pages,
    )  # fmt: skip
    assert_right(call, *run_core(device, call, lowering=lowering))


@pytest.mark.parametrize("pipeline", ["rotated", "single"])
@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_each_loop(device: Device, pipeline: str, scales: str, kind: str) -> None:
    call = quantised(device.name, "decode", kind, scales, **({"seq_k": 13} if pipeline == "single" else {}))
    assert_right(call, *run_core(device, call, lowering={"pipeline": pipeline, "q_operand": "reload"}))


@pytest.mark.parametrize("strides", ["spare", "transposed", "sliced"])
@pytest.mark.parametrize("kind", ["e4m3", "int4"])
def test_strides(device: Device, strides: str, kind: str) -> None:
    p = problem(**(SMALL | CACHES["decode"] | {"kv_format": kind, "kv_scales": "token", "aligned": False}))
    call = random_call(p, seed=3, strides=strides, device=device.name)
    assert_right(call, *run_core(device, call))


@pytest.mark.parametrize("kind", ["e4m3", "int4"])
def test_a_wide_head_in_two_parts(device: Device, kind: str) -> None:
    call = quantised(device.name, "decode", kind, "token", head_dim=528, head_dim_v=32)
    assert_right(call, *run_core(device, call))
