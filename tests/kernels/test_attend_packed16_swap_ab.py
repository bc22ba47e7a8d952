"""Words for at most 8 query rows: keys are the rows of matrix products (kernels/attend_packed16_swap_ab.py)."""

from typing import Any

import pytest
import torch
from support import Device, problem, random_call
from test_quantised_accuracy import INPUTS
from test_quantised_caches import IN_WORDS, SMALL
from test_quantised_words import check_bytes_of_int4, check_exact_words, check_words, narrow, unpackings, without_pages

FEW = {"block_m": 8, "block_n": 32}
PAGES: dict[str, Any] = {"op": "paged_attention", "seq_k": 96, "head_dim": 64, "page_size": 8}
CASES: dict[str, dict[str, Any]] = {
    "decode": {"op": "decode_attention", "seq_k": 80, "seqlens_k": True, "leftpad_k": True, "causal": "bottom_right",
               "head_dim": 64, "head_dim_v": 128},
    "sinks": {"op": "decode_attention", "seq_k": 70, "seqlens_k": True, "sinks": True, "head_dim": 64, "dtype": "fp16"},
    "two row tiles": {"op": "decode_attention", "seq_k": 66, "seqlens_k": True, "seq_q": 5, "causal": "bottom_right",
                      "heads_q": 8, "head_dim": 64},
    "pages": PAGES | {"causal": "bottom_right"},
    "packed pages": PAGES | {"total_q": 7, "causal": "bottom_right", "dtype": "fp16"},
    "rows longer than wide": PAGES | {"page_size": 16, "aligned": False},
}  # fmt: skip


# Each case with three formats and kinds of scales; int4 with both of its kinds everywhere.
SOME = [(case, *stored) for i, case in enumerate(CASES) for j, stored in enumerate(IN_WORDS)
        if (i + j) % 4 == 0 or stored[0] == "int4"]  # fmt: skip


@pytest.mark.parametrize(("case", "kind", "scales"), SOME)
def test_few_rows_are_right(device: Device, case: str, kind: str, scales: str) -> None:
    """NaN, or a scale that is none, is wherever a token is not attended."""
    p = problem(**SMALL | {"kv_format": kind, "kv_scales": scales} | CASES[case])
    call = without_pages(random_call(p, seed=5, strides="" if p.aligned else "spare", device=device.name))
    loops = ["flat_masked"] if not p.page_size else ["by_page"] if kind == "int4" else ["flat_masked", "by_page"]
    for page_loop in loops:
        for splits in (1, 2) if case == "sinks" else (2,):
            check_words(device, call, {"page_loop": page_loop}, **FEW | {"splits": splits})


LEFT = [{"window_left": 9}, {"mask": True}, {"softcap": True}, {"kv_format": "nvfp4"}, {"head_dim": 40}]


@pytest.mark.parametrize("fields", LEFT, ids=str)
def test_what_few_rows_leave_to_words(device: Device, fields: dict[str, Any]) -> None:
    base = {"op": "decode_attention", "seq_k": 50, "seqlens_k": True, "head_dim": 64}
    scales = "head" if "kv_format" in fields else "token"
    call = random_call(
        problem(**SMALL | base | {"kv_format": "int4", "kv_scales": scales} | fields), device=device.name
    )
    check_words(device, call, **FEW)


@pytest.mark.parametrize(
    ("kind", "dtype", "scales"), [("e4m3", "bf16", "head"), ("int8", "fp16", "token"), ("int4", "bf16", "token")]
)
@pytest.mark.parametrize("what", INPUTS)
def test_nothing_is_lost_beside_the_results_rounding(device, what, kind, dtype, scales, monkeypatch):
    check_exact_words(device, narrow(what, kind, dtype, scales, device.name), monkeypatch, block_m=8)


@pytest.mark.parametrize("scales", ["head", "token"])
def test_every_byte_of_int4_is_read_exactly(device: Device, scales: str) -> None:
    check_bytes_of_int4(device, scales, "bf16", unpackings(device), FEW)


@pytest.mark.parametrize("block_m", [8, 16])
def test_a_query_of_zeros_attends_all_keys_alike(device: Device, block_m: int) -> None:
    fields = {"op": "decode_attention", "seq_k": 70, "head_dim": 64, "kv_format": "int4", "kv_scales": "token"}
    call = random_call(problem(**SMALL | fields), device=device.name)
    call.q = torch.zeros_like(call.q)
    check_words(device, call, **FEW | {"block_m": block_m})
