"""Lengths, page ids, beginnings, counts and tokens of any int32 value: clamped, and nothing outside is touched. Under
the interpreter every address of every load and store is checked against the tensors of the launch, and no int32 may
overflow on the way to it."""

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from kernel_cases import CAUSAL, OPS, SPLITTING, check, page_loops, problem, run, with_lengths
from opcalls import int32, watched
from support import TILE, assert_right, core_plan, overflow_raises, poisoned, random_call

from portattn.api import dispatch
from portattn.launch import kernel_calls
from portattn.planning.kernel_specs import CORES
from portattn.reference import blockwise
from portattn.schema.lowering import CHOICES, Launch, Lowering

LOWEST, HIGHEST = -(2**31), 2**31 - 1
WILD = (LOWEST, HIGHEST, -1, -7, 1000, 2**30, 23, 40)
# What a sequence has of its own. Beginnings of packed sequences are not: where one begins says where another ends.
OWN = ("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k", "page_table", "indices", "counts")


def run_watched(monkeypatch, device, call, parts=1, **lowering):
    plan = core_plan(device, call.problem, {"page_loop": page_loops(call.problem)[0]} | lowering, {"splits": parts})
    with watched(monkeypatch) as kernels, overflow_raises(), poisoned():
        launches, out, lse = kernel_calls(plan, call, cores=3)
        dispatch.launch_all(launches, plan, call.q)
    assert kernels
    assert lse is not None
    return out, lse


def wild(call, bad, seed):
    """The call with wild values in what sequence number `bad` has of its own, and among them some that are not."""
    chosen = random.Random(seed)
    changes = {}
    for name in OWN:
        tensor = getattr(call, name)
        if tensor is not None:
            changes[name] = tensor.clone()
            row = [chosen.choice([*WILD, *range(5)]) for _ in range(tensor[bad].numel())]
            changes[name][bad] = torch.tensor(row, dtype=torch.int32).view(tensor[bad].shape)
    return replace(call, **changes)


def rows_of(call, result, b):
    if call.cu_seqlens_q is None:
        return [x[b] for x in result]
    first, end = call.cu_seqlens_q[b : b + 2].tolist()
    return [x[0, :, first:end] for x in result]


LOADS = [
    (name, load, features) for name in OPS if name != "varlen" for load in ("pointer", "block_ptr", "descriptor")
    if load == "pointer" or name in ("dense", "padded", "decode", "whole pages") for features in ("plain", "more")
    if load == "pointer" or features == "plain"
]  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "sparse": {"magicpig": True, "alibi_slopes": True}, "sparse paged": {"log_weights": True, "alibi_slopes": True},
    "ragged": {"causal": "bottom_right", "window_left": 5, "alibi_slopes": True},
    "mla ragged": {"causal": "top_left", "window_left": 5, "alibi_slopes": True},
}  # fmt: skip
SCORED = {"window_left": 5, "window_right": 3, "alibi_slopes": True, "bias": True, "mask": True}


@pytest.mark.interpreter
@pytest.mark.parametrize(("name", "load", "features"), LOADS)
def test_garbage_stays_with_its_sequence(monkeypatch, device, name, load, features):
    heads = {"heads_q": 1, "heads_k": 1} if name in ("dense", "padded") else {"heads_q": 2, "heads_k": 1}
    fields = (MORE.get(name, SCORED) if features == "more" else {}) | {"batch": 3} | heads
    if load == "descriptor" and name == "whole pages":
        fields |= {"page_layout": "phd", "pages_in_line": True}
    parts = 2 if name in SPLITTING else 1
    call = random_call(problem(name, **fields), 3, device=device.name)
    clean = run(device, call, parts, load=load)
    assert_right(call, *clean)
    for seed in range(2):
        beside = run_watched(monkeypatch, device, wild(call, 1, seed), parts, load=load)
        for b in (0, 2):
            torch.testing.assert_close(rows_of(call, beside, b), rows_of(call, clean, b), rtol=0, atol=0)


BEGINNINGS = {
    "falling": [0, 20, 0, 22], "beyond the rows": [0, HIGHEST, 5, 22], "not from 0 on": [13, 15, 18, 20],
    "highest": [HIGHEST] * 4, "lowest": [LOWEST] * 4, "first one highest": [HIGHEST, 3, LOWEST, 7],
    "backwards": [22, 17, 9, 0], "all at the end": [0, 22, 22, 1],
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["varlen", "ragged", "mla ragged"])
@pytest.mark.parametrize("case", BEGINNINGS)
def test_packed_sequences_that_begin_anywhere(monkeypatch, device, name, case):
    fields = {"heads_q": 1 if name == "varlen" else 3, "total_q": 22, "causal": "bottom_right", "alibi_slopes": True}
    call = random_call(problem(name, **fields, sinks=True), 4, device=device.name)
    for tensor in ("q", "k", "v", "q_rope"):
        if getattr(call, tensor) is not None:
            getattr(call, tensor).nan_to_num_(0.5)
    call.cu_seqlens_q = int32(device, *BEGINNINGS[case])
    if call.cu_seqlens_k is not None:
        call.cu_seqlens_k = int32(device, *reversed(BEGINNINGS[case]))
    out, lse = run_watched(monkeypatch, device, call)
    assert torch.isfinite(out).all()
    assert not torch.isnan(lse).any()


# leftpad, seqlens -> what they mean in a storage of 37 rows
EXTREMES = {
    "longest after padding": ((5, 5), (HIGHEST, HIGHEST), (5, 5), (32, 32)),
    "negative length": ((5, 0), (LOWEST, LOWEST), (5, 0), (0, 0)),
    "negative padding": ((LOWEST, LOWEST), (HIGHEST, 20), (0, 0), (37, 20)),
    "padding beyond the storage": ((HIGHEST, HIGHEST), (HIGHEST, 3), (37, 37), (0, 0)),
    "one of each": ((LOWEST, HIGHEST), (LOWEST, LOWEST), (0, 37), (0, 0)),
}


def assert_clamped(device, path, p, case, side, parts=1):
    # Without a mask nothing is poisoned: what the other lengths hide is not what these do.
    plain = msgspec.structs.replace(p, causal="none", **{f"seqlens_{side}": False, f"leftpad_{side}": False})
    clean = random_call(plain, 8, device=device.name)
    pad, length, clamped_pad, clamped_length = (int32(device, *values) for values in EXTREMES[case])
    names = f"leftpad_{side}", f"seqlens_{side}"
    given = replace(clean, problem=p, **dict(zip(names, (pad, length), strict=True)))
    meant = replace(clean, problem=p, **dict(zip(names, (clamped_pad, clamped_length), strict=True)))
    if path == "core":
        assert_right(meant, *run(device, given, parts))
        return
    with poisoned(), torch.no_grad():
        assert_right(meant, *blockwise.run(given))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["ragged", "mla ragged"])
def test_lengths_of_packed_queries_end_at_the_capacity(monkeypatch, device, name):
    """Beyond what a sequence's table has room for there is no page: longer ones end there, negative ones are empty."""
    p = problem(name, causal="bottom_right", seqlens_k=True)
    call = random_call(p, 9, device=device.name, extremes=True)
    for cache in ("k", "v"):
        if getattr(call, cache) is not None:
            pages = getattr(call, cache)
            setattr(call, cache, pages.nan_to_num(0.5).repeat(3, *[1] * (pages.ndim - 1)))
    meant = with_lengths(call, (p.seq_k, p.seq_k, 0), (1, 18, 3))
    given = replace(meant, seqlens_k=int32(device, 1000, HIGHEST, LOWEST))
    assert_right(meant, *run_watched(monkeypatch, device, given))


@pytest.mark.parametrize("path", ["core", "reference"])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("case", EXTREMES)
def test_keys_of_any_length_mean_the_clamped_one(device, path, causal, case):
    dense = problem("dense", seq_q=18, causal=causal, seqlens_k=True, leftpad_k=True)
    assert_clamped(device, path, dense, case, "k")
    assert_clamped(device, path, problem("decode", causal=causal), case, "k", parts=3)


@pytest.mark.parametrize("path", ["core", "reference"])
@pytest.mark.parametrize("case", EXTREMES)
def test_queries_of_any_length_mean_the_clamped_one(device, path, case):
    p = problem("dense", seq_q=37, causal="bottom_right", seqlens_q=True, leftpad_q=True)
    assert_clamped(device, path, p, case, "q")


NAN, INF = float("nan"), float("inf")
# Name -> fields, and a seed at which a bias or mask is of each row and hides keys from all, or is the same for all.
FEATURES: dict[str, tuple[dict[str, Any], int]] = {
    "lengths": ({}, 4), "causal": ({"causal": "bottom_right"}, 4), "top-left": ({"causal": "top_left"}, 4),
    "window": ({"window_left": 3, "window_right": 2}, 4),
    "causal window": ({"causal": "bottom_right", "window_left": 3}, 4), "bias": ({"bias": True}, 5),
    "bias by key": ({"bias": True}, 2), "mask": ({"mask": True}, 4), "mask by key": ({"mask": True}, 1),
    "causal bias": ({"causal": "top_left", "bias": True}, 5), "weights": ({"log_weights": True}, 4),
    "magicpig": ({"magicpig": True}, 4),
}  # fmt: skip
PACKED = ("varlen", "ragged", "mla ragged")


def features_of(name):
    if "sparse" in name:
        return ["lengths", "weights", "magicpig"]
    given = [f for f in FEATURES if f not in ("weights", "magicpig")]
    return [f for f in given if not FEATURES[f][0].keys() & {"bias", "mask"}] if name in PACKED else given


def lowerings_of(name):
    """Every value but the default of every choice that the op's kernel reads, each alone."""
    default = Lowering()
    return [
        {choice: value} for choice in CORES[problem(name).op].choices if choice != "dot_precision"
        for value in CHOICES[choice] if value != getattr(default, choice)
    ]  # fmt: skip


def limits(p, lowering):
    launch = Launch(block_m=TILE, block_n=TILE)
    return {choice: value for choice, value, _ in CORES[p.op].limits(p, Lowering(**lowering), launch)}


def suited(name, lowering):
    if lowering.get("pipeline") == "single":
        return {"seq_k": 13, "total_k": None if problem(name).total_k is None else 30}
    if lowering.get("load") == "descriptor" and problem(name).page_size:
        return {"page_layout": "phd", "pages_in_line": True, "page_size": 16, "seq_k": 48}
    return {}


CASES = [(name, feature) for name in OPS for feature in features_of(name)]
# The features under which rows that are not real would see what no other row does.
SHARP = {True: ("window", "top-left"), False: ("bias", "bias by key", "causal window")}
LOWERED = [
    (name, feature, lowering) for name in OPS for lowering in lowerings_of(name)
    for feature in (("lengths",) if "sparse" in name else SHARP[name in PACKED])
    if not limits(problem(name, **suited(name, lowering)), lowering).keys() & lowering.keys()
]  # fmt: skip


def poisoned_call(device, p, seed, poison, value):
    """A call with `value` in the values (v) that nothing attends, or in such keys (k) and in the queries of padding."""
    call = random_call(p, seed, device=device.name, extremes=True, poison=poison)  # type: ignore[arg-type]
    for name in ("q", "q_rope", "k", "v"):
        if value == INF and getattr(call, name) is not None and (name != "v" or p.op != "mla_attention"):
            getattr(call, name).nan_to_num_(nan=INF)
    return call


@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize(("name", "feature"), CASES)
def test_poison_stays_where_no_row_attends(device, name, feature, poison):
    fields, seed = FEATURES[feature]
    call = poisoned_call(device, problem(name, **fields), seed, poison, NAN)
    # MagicPIG's correction is the logarithm of a probability that may be near 1: some digits of a float32 are lost.
    extra = 1e-6 if feature == "magicpig" else 0.0
    check(device, call, splits=2 if name in SPLITTING and feature != "lengths" else 1, extra=extra)


@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize("name", OPS)
def test_infinity_stays_where_no_row_attends(device, name, poison):
    fields, seed = FEATURES["weights" if "sparse" in name else "causal window" if name in PACKED else "bias"]
    check(device, poisoned_call(device, problem(name, **fields), seed, poison, INF))


@pytest.mark.parametrize(("name", "feature", "lowering"), LOWERED, ids=str)
def test_poison_stays_under_every_lowering(device, name, feature, lowering):
    fields, seed = FEATURES[feature]
    p = problem(name, **(fields | suited(name, lowering)))
    if lowering.get("reads") == "inside" and device.path != "interpreter":
        pytest.skip("tiles as wide as a head of no power of two: for compilers that take them, which are Ascend's")
    check(device, poisoned_call(device, p, seed, "v", NAN), **(lowering | limits(p, lowering)))


def test_a_filler_row_gives_no_weight_to_a_masked_value(device):
    """One query of two heads in a tile of 16 rows; the last key is masked for both, and its value is NaN."""
    p = problem("decode", batch=1, heads_q=2, heads_k=1, seq_q=1, seq_k=4, seqlens_k=False, leftpad_k=False, bias=True)
    call = random_call(p, 2, device=device.name)
    for name in ("q", "k", "v"):
        getattr(call, name).fill_(1.0)
    call.bias = torch.tensor([0.0, 0.0, 0.0, -INF], device=device.name).expand(1, 2, 1, 4)
    call.v[:, :, 3] = NAN
    out, lse = run(device, call)
    assert torch.equal(out, torch.ones_like(out))
    assert_right(call, out, lse)


@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize("mask_value", CHOICES["mask_value"])
@pytest.mark.parametrize("name", ["dense", "padded", "decode", "paged", "mla"])
def test_a_bias_can_hold_anything_where_nothing_is_attended(device, name, mask_value, poison):
    """NaN where the mask is False, behind the lengths, and in all of the rows of padding."""
    from portattn.testing.oracle import allowed_keys

    call = poisoned_call(device, problem(name, bias=True, mask=True, causal="bottom_right"), 4, poison, NAN)
    shown = allowed_keys(call)[:, None].to(device.name) & call.mask
    call.bias = call.bias.masked_fill(~shown, NAN)
    assert bool(call.bias.isnan().any())
    check(device, call, mask_value=mask_value)
