"""decode_split and decode_combine against the float64 oracle, and decode against prefill."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from support import Device, assert_right, problem, random_call, run_core

CAUSAL = ("none", "bottom_right", "top_left")
SMALL = {"op": "decode_attention", "heads_q": 4, "heads_k": 2, "seq_q": 1, "seq_k": 50}
FEATURES = {
    "full": {},
    "no_lse": {"return_lse": False},
    "mha": {"heads_k": 4},
    "mqa_three_sequences": {"heads_k": 1, "batch": 3, "seqlens_k": True},
    "lengths": {"seqlens_k": True},
    "leftpad": {"leftpad_k": True},
    "lengths_leftpad_bshd": {"seqlens_k": True, "leftpad_k": True, "layout": "bshd"},
}


def decode(**fields):
    return problem(**(SMALL | fields))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features_are_right(device: Device, splits: int, features: dict) -> None:
    call = random_call(decode(**features), seed=1, device=device.name)
    assert_right(call, *run_core(device, call, launch={"splits": splits}))


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("seq_q", [2, 5])
def test_several_queries(device: Device, causal: str, splits: int, seq_q: int) -> None:
    p = decode(causal=causal, seq_q=seq_q, seqlens_k=True, leftpad_k=True)
    call = random_call(p, seed=2, device=device.name)
    assert_right(call, *run_core(device, call, launch={"splits": splits}))


@pytest.mark.parametrize("splits", [2, 3, 4, 7, 20])
def test_splits_agree_with_one(device: Device, splits: int) -> None:
    """More splits than key tiles (four) leave some programs with nothing: their share counts for nothing."""
    call = random_call(decode(seq_q=2, causal="bottom_right", leftpad_k=True), seed=4, device=device.name)
    out, lse = run_core(device, call, launch={"splits": 1})
    out_split, lse_split = run_core(device, call, launch={"splits": splits})
    torch.testing.assert_close(out_split, out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse_split, lse, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("seq_k", [31, 32, 33, 34])
@pytest.mark.parametrize("seq_q", [2, 3])
def test_the_first_causal_row_ends_around_a_tiles_end(device: Device, seq_q: int, seq_k: int) -> None:
    """What is read unmasked must end with the first row's last key."""
    call = random_call(decode(causal="bottom_right", seq_q=seq_q, seq_k=seq_k, batch=1), device=device.name)
    for splits in (1, 2):
        assert_right(call, *run_core(device, call, launch={"splits": splits}))


def test_one_sequence_is_empty(device: Device) -> None:
    call = random_call(decode(seqlens_k=True), device=device.name)
    call.seqlens_k = torch.tensor([0, 33], dtype=torch.int32, device=device.name)
    call.k, call.v = call.k.nan_to_num(0.5), call.v.nan_to_num(0.5)
    for splits in (1, 3):
        out, lse = run_core(device, call, launch={"splits": splits})
        assert_right(call, out, lse)
        assert not out[0].any()
        assert torch.isneginf(lse[0]).all()


def test_fewer_keys_than_causal_queries(device: Device) -> None:
    """Two keys and five bottom-right queries: the first three see nothing."""
    call = random_call(decode(seq_q=5, seqlens_k=True, causal="bottom_right"), device=device.name)
    call.seqlens_k = torch.tensor([2, 50], dtype=torch.int32, device=device.name)
    call.k, call.v = call.k.nan_to_num(0.5), call.v.nan_to_num(0.5)
    for splits in (1, 2):
        out, lse = run_core(device, call, launch={"splits": splits})
        assert_right(call, out, lse)
        assert not out[0, :, :3].any()
        assert torch.isfinite(lse[0, :, 3:]).all()


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seq_q": 0}, {"seq_k": 0}, {"seq_k": 1}, {"seq_k": 16}], ids=str)
def test_empty_and_smallest_sizes(device: Device, sizes: dict) -> None:
    call = random_call(decode(**sizes), device=device.name)
    for splits in (1, 2):
        assert_right(call, *run_core(device, call, launch={"splits": splits}))


def test_more_packed_rows_than_a_tile(device: Device) -> None:
    call = random_call(decode(heads_q=12, heads_k=2, seq_q=5, causal="bottom_right"), device=device.name)
    assert_right(call, *run_core(device, call, launch={"block_m": 16, "splits": 2}))


@pytest.mark.parametrize("splits", [1, 3])
def test_decode_equals_the_last_rows_of_prefill(device: Device, splits: int) -> None:
    dense = problem(heads_q=4, heads_k=2, seq_q=37, seq_k=37, causal="bottom_right")
    prefill = random_call(dense, seed=6, device=device.name)
    out, lse = run_core(device, prefill)
    for rows in (1, 3):
        fields = {"op": "decode_attention", "seq_q": rows}
        call = replace(prefill, problem=msgspec.structs.replace(dense, **fields), q=prefill.q[:, :, -rows:])
        out_decode, lse_decode = run_core(device, call, launch={"splits": splits})
        torch.testing.assert_close(out_decode, out[:, :, -rows:], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse_decode, lse[:, :, -rows:], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_random_problems(device: Device, seed: int) -> None:
    generator = torch.Generator().manual_seed(2000 + seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    heads_k = pick(1, 2, 3)
    p = decode(
        batch=pick(1, 2, 3), heads_k=heads_k, heads_q=heads_k * pick(1, 3, 8), seq_q=pick(1, 1, 2, 7),
        seq_k=pick(*range(1, 70)), head_dim=pick(16, 24, 33), head_dim_v=pick(16, 40), causal=pick(*CAUSAL),
        dtype=pick("fp32", "fp16", "bf16"), seqlens_k=pick(True, False), leftpad_k=pick(True, False),
        layout=pick("bhsd", "bshd"),
    )  # fmt: skip
    call = random_call(p, seed, device=device.name, scale=pick(None, -0.3, 0.8), strides=pick("plain", "spare"))
    assert_right(call, *run_core(device, call, launch={"splits": pick(1, 2, 3, 5), "block_n": pick(16, 32)}))
