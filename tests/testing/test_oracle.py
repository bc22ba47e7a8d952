"""The oracle: against numbers worked out by hand, against plain Python floats, and against itself through other ops."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from reference_cases import CASES, OPS, problem
from scalars import sampled, scalars

from portattn.reference import blockwise
from portattn.reference.dropout import block_mask
from portattn.reference.magicpig import log_sampling_probability
from portattn.reference.scoreterms import log_sampled
from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.testing.oracle import oracle
from portattn.testing.tolerance import random_call, same_dtype

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
    rest = {n: fields[n] for n in fields if n not in names or n == "softcap"}
    return Call(p, q, k, v, 1.0, **rest)


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
    ],
    ids=str,
)
def test_how_many_keys_a_window_shows(fields: dict, seen: list[int]) -> None:
    """With scores of 0 the LSE is the log of their number."""
    call = tiny({"q": [0.0] * 3, "k": [0.0] * 5, "v": [1.0] * 5}, **fields)
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
    call = tiny({"q": [1.0], "k": [2.0 * math.atanh(0.5), 0.0], "v": [1.0, 0.0]}, softcap=2.0)
    out, lse = oracle(call)
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


@pytest.mark.parametrize(
    "feature", ["plain", "causal", "top_left_window", "window", "alibi", "softcap", "sinks", "all"]
)
def test_packed_is_padded_is_dense(feature: str) -> None:
    packed = random_call(problem("varlen", feature, bias=False, mask=False), seed=7)
    p, cu_q, cu_k = packed.problem, packed.cu_seqlens_q.tolist(), packed.cu_seqlens_k.tolist()
    lengths_q, lengths_k = packed.cu_seqlens_q.diff(), packed.cu_seqlens_k.diff()
    unpacked = msgspec.structs.replace(p, op="attention", total_q=None, total_k=None)
    padded = Call(
        problem=msgspec.structs.replace(unpacked, seqlens_q=True, seqlens_k=True),
        q=torch.full((p.batch, p.heads_q, p.seq_q, p.head_dim), math.nan),
        k=torch.full((p.batch, p.heads_k, p.seq_k, p.head_dim), math.nan),
        v=torch.full((p.batch, p.heads_k, p.seq_k, p.head_dim_v), math.nan),
        scale=packed.scale, softcap=packed.softcap, sinks=packed.sinks, alibi_slopes=packed.alibi_slopes,
        seqlens_q=lengths_q, seqlens_k=lengths_k,
    )  # fmt: skip
    expected = oracle(packed)
    for b in range(p.batch):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        padded.q[b, :, : lengths_q[b]] = packed.q[0, :, rows]
        padded.k[b, :, : lengths_k[b]], padded.v[b, :, : lengths_k[b]] = packed.k[0, :, keys], packed.v[0, :, keys]
    found = oracle(padded)
    for b in range(p.batch):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        sizes = {"batch": 1, "seq_q": int(lengths_q[b]), "seq_k": int(lengths_k[b])}
        dense = replace(
            padded, problem=msgspec.structs.replace(unpacked, **sizes), q=packed.q[:, :, rows], k=packed.k[:, :, keys],
            v=packed.v[:, :, keys], seqlens_q=None, seqlens_k=None,
            alibi_slopes=None if packed.alibi_slopes is None else packed.alibi_slopes[b : b + 1],
        )  # fmt: skip
        alone = oracle(dense)
        close([t[:1, :, rows] for t in expected], [t[b : b + 1, :, : lengths_q[b]] for t in found])
        close([t[:1, :, rows] for t in expected], alone)


def contiguous(call: Call, storage: torch.Tensor) -> torch.Tensor:
    """A paged cache as (B, Hk, Sk, X), with NaN where no page is valid."""
    p = call.problem
    cache = storage.new_full((p.batch, p.heads_k, p.seq_k, storage.shape[3]), math.nan)
    for b, length in enumerate(call.seqlens_k.tolist()):
        for j in range(length):
            cache[b, :, j] = storage[int(call.page_table[b, j // p.page_size]), :, j % p.page_size]
    return cache


def as_decode(call: Call) -> Call:
    """The same call over a contiguous cache, with whole queries."""
    q = call.q if call.q_rope is None else torch.cat([call.q, call.q_rope], dim=3)
    p = msgspec.structs.replace(call.problem, op="decode_attention", page_size=0, tokens=0)
    return replace(
        call, problem=p, q=q, q_rope=None, k=contiguous(call, call.k), v=contiguous(call, call.v), page_table=None,
        indices=None, counts=None,
    )  # fmt: skip


@pytest.mark.parametrize("op", ["paged", "mla"])
@pytest.mark.parametrize("feature", ["plain", "causal", "window_before", "alibi", "bias", "mask", "all"])
def test_paged_and_latent_are_decode(op: str, feature: str) -> None:
    call = random_call(problem(op, feature), seed=8)
    close(oracle(call), oracle(as_decode(call)))


@pytest.mark.parametrize("op", ["sparse", "sparse_paged"])
@pytest.mark.parametrize("feature", ["plain", "softcap", "alibi", "sinks"])
def test_all_tokens_in_any_order_are_decode(op: str, feature: str) -> None:
    full = random_call(problem(op, feature, tokens=48, seq_k=40, seqlens_k=True), seed=9)
    shape = (full.problem.batch, full.problem.heads_q)
    full.indices = torch.stack([torch.randperm(48) for _ in range(math.prod(shape))]).view(*shape, 48).int()
    full.counts = torch.full(shape, 48, dtype=torch.int32)
    full.k, full.v = full.k.nan_to_num(0.5), full.v.nan_to_num(0.5)
    if op == "sparse_paged":
        decode = as_decode(full)
    else:
        p = msgspec.structs.replace(full.problem, op="decode_attention", tokens=0)
        decode = replace(full, problem=p, indices=None, counts=None)
    close(oracle(full), oracle(decode))


@pytest.mark.parametrize("op", [name for name in OPS if not name.startswith("sparse")])
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
def test_a_window_wider_than_everything_is_none(op: str, causal: str) -> None:
    call = random_call(problem(op, causal=causal), seed=12)
    sides = {"window_left": 99} | ({"window_right": 99} if causal == "none" else {})
    wide = replace(call, problem=msgspec.structs.replace(call.problem, **sides))
    close(oracle(call), oracle(wide))
    if causal == "none":  # and a right side of 0 is causal
        causal_call = replace(call, problem=msgspec.structs.replace(call.problem, causal="bottom_right"))
        to_itself = replace(call, problem=msgspec.structs.replace(call.problem, window_right=0))
        close(oracle(causal_call), oracle(to_itself))


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
