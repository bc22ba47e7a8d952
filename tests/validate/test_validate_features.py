"""Windows, caps, slopes, sinks, biases, masks and splits: what is refused, and what the Problem makes of the rest."""

from typing import Any

import numpy as np
import pytest
import torch
from good_calls import BIASED, LAID_OUT, NAN, OPS, SCORES, SPLIT, WINDOWED, assert_refused, good, perform
from torch import zeros

import portattn

EVEN, ROWS = torch.zeros(8)[::2], torch.zeros(2, 8)[:, ::2]  # rows and columns two elements apart
WINDOW = "must be a tuple (left, right), keys before and after the query's own"
SIDE = "must be an integer ≥ 0, or None or -1 for no limit"
CHUNK = "must be an integer ≥ 1, the keys of a chunk, or None for no chunks"
CAP = "must be at least 1.175e-38, float32's smallest normal number, or None or 0 for none"
SLOPES = "must be (heads_q,) or (batch, heads_q), (4,) or (2, 4)"

BAD: list[tuple[tuple[str, ...], dict[str, Any], str, str]] =[
    (WINDOWED, {"causal": "lower_right"}, "causal is 'lower_right'", "or 'top_left'"),
    (WINDOWED, {"causal": 2}, "causal is 2", "must be True (bottom_right), False"),
    (WINDOWED, {"causal": None}, "causal is None", "must be True (bottom_right), False"),
    (WINDOWED, {"causal": 1.0}, "causal is 1.0", "must be True (bottom_right), False"),
    (WINDOWED, {"window": 4}, "window is 4", WINDOW), (WINDOWED, {"window": [3, 0]}, "window is [3, 0]", WINDOW),
    (WINDOWED, {"window": (1, 2, 3)}, "window is (1, 2, 3)", WINDOW),
    (WINDOWED, {"window": (1,)}, "window is (1,)", WINDOW),
    (WINDOWED, {"window": (-2, 0)}, "window's left is -2", SIDE),
    (WINDOWED, {"window": (0, -3)}, "window's right is -3", SIDE),
    (WINDOWED, {"window": (3.0, 0)}, "window's left is 3.0", SIDE),
    (WINDOWED, {"window": (np.int32(3), 0)}, "window's left is ", SIDE + " (hint: tuple(int(x) for x in window))"),
    (WINDOWED, {"window": (None, torch.tensor(0))}, "window's right is tensor(0)", "(hint: int(window[1]))"),
    (WINDOWED, {"window": (0, True)}, "window's right is True", SIDE),
    (WINDOWED, {"window": (torch.tensor(3), 0)}, "window's left is tensor(3)", SIDE),
    (WINDOWED, {"chunk": 0}, "chunk is 0", CHUNK), (WINDOWED, {"chunk": -4}, "chunk is -4", CHUNK),
    (WINDOWED, {"chunk": 4.0}, "chunk is 4.0", CHUNK), (WINDOWED, {"chunk": True}, "chunk is True", CHUNK),
    (WINDOWED, {"chunk": torch.tensor(4)}, "chunk is tensor(4)", CHUNK),
    (OPS, {"softcap": -1.0}, "softcap is -1.0", CAP), (OPS, {"softcap": 1e-39}, "softcap is 1e-39", CAP),
    (OPS, {"softcap": NAN}, "softcap is nan", "must be one finite number"),
    (OPS, {"softcap": float("inf")}, "softcap is inf", "must be one finite number"),
    (OPS, {"softcap": True}, "softcap is True", "must be one finite number"),
    (OPS, {"softcap": torch.ones(1)}, "softcap is tensor([1.])", "must be one finite number"),
    (OPS, {"alibi_slopes": [0.5] * 4}, "alibi_slopes is 'list'", "must be a torch.Tensor"),
    (OPS, {"alibi_slopes": zeros(4).half()}, "alibi_slopes.dtype is torch.float16", "must be torch.float32"),
    (OPS, {"alibi_slopes": zeros(2)}, "alibi_slopes.shape is (2,)", SLOPES),
    (OPS, {"alibi_slopes": zeros(3, 4)}, "alibi_slopes.shape is (3, 4)", SLOPES),
    (OPS, {"alibi_slopes": zeros(1, 4)}, "alibi_slopes.shape is (1, 4)", SLOPES),
    (OPS, {"alibi_slopes": zeros(4, device="meta")}, "alibi_slopes.device is 'meta'", "must be q's, cpu"),
    (OPS, {"alibi_slopes": ROWS}, "alibi_slopes.stride(-1) is 2", "must be 1"),
    (OPS, {"sinks": 0.5}, "sinks is 'float'", "must be a torch.Tensor"),
    (OPS, {"sinks": zeros(4).half()}, "sinks.dtype is torch.float16", "torch.float32"),
    (OPS, {"sinks": zeros(3)}, "sinks.shape is (3,)", "must be (heads_q,), (4,)"),
    (OPS, {"sinks": zeros(2, 4)}, "sinks.shape is (2, 4)", "must be (heads_q,), (4,)"),
    (OPS, {"sinks": zeros(4, device="meta")}, "sinks.device is 'meta'", "must be q's, cpu"),
    (OPS, {"sinks": EVEN}, "sinks.stride() is (2,)", "must be contiguous"),
    (BIASED, {"bias": [[0.0]]}, "bias is 'list'", "must be a torch.Tensor"),
    (BIASED, {"bias": zeros(1).half()}, "bias.dtype is torch.float16", "torch.float32"),
    (BIASED, {"bias": zeros(1).bool()}, "bias.dtype is torch.bool", "must be torch.float32"),
    (BIASED, {"bias": zeros(1, device="meta")}, "bias.device is 'meta'", "must be q's, cpu"),
    (BIASED, {"mask": torch.ones(1).bool().numpy()}, "mask is 'ndarray'", "must be a torch.Tensor"),
    (BIASED, {"mask": zeros(1)}, "mask.dtype is torch.float32", "must be torch.bool"),
    (BIASED, {"mask": zeros(1).byte()}, "mask.dtype is torch.uint8", "must be torch.bool"),
    (BIASED, {"mask": zeros(1, device="meta").bool()}, "mask.device is 'meta'", "must be q's, cpu"),
    (SPLIT, {"num_splits": 0}, "num_splits is 0", "must be None or an integer in 1..128"),
    (SPLIT, {"num_splits": -1}, "num_splits is -1", "must be None or an integer in 1..128"),
    (SPLIT, {"num_splits": 129}, "num_splits is 129", "must be None or an integer in 1..128"),
    (SPLIT, {"num_splits": 1.5}, "num_splits is 1.5", "must be None or an integer in 1..128"),
    (SPLIT, {"num_splits": True}, "num_splits is True", "must be None or an integer in 1..128"),
    (OPS, {"scale": NAN}, "scale is nan", "must be one finite number"),
    (OPS, {"scale": float("-inf")}, "scale is -inf", "must be one finite number"),
    (OPS, {"scale": 1e39}, "scale is 1e+39", "float32's range of ±3.403e+38"),
    (OPS, {"scale": 10**400}, "scale is 1000", "float32's range of ±3.403e+38"),
    (OPS, {"scale": True}, "scale is True", "must be one finite number"),
    (OPS, {"scale": "0.5"}, "scale is '0.5'", "must be one finite number"),
    (OPS, {"return_lse": 1}, "return_lse is 1", "must be True or False"),
    (OPS, {"return_lse": None}, "return_lse is None", "must be True or False"),
    (LAID_OUT, {"layout": "sbhd"}, "layout is 'sbhd'", "must be one of bhsd, bshd"),
    (LAID_OUT, {"layout": ["bhsd"]}, "layout is ['bhsd']", "must be one of bhsd, bshd"),
    (OPS, {"backend": 3}, "backend is 3", "must be the name of a path, or None"),
    (OPS, {"backend": ["auto"]}, "backend is ['auto']", "must be the name of a path, or None"),
    (OPS, {"validate": 1}, "validate is 1", "must be True, False, or None for the setting"),
    (OPS, {"validate": "never"}, "validate is 'never'", "must be True, False, or None"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "bad"), [(op, bad) for bad in BAD for op in bad[0]], ids=lambda at: at if isinstance(at, str) else at[2]
)
def test_errors_name_argument_value_and_limit(op: str, bad: tuple[tuple[str, ...], dict[str, Any], str, str]) -> None:
    _, changes, what, limit = bad
    assert_refused(op, good(op) | changes, what, limit)


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("op", BIASED)
def test_what_does_not_broadcast_is_refused(op: str, name: str) -> None:
    full = SCORES[op]
    for axis in range(4):
        shape = tuple(size + 1 if i == axis else size for i, size in enumerate(full))
        wrong = torch.zeros(shape, dtype=torch.bool if name == "mask" else torch.float32)
        limit = f"must broadcast to (batch, heads_q, seq_q, seq_k), {full}"
        assert_refused(op, good(op) | {name: wrong}, f"{name}.shape is {shape}", limit)
    five = torch.zeros(1, *full, dtype=wrong.dtype)
    assert_refused(op, good(op) | {name: five}, f"{name}.shape is {(1, *full)}", "must broadcast to")
    heads = torch.zeros(2, *full[2:], dtype=wrong.dtype)  # as many as key heads, and not as query heads
    assert_refused(op, good(op) | {name: heads}, f"{name}.shape is {(2, *full[2:])}", "must broadcast to")


@pytest.mark.parametrize("op", BIASED)
def test_what_broadcasts_is_a_view(op: str) -> None:
    b, h, s, t = SCORES[op]
    for shape in ((), (1,), (t,), (s, t), (1, t), (s, 1), (h, 1, 1), (b, 1, 1, t), (1, h, s, t), (b, h, s, t)):
        bias, mask = torch.zeros(shape), torch.ones(shape, dtype=torch.bool)
        problem = portattn.plan(op, **good(op), bias=bias, mask=mask).problem
        assert problem.bias
        assert problem.mask
        perform(op, good(op), bias=bias, mask=mask)


@pytest.mark.parametrize("op", BIASED)
def test_what_is_the_same_for_all_rows_is_recorded(op: str) -> None:
    """Kernels read such a bias or mask once for a whole tile of rows."""
    b, h, s, t = SCORES[op]
    given = good(op)
    if s == 1:  # then the queries' axis is no difference: make it one
        given |= {n: given[n].expand(-1, -1, 3, -1) for n in ("q", "q_nope", "q_rope") if n in given}
        s = 3
    for shape, expected in {
        (t,): True, (1, 1, 1, t): True, (b, 1, 1, t): True, (1, 1): True, (): True,
        (s, t): False, (s, 1): False, (h, 1, t): False, (b, h, s, t): False, (1, 1, s, 1): False,
    }.items():  # fmt: skip
        p = portattn.plan(op, **given, bias=torch.zeros(shape)).problem
        assert (p.bias, p.bias_by_key, p.mask, p.mask_by_key) == (True, expected, False, False), shape
        p = portattn.plan(op, **given, mask=torch.ones(shape).bool()).problem
        assert (p.bias, p.bias_by_key, p.mask, p.mask_by_key) == (False, False, True, expected), shape
    one = {n: tensor[:, :1, :1] if n.startswith("q") else tensor for n, tensor in given.items()}
    one |= {n: tensor[:, :1] for n, tensor in one.items() if n in ("k", "v", "k_cache", "v_cache")}
    one |= {n: tensor[:, :, :1] for n, tensor in one.items() if n in ("k_pages", "v_pages")}
    assert portattn.plan(op, **one, bias=torch.zeros(b, 1, 1, t)).problem.bias_by_key  # one row is all rows


@pytest.mark.parametrize("op", OPS)
def test_what_is_asked_for_is_recorded(op: str) -> None:
    p = portattn.plan(op, **good(op)).problem
    assert (p.softcap, p.alibi_slopes, p.sinks, p.bias, p.mask) == (False,) * 5
    for name, value in (("softcap", 2.0), ("alibi_slopes", torch.zeros(4)), ("sinks", torch.zeros(4))):
        p = portattn.plan(op, **good(op), **{name: value}).problem
        assert {n: getattr(p, n) for n in ("softcap", "alibi_slopes", "sinks")} == {
            n: n == name for n in ("softcap", "alibi_slopes", "sinks")
        }
    assert portattn.plan(op, **good(op), alibi_slopes=torch.zeros(2, 4)).problem.alibi_slopes


@pytest.mark.parametrize("op", OPS)
def test_sinks_and_bias_may_be_float32_beside_half_tensors(op: str) -> None:
    half = {n: t.half() if isinstance(t, torch.Tensor) and t.dtype == torch.float32 else t for n, t in good(op).items()}
    for dtype in (torch.float16, torch.float32):
        perform(op, half, sinks=torch.zeros(4, dtype=dtype))
        if op in BIASED:
            perform(op, half, bias=torch.zeros(1, dtype=dtype))
    assert_refused(op, half | {"sinks": torch.zeros(4).bfloat16()}, "sinks.dtype is torch.bfloat16",
                   "must be torch.float32 or torch.float16")  # fmt: skip


REACH = {"attention": 12, "varlen_attention": 21, "decode_attention": 8, "paged_attention": 13, "mla_attention": 13}


@pytest.mark.parametrize("op", WINDOWED)
def test_a_window_has_one_form(op: str) -> None:
    """(causal, left, right) of the Problem: what hides nothing is -1, and a right side of 0 is a causal mask."""

    def made(window: Any, causal: Any = False) -> tuple[str, int, int]:
        p = portattn.plan(op, **good(op), window=window, causal=causal).problem
        return p.causal, p.window_left, p.window_right

    for none in (None, (None, None), (-1, -1), (-1, None), (REACH[op], REACH[op]), (2**40, None)):
        assert made(none) == ("none", -1, -1)
        assert made(none, True) == ("bottom_right", -1, -1)
        assert made(none, "top_left") == ("top_left", -1, -1)
    assert made((3, 0)) == made((3, None), True) == made((3, 0), True) == made((3, 2), True) == ("bottom_right", 3, -1)
    assert made((None, 0)) == made(None, True)
    assert made((3, 2), "top_left") == ("top_left", 3, -1)
    assert made((3, 2)) == ("none", 3, 2)
    assert made((REACH[op] - 1, REACH[op] - 1)) == ("none", REACH[op] - 1, REACH[op] - 1)
    assert made((None, 2)) == ("none", -1, 2)
    assert made((0, None)) == ("none", 0, -1)
    assert made((2, 2**40)) == ("none", 2, -1)


@pytest.mark.parametrize("op", WINDOWED)
def test_a_chunk_that_hides_nothing_is_none(op: str) -> None:
    """Of a causal call: no query stands behind the last key, and with top_left behind as many keys as queries."""

    def made(chunk: Any, causal: Any = False) -> int:
        return portattn.plan(op, **good(op), chunk=chunk, causal=causal).problem.chunk

    p = portattn.plan(op, **good(op)).problem
    assert made(None) == made(None, True) == 0
    assert made(p.seq_k, True) == made(2**40, True) == made(2**40, "top_left") == 0
    assert made(p.seq_k - 1, True) == p.seq_k - 1
    assert made(1, "top_left") == (1 if p.seq_q > 1 else 0)
    assert made(3) == 3
    # A query before the first key sees nothing all the same; the only one of a sequence is the last key's.
    assert made(2**40) == (0 if p.seq_q == 1 else 2**29)


@pytest.mark.parametrize("op", OPS)
def test_no_softcap_has_one_form(op: str) -> None:
    for none in (None, 0, 0.0):
        assert not portattn.plan(op, **good(op), softcap=none).problem.softcap
    for least in (torch.finfo(torch.float32).tiny, 1e-30, 5):
        assert portattn.plan(op, **good(op), softcap=least).problem.softcap


@pytest.mark.parametrize("op", SPLIT)
def test_num_splits_is_recorded(op: str) -> None:
    assert portattn.plan(op, **good(op)).problem.num_splits == 0
    for splits in (1, 128):
        assert portattn.plan(op, **good(op), num_splits=splits).problem.num_splits == splits
