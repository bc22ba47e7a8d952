"""The oracle: against numbers worked out by hand, against plain Python floats, and against itself through other ops."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from reference_cases import CASES, OPS, PLACED, TERMS, problem
from scalars import sampled, scalars

from portattn.reference import blockwise
from portattn.reference.dropout import block_mask
from portattn.reference.tiles import log_sampled
from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.testing.oracle import log_sampling_probability, oracle
from portattn.testing.tolerance import random_call, same_dtype
from portattn.testing.verdict import gradients, judge_gradients, same_dtype_gradients

SMALLER = {"heads_q": 2, "heads_k": 1, "head_dim": 4, "head_dim_v": 3}


def close(ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("op", "feature"), CASES)
@pytest.mark.parametrize("seed", [10, 11])
def test_the_definition_number_by_number(op: str, feature: str, seed: int) -> None:
    fields = SMALLER | ({"head_dim": 6, "head_dim_v": 4} if op.startswith("mla") else {})
    call = random_call(problem(op, feature, **fields), seed, extremes=seed == 11)
    close(oracle(call), scalars(call))


def tiny(values: dict[str, list[float]], **fields) -> Call:
    """One sequence, one head, heads of one column; q, k, v as named, and further tensors of a Call."""
    q, k, v = (torch.tensor(values[name], dtype=torch.float64)[None, None, :, None] for name in "qkv")
    sizes = {"batch": 1, "heads_q": 1, "heads_k": 1, "seq_q": q.shape[2], "seq_k": k.shape[2], "head_dim": 1}
    names = {n for n in fields if n in Problem.__struct_fields__ and not isinstance(fields[n], torch.Tensor)}
    p = Problem(**sizes, **{n: fields[n] for n in names if n != "softcap"}, softcap="softcap" in fields)
    return Call(p, q, k, v, 1.0, **{n: fields[n] for n in fields if n not in names or n == "softcap"})


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"window_left": 1, "window_right": 1}, [3, 3, 2]),  # rows at 2, 3 and 4 of five keys
        ({"window_left": 0, "window_right": 0}, [1, 1, 1]),
        ({"window_left": 2}, [5, 4, 3]),
        ({"window_right": 1}, [4, 5, 5]),
        ({"window_left": 1, "causal": "bottom_right"}, [2, 2, 2]),
        ({"window_left": 1, "causal": "top_left"}, [1, 2, 2]),
        ({"window_left": 9, "window_right": 9}, [5, 5, 5]),
        ({"causal": "bottom_right"}, [3, 4, 5]),
        ({"causal": "bottom_right"}, [0, 0, 1, 2, 3, 4, 5]),
        ({"causal": "top_left"}, [1, 2, 3, 4, 5, 5, 5]),
    ],
    ids=str,
)
def test_how_many_keys_a_window_shows(fields: dict, seen: list[int]) -> None:
    """With scores of 0 the LSE is the log of their number."""
    call = tiny({"q": [0.0] * len(seen), "k": [0.0] * 5, "v": [1.0] * 5}, **fields)
    for _, lse in (
        oracle(call),
        blockwise.run(replace(call, problem=msgspec.structs.replace(call.problem, return_lse=True))),
    ):
        torch.testing.assert_close(lse[0, 0].exp().double(), torch.tensor(seen).double(), rtol=1e-6, atol=0)


def test_alibi_by_hand() -> None:
    """One row at position 2 over keys 0, 1, 2: slope·distance is 2·log 2, log 2, 0, the weights 1/7, 2/7, 4/7."""
    slopes = torch.full((1, 1), math.log(2.0), dtype=torch.float64)
    out, lse = oracle(tiny({"q": [0.0], "k": [0.0] * 3, "v": [7.0, 70.0, 700.0]}, alibi_slopes=slopes))
    assert out.item() == pytest.approx(1.0 + 20.0 + 400.0)
    assert lse.item() == pytest.approx(math.log(7.0 / 4.0))


def test_alibi_counts_distances_on_both_sides() -> None:
    """Row 0 of two stands at position 1 of three keys."""
    slopes = torch.full((1, 1), math.log(2.0), dtype=torch.float64)
    out, _ = oracle(tiny({"q": [0.0, 0.0], "k": [0.0] * 3, "v": [4.0, 40.0, 400.0]}, alibi_slopes=slopes))
    assert out[0, 0, 0].item() == pytest.approx(1.0 + 20.0 + 100.0)


def test_softcap_by_hand() -> None:
    """Scores 2·artanh(1/2) and 0, capped to 2: 2·tanh gives 1 and 0."""
    out, lse = oracle(tiny({"q": [1.0], "k": [2.0 * math.atanh(0.5), 0.0], "v": [1.0, 0.0]}, softcap=2.0))
    assert out.item() == pytest.approx(math.e / (math.e + 1.0))
    assert lse.item() == pytest.approx(math.log(math.e + 1.0))


def test_a_sink_by_hand() -> None:
    """Two scores of 0 and a sink of log 2: half of the weight has no value."""
    sinks = torch.tensor([math.log(2.0)], dtype=torch.float64)
    out, lse = oracle(tiny({"q": [0.0], "k": [0.0, 0.0], "v": [4.0, 8.0]}, sinks=sinks))
    assert out.item() == pytest.approx(3.0)
    assert lse.item() == pytest.approx(math.log(4.0))


@pytest.mark.parametrize("size", [torch.finfo(torch.float32).min, torch.finfo(torch.float32).max])
def test_a_row_of_extreme_biases_by_hand(size: float) -> None:
    """An LSE of 1e38 has no room for log 3, in float64 either: the weights must not be taken from it alone."""
    bias = torch.full((1, 1, 1, 3), size)
    out, lse = oracle(tiny({"q": [0.0], "k": [0.0] * 3, "v": [1.0, 2.0, 6.0]}, bias=bias))
    assert (out.item(), lse.item()) == (pytest.approx(3.0), size)
    sinks = torch.tensor([size], dtype=torch.float64)
    out, lse = oracle(tiny({"q": [0.0], "k": [0.0] * 3, "v": [1.0, 2.0, 6.0]}, bias=bias, sinks=sinks))
    assert (out.item(), lse.item()) == (pytest.approx(9.0 / 4.0), size)


def test_a_sink_where_nothing_is_attended() -> None:
    """Row 0 sees no key: its LSE is the sink. Row 2 is padding: its LSE is not."""
    lengths = torch.tensor([2], dtype=torch.int32)
    call = tiny(
        {"q": [1.0] * 3, "k": [1.0], "v": [1.0]}, sinks=torch.tensor([0.25]), causal="bottom_right",
        seqlens_q=lengths, return_lse=True,
    )  # fmt: skip
    for out, lse in (oracle(call), blockwise.run(replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float()))):
        assert lse[0, 0, 0].item() == 0.25
        assert lse[0, 0, 1].item() > 0.25
        assert lse[0, 0, 2].item() == -math.inf
        assert out.flatten()[[0, 2]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("cosine", "bits", "tables", "expected"),
    [
        (1.0, 10, 150, 1.0),
        (0.0, 1, 2, 0.25),  # both tables of one bit, each with probability 1/2
        (0.0, 1, 3, 0.5),  # two or three of three coins
        (0.5, 1, 2, 4.0 / 9.0),  # 60°: a bit agrees with probability 2/3
        (-1.0, 4, 20, 2.0**-126),
    ],
)
def test_magicpig_by_hand(cosine: float, bits: int, tables: int, expected: float) -> None:
    number = lambda value: torch.tensor([value], dtype=torch.float64)  # noqa: E731
    found = log_sampling_probability(number(cosine), number(bits), number(tables))
    assert found.item() == pytest.approx(math.log(expected), abs=1e-12)
    single = log_sampled(*(number(value).float() for value in (cosine, bits, tables)))
    assert single.item() == pytest.approx(math.log(expected), abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("bits", [1, 4, 10])
@pytest.mark.parametrize("tables", [2, 20, 150])
def test_magicpig_is_the_binomial_sum_at_every_cosine(bits: int, tables: int) -> None:
    ours = torch.tensor([-1.0, -0.9999, *(n / 50.0 for n in range(-49, 50)), 0.9999, 1.0]).double()
    exact = torch.tensor([math.log(sampled(c, bits, tables)) for c in ours.tolist()], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    double = log_sampling_probability(ours, one * bits, one * tables)
    torch.testing.assert_close(double, exact, rtol=1e-11, atol=1e-11)
    for single in (log_sampling_probability, log_sampled):
        found = single(ours.float(), one.float() * bits, one.float() * tables)
        # Near −1 the angle of a float32 cosine is all but lost: there the probability is smallest.
        torch.testing.assert_close(found[2:].double(), exact[2:], rtol=2e-5, atol=2e-6)


def test_a_vector_without_direction_counts_as_orthogonal() -> None:
    call = random_call(problem("sparse", "magicpig"), seed=3)
    call.q = torch.zeros_like(call.q)
    call.indices, call.counts = torch.zeros_like(call.indices), torch.full_like(call.counts, 3)
    call.seqlens_k = torch.full_like(call.seqlens_k, 1)
    call.k = torch.ones_like(call.k)
    for h in range(call.problem.heads_q):
        at_zero = math.log(sampled(0.0, int(call.magicpig_bits[h]), int(call.magicpig_tables[h])))
        for _, lse in (oracle(call), blockwise.run(call)):
            assert lse[0, h, 0].item() == pytest.approx(math.log(3.0) - at_zero, rel=1e-5)


def test_a_token_listed_twice_counts_twice() -> None:
    call = random_call(problem("sparse", seqlens_k=False), seed=2)
    call.indices = torch.tensor([3, 3, 3, -1, 29, 5] + [7] * 6, dtype=torch.int32).expand(3, 4, 12)
    call.counts = torch.full((3, 4), 5, dtype=torch.int32)
    call.k, call.v = call.k.nan_to_num(1.0), call.v.nan_to_num(1.0)
    score = (call.q[:, :, 0] * call.k[:, :, 3].repeat_interleave(2, 1)).sum(-1) * call.scale
    for out, lse in (oracle(call), blockwise.run(call)):
        torch.testing.assert_close(lse[:, :, 0].float(), score + math.log(3.0))
        torch.testing.assert_close(out[:, :, 0].float(), call.v[:, :, 3].repeat_interleave(2, 1))


@pytest.mark.parametrize("op", [name for name in OPS if not name.endswith("packed") and name != "varlen"])
@pytest.mark.parametrize("feature", ["plain", "alibi", "sinks", "all"])
def test_some_rows_are_rows_of_the_whole(op: str, feature: str) -> None:
    call = random_call(problem(op, feature), seed=13)
    rows = torch.tensor([0] if call.problem.seq_q == 1 else [2, 0])
    for function in (oracle, same_dtype):
        whole, some = function(call), function(call, rows=rows)
        for a, b in zip(whole, some, strict=True):
            torch.testing.assert_close(a[:, :, rows], b)


def test_some_rows_of_packed_queries_are_refused() -> None:
    with pytest.raises(ValueError, match="packed"):
        oracle(random_call(problem("varlen")), rows=torch.tensor([0]))


@pytest.mark.parametrize("op", ["dense", "padded", "varlen"])
def test_dropout_is_that_of_the_mask(op: str) -> None:
    """With the identity for values the output is what is left of the probabilities."""
    call = random_call(problem(op, "sinks", head_dim_v=29), seed=4)
    call.v = torch.eye(29)[None, None].expand(3, 2, 29, 29)
    if call.cu_seqlens_k is not None:
        call.v = call.k.new_zeros(1, 2, call.k.shape[2], 29)
        for first, end in zip(
            *(part.tolist() for part in (call.cu_seqlens_k[:-1], call.cu_seqlens_k[1:])), strict=True
        ):
            call.v[:, :, first:end] = torch.eye(29)[: end - first]
    whole, lse = oracle(call)
    call.dropout_p, call.dropout_seed = 0.25, torch.tensor([2**40 + 5])
    found, found_lse = oracle(call)
    same, same_lse = same_dtype(call)
    mask = block_mask(call.dropout_seed, 0.25, 3, 4, range(13), range(29))
    if call.cu_seqlens_q is not None:
        rows = torch.zeros(1, 4, call.q.shape[2], 29, dtype=torch.bool)
        for b, (first, end) in enumerate(
            zip(call.cu_seqlens_q[:-1].tolist(), call.cu_seqlens_q[1:].tolist(), strict=True)
        ):
            rows[0, :, first:end] = mask[b, :, : end - first]
        mask = rows
    assert whole[mask].any()
    assert whole[~mask].any()
    close((found, found_lse), (whole * mask / 0.75, lse))
    torch.testing.assert_close(same.double(), found, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(same_lse.double(), lse, rtol=1e-5, atol=1e-6)


CASES_GRADIENTS = [
    *((op, feature) for op in ("dense", "padded", "varlen") for feature in (*TERMS, *PLACED)),
    *((op, "all") for op in ("decode", "paged_packed", "mla", "mla_packed")),
    *((op, "log_weights") for op in ("sparse", "sparse_paged")),
    *((op, "dropout") for op in ("dense", "padded", "varlen")),
]
DROPOUT = 0.3


def call_of(op: str, feature: str, seed: int, **fields: str) -> Call:
    call = random_call(problem(op, "all" if feature == "dropout" else feature, **fields), seed, extremes=True)
    if feature == "dropout":
        call.dropout_p, call.dropout_seed = DROPOUT, torch.tensor([seed])
    return call


def inwards(call: Call, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """grad_out and grad_lse, with NaN in rows that attend nothing."""
    generator = torch.Generator().manual_seed(seed)
    out, lse = oracle(call)
    grad_out = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    grad_lse = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    nothing = torch.isneginf(lse)
    return (
        grad_out.masked_fill(nothing[..., None], float("nan")).to(call.q.dtype),
        grad_lse.masked_fill(nothing, float("nan")).float(),
    )


def value(call: Call, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> float:
    out, lse = oracle(call)
    some = ~torch.isneginf(lse)
    return float((out * grad_out)[some].sum() + (lse * grad_lse)[some].sum())


@pytest.mark.parametrize(("op", "feature"), CASES_GRADIENTS)
def test_gradients_are_slopes_of_the_oracle(op: str, feature: str) -> None:
    """Along a random direction in all tensors at once, against a central difference."""
    call = call_of(op, feature, seed=3)
    grad_out, grad_lse = inwards(call)
    found = gradients(call, grad_out, grad_lse)
    generator = torch.Generator().manual_seed(1)
    step, moved = 1e-5, []
    directions = {name: torch.randn(g.shape, generator=generator, dtype=torch.float64) for name, g in found.items()}
    for sign in (-1.0, 1.0):
        other = replace(call, **{name: getattr(call, name) + sign * step * d for name, d in directions.items()})
        if "v" not in found:
            other.v = other.k[..., : call.problem.head_dim_v]
        moved.append(value(other, grad_out, grad_lse))
    slope = sum(float((found[name] * directions[name]).sum()) for name in found)
    size = sum(float((found[name] * directions[name]).abs().sum()) for name in found)
    assert size > 1.0
    assert (moved[1] - moved[0]) / (2 * step) == pytest.approx(slope, rel=0, abs=1e-7 * size)


def test_two_keys_by_hand() -> None:
    """Scores 0 and log 3, so P is 1/4 and 3/4; values 10 and 20; grad_out 1: dS = P·(v - 17.5) = ∓1.875."""
    p = Problem(batch=1, heads_q=1, heads_k=1, seq_q=1, seq_k=2, head_dim=1)

    def column(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[None, None, :, None]

    call = Call(p, column(2.0), column(0.0, math.log(3.0)), column(10.0, 20.0), 0.5)
    found = gradients(call, column(1.0))
    torch.testing.assert_close(found["v"], column(0.25, 0.75))
    torch.testing.assert_close(found["k"], column(-1.875, 1.875))  # scale·q is 1
    torch.testing.assert_close(found["q"], column(0.5 * 1.875 * math.log(3.0)))
    # The LSE's own gradient is P.
    found = gradients(call, column(0.0), torch.ones(1, 1, 1))
    torch.testing.assert_close(found["k"], column(0.25, 0.75))
    assert not found["v"].any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("op", "feature"), CASES_GRADIENTS)
def test_the_formulas_agree_with_autograd(op: str, feature: str, dtype: str) -> None:
    """Within what their dtype's rounding may do, and with zeros where nothing counts."""
    call = call_of(op, feature, seed=2, dtype=dtype)
    grad_out, grad_lse = inwards(call)
    exact, same = gradients(call, grad_out, grad_lse), same_dtype_gradients(call, grad_out, grad_lse)
    assert set(exact) == set(same)
    steps = 64 * torch.finfo(call.q.dtype).eps
    for name, expected in exact.items():
        assert same[name].dtype is getattr(call, name).dtype
        assert torch.isfinite(expected).all(), name
        limit = steps * float(expected.abs().max())
        torch.testing.assert_close(same[name].double(), expected, rtol=0, atol=limit, msg=name)
    facts = judge_gradients(call, same, grad_out, grad_lse)
    assert facts["wrong"] == 0
    assert all(facts[f"error_{name}"] <= facts[f"budget_{name}"] for name in same)
    assert facts["error"] <= facts["budget"]


def test_fewer_bits_of_fp32_operands_have_a_wider_budget() -> None:
    call = random_call(problem("dense"), seed=2)
    grad_out, _ = inwards(call)
    found = same_dtype_gradients(call, grad_out)
    ieee, tf32 = (judge_gradients(call, found, grad_out, precision=name) for name in ("ieee", "tf32"))
    for name in found:
        assert ieee[f"error_{name}"] == tf32[f"error_{name}"]
        assert 30 * ieee[f"budget_{name}"] < tf32[f"budget_{name}"]


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks", "alibi_slopes"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_gradient_is_judged(name: str, dtype: str) -> None:
    """One that is a tenth too large is over its budget, and leads the verdict."""
    call = random_call(problem("padded", "all", dtype=dtype), seed=2)
    grad_out, grad_lse = inwards(call)
    found = gradients(call, grad_out, grad_lse)
    found[name] = found[name] * 1.1
    facts = judge_gradients(call, {n: g.to(getattr(call, n).dtype) for n, g in found.items()}, grad_out, grad_lse)
    assert facts["wrong"] == 0
    assert facts["error"] == facts[f"error_{name}"] > facts["budget"] == facts[f"budget_{name}"]
    assert all(facts[f"error_{other}"] <= facts[f"budget_{other}"] for other in found if other != name)


@pytest.mark.parametrize("op", ["padded", "varlen"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_must_be_zero_is_judged(op: str, name: str) -> None:
    """The smallest number in one row or key of padding, and a NaN in one."""
    call = random_call(problem(op), seed=2, extremes=True, poison="k" if name != "v" else "v")
    grad_out, _ = inwards(call)
    found = gradients(call, grad_out)
    poisoned = getattr(call, name).isnan() if name != "q" else found["q"] == 0
    where = poisoned.nonzero()[0].tolist()
    for number in (1e-30, float("nan")):
        spoilt = found[name].clone()
        spoilt[tuple(where)] = number
        assert judge_gradients(call, found | {name: spoilt}, grad_out)["wrong"] == 1
    kept = (found[name] != 0).nonzero()[0].tolist()
    spoilt = found[name].clone()
    spoilt[tuple(kept)] = float("inf")
    assert judge_gradients(call, found | {name: spoilt}, grad_out)["wrong"] == 1


def test_what_is_not_a_gradient_of_the_call_is_refused() -> None:
    call = random_call(problem("dense"), seed=2)
    grad_out, _ = inwards(call)
    found = gradients(call, grad_out)
    with pytest.raises(ValueError, match="sinks"):
        judge_gradients(call, {"sinks": torch.zeros(4)}, grad_out)
    with pytest.raises(ValueError, match="gradient of k is"):
        judge_gradients(call, found | {"k": found["k"][:, :1]}, grad_out)


def test_magicpig_has_no_formula() -> None:
    call = random_call(problem("sparse", "magicpig"), seed=2)
    grad_out, _ = inwards(call)
    assert gradients(call, grad_out)["q"].any()
    with pytest.raises(ValueError, match="MagicPIG"):
        same_dtype_gradients(call, grad_out)
