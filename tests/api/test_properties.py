"""Whatever the arguments: right within the budget, or an ArgumentError. Never another exception or a wrong number."""

import math
from collections.abc import Sequence
from typing import Any

import opcalls
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import DTYPES, TILE, assert_right, random_call, run_core

import portattn
from portattn import ArgumentError, Problem
from portattn.planning.kernel_specs import CORES
from portattn.schema.ops import PUBLIC, ROWS

OPS = tuple(op for op in PUBLIC if not ROWS[op].writes)
CALLED = tuple(op for op in OPS if op != "block_sparse_attention")  # by opcalls


def bounded(examples: int) -> settings:
    """The same examples in every run; no deadline, for machines differ."""
    fixtures = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=fixtures
    )


scales = st.one_of(st.none(), st.sampled_from([0.0, -0.0, 1.0, -1.0]), st.floats(-4, 4, width=32))
layouts = st.sampled_from(["plain", "spare", "transposed", "sliced"])


@st.composite
def problems(draw: st.DrawFn, ops: Sequence[str] = OPS, most_q: int = 19, most_k: int = 24) -> Problem:
    op, flag = draw(st.sampled_from(ops)), st.booleans()
    fields: dict[str, Any] = {n: draw(flag) for n in ("softcap", "alibi_slopes", "sinks", "return_lse")}
    fields |= {"seq_q": 1, "seq_k": draw(st.integers(0, most_k)), "heads_k": draw(st.integers(1, 3))}
    fields |= {"head_dim": draw(st.integers(1, 48)), "head_dim_v": draw(st.integers(1, 48))}
    if op == "sparse_attention":
        fields |= {"tokens": draw(st.integers(1, 20)), "log_weights": draw(flag), "magicpig": draw(flag)}
    else:
        fields |= {"seq_q": draw(st.integers(0, most_q if op == "attention" else 4))}
        fields |= {"causal": draw(st.sampled_from(["none", "bottom_right", "top_left"]))}
        fields |= {"window_left": draw(st.sampled_from([-1, 0, 3, 17]))}
        fields |= {"window_right": draw(st.sampled_from([-1, 0, 3])) if fields["causal"] == "none" else -1}
    if op == "mla_attention":
        fields |= {"heads_k": 1, "head_dim": fields["head_dim"] + fields["head_dim_v"]}
    if op in ("paged_attention", "mla_attention") or (op == "sparse_attention" and draw(flag)):
        page = draw(st.sampled_from([1, 3, 8, 16, 20]))
        fields |= {"page_size": page, "seq_k": page * draw(st.integers(0, -(-24 // page)))}
        fields |= {"page_layout": draw(st.sampled_from(["phd", "hpd"])) if op != "mla_attention" else "phd"}
    if op == "varlen_attention" or (op in ("paged_attention", "mla_attention") and draw(flag)):
        fields |= {"total_q": draw(st.integers(0, 20)), "seq_q": draw(st.integers(1, 20))}
        fields |= {"total_k": draw(st.integers(0, 30))} if op == "varlen_attention" else {}
    else:
        fields |= {"layout": draw(st.sampled_from(["bhsd", "bshd"]))}
        fields |= {n: op != "sparse_attention" and draw(flag) for n in ("bias", "mask")}
    if op in ("attention", "decode_attention"):
        fields |= {n: draw(flag) for n in ("seqlens_k", "leftpad_k")}
        fields |= {n: op == "attention" and draw(flag) for n in ("seqlens_q", "leftpad_q")}
    elif op == "sparse_attention":
        fields |= {"seqlens_k": draw(flag)}
    elif op == "block_sparse_attention":
        fields |= dict.fromkeys(("softcap", "alibi_slopes", "bias", "mask"), False) | {"seqlens_k": draw(flag)}
        fields |= {"window_left": -1, "window_right": -1, "tokens": draw(st.integers(1, 4)), "block_k": 16}
    return Problem(
        op=op, batch=draw(st.integers(0, 3)), heads_q=fields["heads_k"] * draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(sorted(DTYPES))), aligned=False, **fields,
    )  # fmt: skip


@bounded(300)
@given(problems(("attention", "decode_attention") * 5 + CALLED, 40, 40), scales, layouts, st.integers(0, 2**16))
def test_valid_arguments_are_right(p: Problem, scale: float | None, strides: str, seed: int) -> None:
    call = random_call(p, seed, scale=scale, strides=strides)
    own = {"decode_attention": {"seqlens_k": call.seqlens_k}, "mla_attention": {"scale": call.scale}}.get(p.op, {})
    result = opcalls.perform(p.op, opcalls.given(call) | {"scale": scale} | own)
    assert portattn.last_plan().problem.op == p.op
    opcalls.assert_right(call, *(result if p.return_lse else (result, None)))


@bounded(120)
@given(problems(), scales, layouts, st.integers(0, 2**16), st.integers(1, 4), st.booleans())
def test_the_core_kernels_are_right(device, p, scale, strides, seed, splits, extremes):
    call = random_call(p, seed, scale=scale, strides=strides, device=device.name, extremes=extremes)
    page_loop = "flat_masked" if p.page_size % TILE or seed % 2 else "per_page"
    launch = {"splits": splits if CORES[p.op].splits_keys else 1}
    assert_right(call, *run_core(device, call, {"page_loop": page_loop}, launch))


sizes = st.lists(st.integers(0, 4), min_size=0, max_size=5).map(tuple)
dtypes = st.sampled_from([*DTYPES.values(), torch.float64, torch.int32, torch.bool])
shapes = st.one_of(st.just((2, 2, 3, 4)), sizes)
odd = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just([]), st.just({}),
    st.just(torch.tensor([1, 2])), st.just(torch.zeros(2, dtype=torch.int32)), st.just(object),
)  # fmt: skip
lengths = st.one_of(
    odd, st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3).map(lambda v: torch.tensor(v, dtype=torch.int32))
)


@bounded(400)
@given(
    st.lists(st.tuples(shapes, dtypes), min_size=3, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "scale": odd, "causal": odd, "layout": st.one_of(odd, st.just("bshd")), "return_lse": odd,
            "dropout_p": odd, "seqlens_q": lengths, "seqlens_k": lengths, "leftpad_q": lengths, "leftpad_k": lengths,
            "backend": st.one_of(odd, st.just("reference")),
        },
    ),
)  # fmt: skip
def test_any_arguments_give_a_result_or_an_argument_error(tensors: list, rest: dict) -> None:
    q, k, v = (torch.ones(shape).to(dtype) for shape, dtype in tensors)
    try:
        result = portattn.attention(q, k, v, **rest)
    except ArgumentError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.argument
        assert str(refused).startswith("attention: ")
        return
    out = result[0] if isinstance(result, tuple) else result
    assert (out.dtype, out.shape[:3]) == (q.dtype, q.shape[:3])
    scale = rest.get("scale")
    if scale is None or abs(scale) < 1e30:  # beyond, a score leaves float32 whoever computes it
        assert torch.isfinite(out).all()


@bounded(60)
@given(st.one_of(odd, st.floats()), st.sampled_from(["scale", "dropout_p"]))
def test_numbers(value: Any, name: str) -> None:
    q = torch.ones(1, 1, 2, 4)
    good = value is None and name == "scale"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(min(abs(value), 1e308)):
        good = abs(value) <= torch.finfo(torch.float32).max if name == "scale" else 0 <= value < 1
    if good and value == value:
        portattn.attention(q, q, q, **{name: value})
    else:
        with pytest.raises(ArgumentError, match=name):
            portattn.attention(q, q, q, **{name: value})
