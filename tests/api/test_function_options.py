"""Functions that say what a built-in option says become the option; all others stay functions."""

import functools
import math
import random
from typing import Any

import msgspec
import pytest
import torch
from support import Device
from torch.nn.attention import flex_attention as torchs

import portattn
from portattn.api import masks
from portattn.api.score_functions import cached_trace
from portattn.integrations.flex_attention import create_block_mask, flex_attention
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.reference.score_functions import evaluate
from portattn.schema.problem import Problem
from portattn.validate.score_options import as_softcap, as_window

OFFSET, ZERO = torch.tensor(0), 0
CAUSAL, PAST, BOTH, WINDOW = "q >= k", "8 >= q - k", "(q - k).abs() <= 5", "(q >= k) & (q - k < 8)"
# Masks of q_idx and kv_idx, and the window (left, right) that they are.
WINDOWS: dict[str, tuple[int, int] | None] = {
    CAUSAL: (-1, 0), "k <= q": (-1, 0), "~(k > q)": (-1, 0), "k - q < 1": (-1, 0), "q + ZERO >= k": (-1, 0),
    "q.long() >= k": (-1, 0), WINDOW: (7, 0), "(q - k <= 8) & (k - 3 <= q)": (8, 3), PAST: (8, -1), BOTH: (5, 5),
    "torch.logical_and(q == k, q > k - 9)": (0, 0), "torch.ones_like(q) == 1": (-1, -1), "q >= q": (-1, -1),
} | dict.fromkeys([
    "-8 < (k - q + 1).abs()", "q > k", "q >= k + 1", "(q >= k) | (k < 4)", "q + k >= k + k", "q + OFFSET >= k",
    "q >= k + h", "q.float() >= k", "q.to(torch.int8) >= k", "q != k", "q < q", "(q - k).abs() >= 5", "k < 9",
    "~((q - k).abs() < 5)", "q - k + 2**30 + 2**30 >= 0", "2 * q >= k", "(q >= k) ^ (q == k)", "q >= k - (2**31 - 1)",
])  # fmt: skip


def mask_of(source: str, score: str = "") -> Any:
    return eval(f"lambda {score} b, h, q, k: {source}", {"torch": torch, "OFFSET": OFFSET, "ZERO": ZERO})


def masks_alike(text: str, window: tuple[int, int]) -> bool:
    q, k = torch.arange(23, dtype=torch.int32)[:, None], torch.arange(29, dtype=torch.int32)
    left, right = (math.inf if side == -1 else side for side in window)
    return torch.equal(evaluate(text, {"q_idx": q, "kv_idx": k}, {}).expand(23, 29), (q - k <= left) & (k - q <= right))


@pytest.mark.parametrize("source", WINDOWS)
def test_windows_and_near_misses(source: str) -> None:
    window, (text, captured) = WINDOWS[source], cached_trace("attention", "mask_mod", mask_of(source))
    assert as_window(text) == window
    assert window is None or masks_alike(text, window)
    assert bool(captured) == ("OFFSET" in source)


def test_random_masks() -> None:
    draw, windows = random.Random(0), 0
    pairs, signs = ("q k", "k q", "q-k 0", "k-q 0", "(q-k).abs() 0", "-k -q", "q+k k"), ("<", "<=", ">", ">=", "==")
    for _ in range(400):
        source = ""
        for _ in range(draw.randint(1, 3)):
            (a, b), no = draw.choice(pairs).split(), draw.choice(["", "", "", "~"])
            source += draw.choice("&&&|") * bool(source)
            source += f" {no}({a} + {draw.choice([0, 1, -2])} {draw.choice(signs)} {b} + {draw.randint(-3, 9)})"
        text, _ = cached_trace("attention", "mask_mod", mask_of(source))
        window = as_window(text)
        windows += window not in (None, (-1, -1))
        assert window is None or masks_alike(text, window), source
    assert windows > 30


CAPS: dict[str, float | None] = {"50 * torch.tanh(s / 50)": 50.0, "(s / 2).tanh() * 2": 2.0} | dict.fromkeys([
    "50 * torch.tanh(s / 49)", "2 * (s / 2 / 2).tanh()", "(s / 2).tanh() * (s / 2).tanh()", "2 * torch.tanh(s / 2) + 1",
    "2 * torch.sin(s / 2)", "-2 * torch.tanh(s / -2)", "b * (s / b).tanh()", "2 * (s.half() / 2).tanh().float()",
])  # fmt: skip


@pytest.mark.parametrize("source", CAPS)
def test_caps_and_near_misses(source: str) -> None:
    assert as_softcap(cached_trace("attention", "score_mod", mask_of(source, "s,"))[0]) == CAPS[source]


def qkv(rows: int = 300, keys: int = 300) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(1, n, length, 32, generator=generator) for n, length in ((4, rows), (2, keys), (2, keys))]


def problem_of(*given: Any, op: str = "attention", **options: Any) -> Problem:
    getattr(portattn, op)(*given, **options)
    return portattn.last_plan().problem


def test_plans_are_the_options() -> None:
    """The same problem, so the same path, lowering and launch on every chip; the plan says so."""
    tensors, mods = qkv(), {"score_mod": mask_of("50 * torch.tanh(s / 50)", "s,"), "mask_mod": mask_of(WINDOW)}
    found, options = problem_of(*tensors, **mods), problem_of(*tensors, softcap=50.0, causal=True, window=(7, 0))
    note = "score_mod is softcap=50.0; mask_mod is causal='bottom_right' and window=(7, 0)"
    assert msgspec.structs.replace(found, function_note="") == options
    for target in (parse_target("cuda:sm_90", "triton==3.6.0"), parse_target("rocm:gfx942", "triton==3.6.0")):
        made, right = (plan(each, target) for each in (found, options))
        assert all(getattr(made, name) == getattr(right, name) for name in ("path", "lowering", "launch", "key"))
        assert note in made.notes
    assert note in str(portattn.explain("attention", *tensors, **mods))
    assert problem_of(*tensors, **mods, softcap=3.0).score_mod


SHORT, EMPTY = ({"seqlens_k": torch.tensor([length], dtype=torch.int32)} for length in (280, 2))
# Operation, queries, options beside the mask, and words of the problem; "" where the mask stays a function.
PLACES: list[tuple[str, int, dict[str, Any], str, str]] = [
    ("attention", 300, {}, CAUSAL, "causal bottom-right"), ("attention", 200, {}, WINDOW, "top-left window (7,0)"),
    ("attention", 300, {}, BOTH, "window (5,5)"), ("attention", 200, {}, BOTH, ""), ("attention", 9, {}, "q >= q", " "),
    ("attention", 300, SHORT, CAUSAL, "causal top-left"), ("attention", 300, SHORT, PAST, ""),
    ("attention", 300, {"window": (3, 3)}, CAUSAL, ""), ("attention", 300, {"causal": True}, PAST, ""),
    ("attention", 300, {"alibi_slopes": torch.ones(4)}, CAUSAL, ""), ("attention", 300, {"chunk": 64}, CAUSAL, ""),
    ("decode_attention", 3, SHORT, BOTH, "window (5,5)"), ("decode_attention", 3, EMPTY, WINDOW, "window (7,0)"),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]} {place[1]} {list(place[2])} {place[3]}")
def test_an_option_is_aligned_as_its_function(place: Any) -> None:
    op, rows, options, source, words = place
    call = functools.partial(getattr(portattn, op), *qkv(rows), **options, return_lse=True)
    found, problem = call(mask_mod=mask_of(source)), portattn.last_plan().problem
    assert bool(problem.mask_mod) == (not words)
    assert not words or (words in str(problem) and not problem.block_mask)
    expected = call(mask_mod=mask_of(f"({source}) & ((k >= 0) | (q < 0))"))  # an or: no window
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_lists_of_create_block_mask_add_nothing() -> None:
    run = functools.partial(flex_attention, *qkv(), enable_gqa=True)
    for source, listed in (("(q >= k) | (k < 4)", True), (WINDOW, False)):
        given: Any = (mask_of(source), None, None, 300, 300, "cpu")
        mask, right = create_block_mask(*given), run(block_mask=torchs.create_block_mask(*given))
        assert portattn.last_plan().problem.block_mask, "torch's lists may be anything"
        torch.testing.assert_close(run(block_mask=mask), right)
        assert portattn.last_plan().problem.block_mask == listed
    own, mask.mask_mod = mask.mask_mod, lambda b, h, q, k: own(b, h, q, k) & (torch.special.bessel_j0(q) < 2)
    masks._warn_once.cache_clear()
    with pytest.warns(match="cannot be traced"):
        torch.testing.assert_close(run(block_mask=mask), right)
    mask.mask_mod = own
    mask.kv_num_blocks[:] = 0  # the whole blocks are left
    assert not torch.allclose(run(block_mask=mask), right)


def test_invariance_and_packed_rows_ask_no_sizes() -> None:
    tensors = qkv()
    with portattn.settings(invariant=True):
        assert problem_of(*tensors, mask_mod=mask_of(CAUSAL)).causal == "top_left"
        for op, given in (("attention", {}), ("decode_attention", SHORT)):  # the same bits of a row
            assert problem_of(*tensors, mask_mod=mask_of(BOTH), op=op, **given).mask_mod
            assert problem_of(*tensors, causal=True, chunk=512, op=op, **given).chunk == 512  # whatever else is longer
            assert problem_of(*tensors, window=(700, 700), mask_mod=mask_of(CAUSAL), op=op, **given).mask_mod
    rows, packed = torch.tensor([0, 100, 300], dtype=torch.int32), [tensor[0].transpose(0, 1) for tensor in tensors]
    assert problem_of(*packed, rows, rows, 200, 200, mask_mod=mask_of(WINDOW), op="varlen_attention").window


@pytest.mark.interpreter
def test_a_cached_call_of_other_sizes_is_no_window(device: Device, kept: str) -> None:
    for rows in (40, 40, 24, 40):
        tensors = [tensor.to(kept) for tensor in qkv(rows=rows, keys=40)]
        found = [portattn.attention(*tensors, mask_mod=mask_of(BOTH), backend=path) for path in (None, "reference")]
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
