"""What the other tests rest on: random calls are legal, and hold NaN where nothing may look; what is wrong is seen."""

import math

import pytest
import torch
from reference_cases import CASES, OPS, problem, run

from portattn.schema.call import Call
from portattn.testing import tolerance
from portattn.testing.oracle import dense_view
from portattn.testing.tolerance import judge, random_call, same_dtype

PACKED = [name for name, fields in OPS.items() if "total_q" in fields]
PAGED = [name for name, fields in OPS.items() if "page_size" in fields]


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def poisoned(call: Call) -> torch.Tensor:
    """Where a key or its value holds NaN: bool, (B, Hk, Sk) as the cache lies."""
    return call.k.isnan().any(dim=3) | call.v.isnan().any(dim=3)


@pytest.mark.parametrize(("op", "feature"), CASES)
def test_a_seed_decides_everything(op: str, feature: str) -> None:
    a, b, c = (random_call(problem(op, feature), seed) for seed in (3, 3, 4))
    for name in tolerance.TENSORS:
        assert same(getattr(a, name), getattr(b, name)), name
    assert not same(a.q, c.q)


@pytest.mark.parametrize(("op", "feature"), CASES)
@pytest.mark.parametrize("seed", range(4))
def test_shapes_and_dtypes_are_the_calls(op: str, feature: str, seed: int) -> None:
    call = random_call(problem(op, feature), seed)
    p = call.problem
    batch, rows = p.query_rows
    width = p.head_dim_v if p.op == "mla_attention" else p.head_dim
    expected = {
        "q": ((batch, p.heads_q, rows, width), torch.float32, True),
        "q_rope": ((batch, p.heads_q, rows, p.head_dim - p.head_dim_v), torch.float32, p.op == "mla_attention"),
        "seqlens_q": ((p.batch,), torch.int32, p.seqlens_q), "seqlens_k": ((p.batch,), torch.int32, p.seqlens_k),
        "leftpad_q": ((p.batch,), torch.int32, p.leftpad_q), "leftpad_k": ((p.batch,), torch.int32, p.leftpad_k),
        "cu_seqlens_q": ((p.batch + 1,), torch.int32, p.packed),
        "cu_seqlens_k": ((p.batch + 1,), torch.int32, p.total_k is not None),
        "page_table": ((p.batch, p.seq_k // max(p.page_size, 1)), torch.int32, p.page_size > 0),
        "indices": ((p.batch, p.heads_q, p.tokens), torch.int32, p.tokens > 0),
        "counts": ((p.batch, p.heads_q), torch.int32, p.tokens > 0),
        "log_weights": ((p.batch, p.heads_q, p.tokens), torch.float32, p.log_weights),
        "magicpig_bits": ((p.heads_q,), torch.int32, p.magicpig),
        "magicpig_tables": ((p.heads_q,), torch.int32, p.magicpig),
        "alibi_slopes": ((p.batch, p.heads_q), torch.float32, p.alibi_slopes),
        "sinks": ((p.heads_q,), torch.float32, p.sinks),
        "bias": ((p.batch, p.heads_q, p.seq_q, p.seq_k), torch.float32, p.bias),
        "mask": ((p.batch, p.heads_q, p.seq_q, p.seq_k), torch.bool, p.mask),
    }  # fmt: skip
    for name, (shape, dtype, there) in expected.items():
        tensor = getattr(call, name)
        assert (tensor is not None) == there, name
        if there:
            assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), name
    assert (call.softcap > 0.0) == p.softcap


@pytest.mark.parametrize("op", PACKED)
@pytest.mark.parametrize("extremes", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_packed_sequences_fit(op: str, extremes: bool, seed: int) -> None:
    call = random_call(problem(op, batch=5, total_q=37), seed, extremes=extremes)
    p = call.problem
    filled = random_call(problem(op, batch=5, total_q=37), seed, extremes=extremes, poison="k")
    for cu, total, longest, nan in (
        (call.cu_seqlens_q, p.total_q, p.seq_q, filled.q.isnan().all(dim=3)),
        (call.cu_seqlens_k, p.total_k, p.seq_k, poisoned(call)),
    ):
        if cu is None:
            continue
        lengths = cu.diff()
        assert cu[0] == 0
        assert 0 <= int(lengths.min()) <= int(lengths.max()) <= longest
        assert int(cu[-1]) == total - 3 if extremes else int(cu[-1]) == total
        if extremes:
            assert (int(lengths[0]), lengths[2::3].tolist()) == (longest, [0])
        assert nan.all(dim=1)[0].tolist() == [row >= int(cu[-1]) for row in range(total)]


@pytest.mark.parametrize("op", PAGED)
@pytest.mark.parametrize("seed", range(3))
def test_only_owned_pages_hold_numbers(op: str, seed: int) -> None:
    call = random_call(problem(op, tokens=200 if "sparse" in op else 0), seed)
    p, owned = call.problem, []
    numbers = torch.zeros(call.k.shape[0], p.page_size, dtype=torch.bool)
    for b, length in enumerate(call.seqlens_k.tolist()):
        pages = -(-length // p.page_size)
        owned += call.page_table[b, :pages].tolist()
        assert not ((call.page_table[b, pages:] >= 0) & (call.page_table[b, pages:] < call.k.shape[0])).any()
        for j in range(length):
            numbers[int(call.page_table[b, j // p.page_size]), j % p.page_size] = True
    assert len(set(owned)) == len(owned) < call.k.shape[0]
    found = ~poisoned(call)
    assert not found[~numbers[:, None].expand(found.shape)].any()
    if "sparse" not in op:
        assert found[numbers[:, None].expand(found.shape)].all()


@pytest.mark.parametrize("op", ["dense", "padded", "decode", "paged", "mla", "paged_packed", "varlen"])
@pytest.mark.parametrize("feature", ["chunk", "causal_chunk", "top_left_chunk", "chunk_window"])
def test_nan_is_in_all_keys_outside_the_chunks_of_the_queries(op: str, feature: str) -> None:
    fields = {"seq_q": 2} if op in ("dense", "padded") else {}
    call = random_call(problem(op, feature, **fields), seed=1, poison="v")
    seen = dense_view(call).keep.any(dim=2)[:, 0]
    assert 0 < int(seen.sum()) < seen.numel()
    hidden = poisoned(call)
    if op in ("dense", "padded", "decode"):
        assert torch.equal(hidden, ~seen[:, None].expand(hidden.shape))


@pytest.mark.parametrize("op", ["dense", "padded", "decode", "paged", "mla", "paged_packed"])
def test_nothing_is_left_before_the_windows(op: str) -> None:
    call = random_call(problem(op, "window_before"), seed=1)
    view = dense_view(call)
    seen = view.keep.any(dim=2)[:, 0]
    for b in range(call.problem.batch):
        if seen[b].any():
            first = int(seen[b].int().argmax())
            length = call.problem.seq_k if call.seqlens_k is None else int(call.seqlens_k[b])
            assert first <= length + int(0 if call.leftpad_k is None else call.leftpad_k[b])
    assert torch.equal(dense_view(random_call(problem(op, "window_before"), seed=1, strides="spare")).k, view.k)
    plain = random_call(problem(op), seed=1)
    assert int(poisoned(call).sum()) > int(poisoned(plain).sum())


@pytest.mark.parametrize("op", ["dense", "decode", "paged", "mla", "varlen"])
@pytest.mark.parametrize("feature", ["mask", "bias"])
def test_keys_that_are_hidden_from_all_rows_hold_nan(op: str, feature: str) -> None:
    more = 0
    for seed in range(8):
        call, plain = random_call(problem(op, feature), seed), random_call(problem(op), seed)
        assert not (poisoned(plain) & ~poisoned(call)).any()
        more += int(poisoned(call).sum()) > int(poisoned(plain).sum())
        if op in ("dense", "decode"):  # keys lie by position
            shown = call.mask if feature == "mask" else ~call.bias.isneginf()
            hidden = ~shown.any(dim=2).view(3, 2, 2, -1).any(dim=2)  # of 4 heads each two share keys
            assert torch.equal(poisoned(call), hidden | poisoned(plain))
    assert more


@pytest.mark.parametrize("op", OPS)
def test_keys_and_values_are_poisoned_apart(op: str) -> None:
    """Where one of both holds NaN, the other is a number in a third of the places; or everywhere, where that is asked.
    Of a latent row the key alone has what lies behind its values."""
    p = problem(op, "plain" if "sparse" in op else "window_before")
    calls = {poison: random_call(p, 1, extremes=True, poison=poison) for poison in ("apart", "k", "v")}
    tails = {name: call.k[..., call.v.shape[3] if "mla" in op else 0 :] for name, call in calls.items()}
    in_k = {name: tail.isnan().all(dim=3) for name, tail in tails.items()}
    in_v = {name: call.v.isnan().all(dim=3) for name, call in calls.items()}
    queries = {name: call.q.isnan().all(dim=3).all(dim=1) for name, call in calls.items()}
    assert not queries["v"].any()
    assert not (queries["apart"] & ~queries["k"]).any()
    if op == "padded":  # packed rows of no sequence are few
        assert queries["apart"].any()
        assert (queries["k"] & ~queries["apart"]).any()
    assert not in_v["k"].any()
    assert not in_k["v"].any()
    assert torch.equal(in_k["k"], in_v["v"])
    assert torch.equal(in_k["apart"] | in_v["apart"], in_k["k"])
    for kind in (in_k["apart"] & in_v["apart"], in_k["apart"] & ~in_v["apart"], in_v["apart"] & ~in_k["apart"]):
        assert kind.any()


@pytest.mark.parametrize("feature", ["mask", "bias"])
def test_four_seeds_have_four_broadcast_shapes(feature: str) -> None:
    held = set()
    for seed in range(4):
        call = random_call(problem("dense", feature), seed)
        held.add(tuple(stride != 0 for stride in getattr(call, feature).stride()))
    assert held == {
        (True, True, True, True), (False, False, True, True), (True, False, False, True), (False, True, False, False),
    }  # fmt: skip


def test_alibi_slopes_are_per_head_or_per_sequence() -> None:
    assert random_call(problem("dense", "alibi"), 0).alibi_slopes.stride(0) == 0
    assert random_call(problem("dense", "alibi"), 1).alibi_slopes.unique(dim=0).shape[0] == 3


@pytest.mark.parametrize("op", ["sparse", "sparse_paged"])
def test_chosen_tokens_are_of_every_kind(op: str) -> None:
    call = random_call(problem(op, "log_weights", batch=4), seed=1, extremes=True)
    counted = torch.arange(12) < call.counts[..., None]
    token, length = call.indices, call.seqlens_k[:, None, None]
    assert (int(call.counts[0, 0]), int(call.counts[-1, -1])) == (12, 0)
    assert (token[counted] < 0).any()
    assert ((token >= length) & counted).any()
    assert ((token >= 0) & (token < length) & ~counted).any()
    assert torch.equal(call.log_weights.isnan(), ~(counted & (token >= 0) & (token < length)))
    assert (call.log_weights == float("-inf")).any()
    chosen = token[0, 0][(token[0, 0] >= 0) & (token[0, 0] < length[0, 0])]
    assert len(chosen.unique()) in (len(chosen), len(chosen) - 1)
    # Where a key holds a number, some head of its group has chosen it.
    if op == "sparse":
        listed = torch.zeros(4, 2, 29, dtype=torch.bool)
        for b, h in torch.cartesian_prod(torch.arange(4), torch.arange(4)).tolist():
            weighed = call.log_weights[b, h] > float("-inf")
            real = token[b, h][counted[b, h] & (token[b, h] >= 0) & (token[b, h] < length[b, 0, 0]) & weighed].long()
            listed[b, h // 2, real] = True
        assert torch.equal(poisoned(call), ~listed)


def test_some_keys_resemble_their_query_and_some_do_not() -> None:
    view = dense_view(random_call(problem("sparse", "magicpig", tokens=29, head_dim=64), seed=0))
    cosine = torch.nn.functional.cosine_similarity(view.q, view.k, dim=3)[view.keep[:, :, 0]]
    assert (cosine > 0.45).any()
    assert (cosine < 0.2).any()


@pytest.mark.parametrize("page_layout", ["phd", "hpd"])
@pytest.mark.parametrize("op", ["paged", "sparse_paged"])
def test_combined_caches_are_halves_of_one(op: str, page_layout: str) -> None:
    p = problem(op, page_layout=page_layout, head_dim_v=16)
    call = random_call(p, seed=1, strides="combined")
    assert call.k.untyped_storage().data_ptr() == call.v.untyped_storage().data_ptr()
    inner = call.k if page_layout == "hpd" else call.k.transpose(1, 2)
    assert inner[0].is_contiguous()
    assert call.k.stride(0) == 2 * call.k[0].numel()
    assert call.v.storage_offset() == call.k[0].numel()
    plain = random_call(p, seed=1)
    assert same(call.k, plain.k)
    assert same(call.v, plain.v)


@pytest.mark.parametrize("op", ["dense", "decode", "varlen", "mla", "paged"])
def test_what_cannot_be_combined_is_refused(op: str) -> None:
    with pytest.raises(ValueError, match="combined"):  # paged: V is wider than K
        random_call(problem(op), strides="combined")


def test_a_capacity_of_broken_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="seq_k 41"):
        random_call(problem("paged", seq_k=41))


@pytest.mark.parametrize("strides", ["plain", "spare", "transposed", "sliced"])
@pytest.mark.parametrize("op", ["mla", "mla_packed"])
def test_latent_values_are_the_keys_memory(op: str, strides: str) -> None:
    call = random_call(problem(op), seed=1, strides=strides)
    assert (call.v.data_ptr(), call.v.stride(), call.v.shape[3]) == (call.k.data_ptr(), call.k.stride(), 16)


@pytest.mark.parametrize(("page_layout", "strides"), [("phd", (256, 16, 32, 1)), ("hpd", (256, 128, 16, 1))])
def test_pages_lie_as_their_layout_says(page_layout: str, strides: tuple[int, ...]) -> None:
    assert random_call(problem("paged", page_layout=page_layout)).k.stride() == strides
    assert 17 in random_call(problem("paged", page_layout=page_layout), strides="spare").k.stride()


@pytest.mark.parametrize(("op", "feature"), CASES)
def test_torch_in_the_same_dtype_is_right_and_not_exact(op: str, feature: str) -> None:
    call = random_call(problem(op, feature, dtype="bf16"), seed=2)
    facts = judge(call, *same_dtype(call))
    assert facts["wrong"] == 0
    assert 0.0 <= facts["error"] < facts["budget"] < 0.3
    assert facts["error"] > 0.0 or feature == "window_of_itself"  # one weight, of exactly 1
    assert facts["lse_error"] < facts["lse_budget"] < 1e-3


@pytest.mark.parametrize(("op", "feature"), CASES)
def test_fewer_bits_in_a_product_widen_the_budget(op: str, feature: str) -> None:
    call = random_call(problem(op, feature), seed=2)
    out, lse = run(call)
    budgets = [judge(call, out, lse, precision)["budget"] for precision in ("ieee", "tf32")]
    assert budgets[0] < 1e-4 < budgets[1] or "magicpig" in feature or feature == "all"
    assert budgets[0] < budgets[1]


@pytest.mark.parametrize("damage", ["unattended", "sink", "outside"])
def test_rows_with_a_sink_and_no_keys_are_judged(damage: str) -> None:
    call = random_call(problem("varlen", "causal", sinks=True, seq_k=7), seed=1, extremes=True)
    out, lse = run(call)
    assert judge(call, out, lse)["wrong"] == 0
    view = dense_view(call)
    lonely = view.restored((view.inside & ~view.some).expand(-1, 4, -1), False)[0, 0]
    assert lonely.any()
    row = int(lonely.int().argmax())
    if damage == "unattended":
        out[0, 0, row, 0] = 1e-30
    elif damage == "sink":
        lse[0, 0, row] = -math.inf
    else:
        lse[0, 0, -1] = 0.0
    assert judge(call, out, lse)["wrong"] == 1
