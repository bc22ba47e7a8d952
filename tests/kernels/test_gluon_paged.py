"""The scheduled forward of sm_90 over caches, on such a chip: its numbers, whatever unused pages and entries hold."""

import dataclasses
import itertools
from typing import Any

import msgspec
import pytest
import torch
from kernel_cases import with_lengths
from support import Device, random_call
from variantchip import assert_variant_right, device_for

from portattn import Problem
from portattn.backends.cuda.hopper_forward import variant
from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.launch.run import run_variant

VARIANT = ForwardVariant()
BASE = Problem(
    op="paged_attention", batch=3, heads_q=8, heads_k=2, seq_q=200, seq_k=768, head_dim=128, dtype="bf16",
    page_size=64, seqlens_k=True, return_lse=True,
)  # fmt: skip
PACKED = msgspec.structs.replace(BASE, batch=5, total_q=450)
CONTIGUOUS = msgspec.structs.replace(BASE, op="decode_attention", page_size=0, seq_k=701)
PAGES = {16: 672, 48: 672, 64: 704, 256: 1024}  # and the capacity of each
CAUSAL = ("none", "bottom_right", "top_left")
FEATURES: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": True}, "softcap": {"softcap": True}, "window": {"window_left": 70},
    "window on both sides": {"window_left": 70, "window_right": 9},
    "everything": {"sinks": True, "softcap": True, "window_left": 33}, "no lse": {"return_lse": False},
    "fp16": {"dtype": "fp16"}, "e4m3": {"kv_format": "e4m3", "kv_scales": "head"},
    "e5m2": {"kv_format": "e5m2", "sinks": True}, "e4m3, fp16": {"kv_format": "e4m3", "dtype": "fp16"},
    "e4m3, everything": {"kv_format": "e4m3", "kv_scales": "head", "softcap": True, "window_left": 33},
    "bshd": {"layout": "bshd"}, "heads first": {"page_layout": "hpd"}, "tree": {"tree_mask": True, "seq_q": 60},
    "tree, e4m3": {"tree_mask": True, "seq_q": 17, "kv_format": "e4m3", "sinks": True},
    "tree, whole": {"tree_mask": True, "seq_q": 33, "seqlens_k": False},
}  # fmt: skip
HEADS = ((4, 4), (10, 2), (12, 2), (64, 2), (64, 1))


def problem(base: Problem = BASE, **fields: Any) -> Problem:
    return msgspec.structs.replace(base, **fields)


@pytest.fixture
def chip(device: Device) -> Device:
    return device_for(VARIANT, BASE, device)


def assert_right(p: Problem, chip: Device, seed: int = 0) -> None:
    """Unused pages, tails of pages and padding rows hold NaN; unused entries of the table pages that do not exist."""
    assert_variant_right(VARIANT, random_call(p, seed, device=chip.name, extremes=True))


@pytest.mark.parametrize("base", [BASE, PACKED], ids=["batch", "packed"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("page", PAGES)
def test_pages_of_any_size(chip: Device, page: int, causal: str, head_dim: int, base: Problem) -> None:
    p = problem(base, page_size=page, seq_k=PAGES[page], causal=causal, head_dim=head_dim, head_dim_v=head_dim)
    for seed in range(2):
        assert_right(p, chip, seed)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page", PAGES)
def test_quantised_pages_of_any_size(chip: Device, page: int, head_dim: int) -> None:
    fields = {"head_dim": head_dim, "head_dim_v": head_dim, "kv_format": "e4m3", "kv_scales": "head"}
    for base, causal in itertools.product((BASE, PACKED), CAUSAL[:2]):
        assert_right(problem(base, page_size=page, seq_k=PAGES[page], causal=causal, **fields), chip)


@pytest.mark.parametrize("splits", [0, 1, 7])
@pytest.mark.parametrize("base", [BASE, PACKED, CONTIGUOUS], ids=["batch", "packed", "contiguous"])
@pytest.mark.parametrize("name", FEATURES)
def test_features(chip: Device, name: str, base: Problem, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many key splits as the variant chooses (0), without any, and with more than some sequences have tiles."""
    if splits:
        monkeypatch.setattr(variant, "split_count", lambda *_: splits)
    fields = FEATURES[name]
    if set(fields) & ({"page_layout"} if base is CONTIGUOUS else {"seqlens_k", *["layout"] * (base is PACKED)}):
        pytest.skip("packed queries have one layout, pages lengths, and a contiguous cache no pages")
    if base is PACKED and "tree_mask" in fields:
        fields = fields | {"total_q": 3 * fields["seq_q"]}
    for causal in CAUSAL[:1] if "window_right" in fields else CAUSAL:
        assert_right(problem(base, **fields, causal=causal), chip, 3)


@pytest.mark.parametrize("base", [BASE, PACKED], ids=["batch", "packed"])
@pytest.mark.parametrize(("heads_q", "heads_k"), HEADS)
def test_any_number_of_heads_that_share_keys(chip: Device, heads_q: int, heads_k: int, base: Problem) -> None:
    assert_right(problem(base, heads_q=heads_q, heads_k=heads_k, causal="bottom_right", sinks=True), chip, 5)


@pytest.mark.parametrize("head_dim", [40, 72, 200])
def test_heads_between_the_kernel_s_widths(chip: Device, head_dim: int) -> None:
    for page in (16, 256):
        fields = {"head_dim": head_dim, "head_dim_v": head_dim, "page_size": page, "seq_k": 1024}
        assert_right(problem(PACKED, **fields, causal="bottom_right"), chip, 6)


QUERIES, KEYS = (1, 1, 0, 300, 100, 1), (1000, 64, 40, 900, 5, 129)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", CAUSAL)
def test_decoding_sequences_beside_chunks(chip: Device, causal: str, head_dim: int) -> None:
    fields = {"batch": 6, "total_q": 406, "seq_q": 300, "seq_k": 1024, "head_dim": head_dim, "head_dim_v": head_dim}
    call = random_call(problem(PACKED, **fields, causal=causal), 7, device=chip.name)
    shape = (64, 2, 64, head_dim)
    call = dataclasses.replace(call, k=call.k.new_ones(shape).normal_(), v=call.v.new_ones(shape).normal_())
    assert_variant_right(VARIANT, with_lengths(call, KEYS, QUERIES))


LOWEST, HIGHEST = -(2**31), 2**31 - 1


@pytest.mark.parametrize("kind", ["as_q", "e4m3"])
def test_wild_lengths_and_pages_touch_nothing_outside(chip: Device, kind: str) -> None:
    """They are clamped, and pages that do not exist read as zeros; other sequences are right."""
    call = random_call(problem(batch=5, causal="bottom_right", kv_format=kind), 3, device=chip.name)
    exact = run_variant(VARIANT, call)[1]
    lengths, table = call.seqlens_k.clone(), call.page_table.clone()
    lengths[1::2] = torch.tensor([LOWEST, HIGHEST], dtype=torch.int32, device=chip.name)
    table[1::2] = torch.tensor([[LOWEST], [HIGHEST]], dtype=torch.int32, device=chip.name)
    out = run_variant(VARIANT, dataclasses.replace(call, seqlens_k=lengths, page_table=table))[1]
    torch.cuda.synchronize()
    assert torch.equal(out[::2], exact[::2])
    assert bool((out[1] == 0).all())  # no keys


def test_a_table_whose_rows_are_far_apart(chip: Device) -> None:
    call = random_call(PACKED, 4, device=chip.name)
    exact = run_variant(VARIANT, call)[1]
    wide = torch.full((PACKED.batch, call.page_table.shape[1] + 7), HIGHEST, dtype=torch.int32, device=chip.name)
    wide[:, : call.page_table.shape[1]] = call.page_table
    spread = dataclasses.replace(call, page_table=wide[:, : call.page_table.shape[1]])
    assert torch.equal(run_variant(VARIANT, spread)[1], exact)
