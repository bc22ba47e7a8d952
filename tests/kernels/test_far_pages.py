"""Caches whose pages, or sequences, begin above 2 GiB and above 4 GiB: a product of two 32-bit numbers wraps there.

The memory is of 10 GiB, of which a few KiB are ever touched. An address that has wrapped lies inside of it too, so that
it shows as wrong bytes.
"""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from support import Device, assert_right, problem, random_call, run_core
from test_cache_writes import OPS
from test_quantised_caches import SMALL

from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.testing.random_writing import random_writing
from portattn.testing.verdict import judge

GIB = 2**30
APART = GIB + 4096  # bytes from one page to the next
PAGES = 6
BEFORE, AFTER = 4 * GIB + 2**20, 5 * APART + 2**20  # of 2-byte numbers, 2^31 elements back and less than that on
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; Python names it from 3.13 on


@pytest.fixture(scope="module")
def memory(device: Device) -> torch.Tensor:
    """Bytes of no value."""
    size = BEFORE + AFTER
    if device.name == "cuda":
        if torch.cuda.mem_get_info()[0] < 2 * size:
            pytest.skip(f"the device has no {size} bytes to spare")
        return torch.empty(size, dtype=torch.uint8, device=device.name)
    kept = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(kept, dtype=torch.uint8)


def put_far(call: Call, memory: torch.Tensor) -> int:
    """The caches, and scales of tokens, as the last of PAGES pages or sequences, each 1 GiB behind the one before.

    Returns the number of the first.
    """
    first = PAGES - call.k.shape[0]
    for number, name in enumerate(("k", "v", "k_scale", "v_scale")):
        cache = getattr(call, name)
        if cache is None or not (name in "kv" or call.problem.kv_scales == "token"):
            continue
        each, at = cache.element_size(), BEFORE + 2**16 * number
        shape, stride = (PAGES, *cache.shape[1:]), (APART // cache.element_size(), *cache.stride()[1:])
        assert cache[0].numel() * each <= 2**13, "tensors lie apart"
        placed = memory.view(cache.dtype).as_strided(shape, stride, at // each)
        placed[first:] = cache
        setattr(call, name, placed)
    return first


STORED = [("as_q", "none"), ("e4m3", "token"), ("int4", "token")]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("unpack", ["bytes", "ptx"])
@pytest.mark.parametrize("stored", STORED, ids="-".join)
def test_rows_are_written_where_pages_are(
    device: Device, memory: torch.Tensor, op: str, unpack: str, stored: tuple[str, str]
) -> None:
    """Of numbers that are stored as they are, `ptx` finds places as of any others, and the interpreter runs it."""
    if unpack == "ptx" and stored[0] != "as_q" and device.name == "cpu":
        pytest.skip("Triton's interpreter knows no PTX")
    sizes = {"pages": {"seq_k": 8 * PAGES, "seq_q": 40}, "append": {"batch": PAGES}}[op]
    call = random_writing(Problem(**OPS[op] | sizes | {"kv_format": stored[0], "kv_scales": stored[1]}), 1,
                          device=device.name)  # fmt: skip
    if call.seqlens_k is not None:
        call.seqlens_k = torch.arange(PAGES, dtype=torch.int32, device=device.name) * 3
    elif call.slots is not None:
        assert {slot // 8 for slot in call.slots.tolist() if 0 <= slot < 8 * PAGES} == set(range(PAGES))
    assert put_far(call, memory) == 0
    run_core(device, call, {"unpack": unpack}, {"block_m": 16})
    assert judge(call, call.new_out(), None) == {"error": 0.0, "budget": 0.0, "wrong": 0}


@pytest.mark.parametrize("block_m", [8, 16])
@pytest.mark.parametrize(
    ("stored", "unpack"),
    [("as_q-none", "bytes"), ("e4m3-token", "bytes"), ("e4m3-token", "words"), ("int4-token", "words")],
)
def test_keys_are_read_where_pages_are(
    device: Device, memory: torch.Tensor, stored: str, unpack: str, block_m: int
) -> None:
    kind, scales = stored.split("-")
    fields: dict[str, Any] = {"op": "paged_attention", "batch": 1, "page_size": 8, "seq_k": 8 * PAGES, "head_dim": 64}
    p = problem(**SMALL | fields | {"kv_format": kind, "kv_scales": scales})
    loops = ["flat_masked"] if unpack == "bytes" else ["flat_masked", "by_page"]
    for page_loop in loops:
        call = random_call(p, device=device.name)
        pages, table = call.k.shape[0], call.page_table
        assert table is not None
        first = put_far(call, memory)
        assert first < 4, "pages are above 4 GiB"
        table[:] = torch.where((table >= 0) & (table < pages), table + first, table)
        assert_right(call, *run_core(device, call, {"unpack": unpack, "page_loop": page_loop},
                                     {"block_m": block_m, "block_n": 32}))  # fmt: skip
