"""decode_split and combine against the float64 oracle, and combine alone on partial results that no kernel made."""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import CAUSAL, check, picker
from kernel_cases import problem as named_problem
from support import TILE, assert_right, core_plan, poisoned, problem, random_call, run_core

from portattn.backends.cuda.launch_parts import merging
from portattn.kernels.combine import combine as combine_kernel
from portattn.launch import decode as launch_decode
from portattn.launch import launch_all
from portattn.schema.lowering import CHOICES
from portattn.schema.symbolic_int import next_power_of_two

SMALL = {"op": "decode_attention", "heads_q": 4, "heads_k": 2, "seq_q": 1, "seq_k": 50}
FEATURES = {
    "full": {}, "no_lse": {"return_lse": False}, "mha": {"heads_k": 4},
    "mqa_three_sequences": {"heads_k": 1, "batch": 3, "seqlens_k": True}, "lengths": {"seqlens_k": True},
    "leftpad": {"leftpad_k": True}, "lengths_leftpad_bshd": {"seqlens_k": True, "leftpad_k": True, "layout": "bshd"},
}  # fmt: skip


def decode(**fields):
    return problem(**(SMALL | fields))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features_are_right(device, splits, features):
    call = random_call(decode(**features), seed=1, device=device.name)
    assert_right(call, *run_core(device, call, launch={"splits": splits}))


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("seq_q", [2, 5])
def test_several_queries(device, causal, splits, seq_q):
    p = decode(causal=causal, seq_q=seq_q, seqlens_k=True, leftpad_k=True)
    call = random_call(p, seed=2, device=device.name)
    assert_right(call, *run_core(device, call, launch={"splits": splits}))


@pytest.mark.parametrize("splits", [2, 3, 4, 7, 20])
def test_splits_agree_with_one(device, splits):
    """More splits than key tiles (four) leave some programs with nothing: their share counts for nothing."""
    call = random_call(decode(seq_q=2, causal="bottom_right", leftpad_k=True), seed=4, device=device.name)
    out, lse = run_core(device, call, launch={"splits": 1})
    out_split, lse_split = run_core(device, call, launch={"splits": splits})
    torch.testing.assert_close(out_split, out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse_split, lse, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("seq_k", [31, 32, 33, 34])
@pytest.mark.parametrize("seq_q", [2, 3])
def test_the_first_causal_row_ends_around_a_tiles_end(device, seq_q, seq_k):
    """What is read unmasked must end with the first row's last key."""
    call = random_call(decode(causal="bottom_right", seq_q=seq_q, seq_k=seq_k, batch=1), device=device.name)
    for splits in (1, 2):
        assert_right(call, *run_core(device, call, launch={"splits": splits}))


@pytest.mark.parametrize(
    ("fields", "lengths", "unseen"),
    [({}, [0, 33], 1), ({"seq_q": 5, "causal": "bottom_right"}, [2, 50], 3)], ids=["an empty sequence", "few keys"],
)  # fmt: skip
def test_rows_of_the_first_sequence_see_nothing(device, fields, lengths, unseen):
    call = random_call(decode(seqlens_k=True, **fields), device=device.name)
    call.seqlens_k = torch.tensor(lengths, dtype=torch.int32, device=device.name)
    call.k, call.v = call.k.nan_to_num(0.5), call.v.nan_to_num(0.5)
    for splits in (1, 3):
        out, lse = run_core(device, call, launch={"splits": splits})
        assert_right(call, out, lse)
        assert not out[0, :, :unseen].any()
        assert torch.isneginf(lse[0, :, :unseen]).all()
        assert torch.isfinite(lse[0, :, unseen:]).all()


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seq_q": 0}, {"seq_k": 0}, {"seq_k": 1}, {"seq_k": 16}], ids=str)
def test_empty_and_smallest_sizes(device, sizes):
    call = random_call(decode(**sizes), device=device.name)
    for splits in (1, 2):
        assert_right(call, *run_core(device, call, launch={"splits": splits}))


def test_more_packed_rows_than_a_tile(device):
    call = random_call(decode(heads_q=12, heads_k=2, seq_q=5, causal="bottom_right"), device=device.name)
    assert_right(call, *run_core(device, call, launch={"block_m": 16, "splits": 2}))


@pytest.mark.parametrize("seed", range(10))
def test_random_problems(device, seed):
    pick = picker(2000 + seed)
    heads_k = pick(1, 2, 3)
    p = decode(
        batch=pick(1, 2, 3), heads_k=heads_k, heads_q=heads_k * pick(1, 3, 8), seq_q=pick(1, 1, 2, 7),
        seq_k=pick(*range(1, 70)), head_dim=pick(16, 24, 33), head_dim_v=pick(16, 40), causal=pick(*CAUSAL),
        dtype=pick("fp32", "fp16", "bf16"), seqlens_k=pick(True, False), leftpad_k=pick(True, False),
        layout=pick("bhsd", "bshd"),
    )  # fmt: skip
    call = random_call(p, seed, device=device.name, scale=pick(None, -0.3, 0.8), strides=pick("plain", "spare"))
    assert_right(call, *run_core(device, call, launch={"splits": pick(1, 2, 3, 5), "block_n": pick(16, 32)}))


INF, NAN = float("inf"), float("nan")
LN_2 = math.log(2.0)
SPLITS = (2, 7, launch_decode.CHUNK + 3)


def prepared(device, splits, sinks=False, **lowering):
    """A call, its uninitialised outputs, and what launches combine on them."""
    call = random_call(named_problem("decode", sinks=sinks, seqlens_k=False, leftpad_k=False), 1, device=device.name)
    plan = core_plan(device, call.problem, lowering, {"splits": splits})
    with poisoned():
        outputs = launch_decode.Outputs.of(plan, call)
    launches = launch_decode.combine_calls(plan, call, outputs, cores=3)
    return call, outputs, lambda: launch_all(launches, plan, call.q)


def random_states(outputs):
    """Fills the partial results. Returns each share's maximum and sum, float64 (splits, B, Hq, Sq)."""
    generator = torch.Generator().manual_seed(2)
    shape = outputs.partial.shape[:-1]
    outputs.partial.copy_(torch.randn(outputs.partial.shape, generator=generator))
    maxima = 4.0 * torch.randn(shape, generator=generator)
    sums = 1.0 + 50.0 * torch.rand(shape, generator=generator)
    return maxima.double(), sums.double()


def merged(partial, exponents, sums):
    """The merge in float64. Shares with a sum of 0 are left out; exponents are natural."""
    exponents = exponents.masked_fill(sums == 0.0, -INF)
    base = exponents.amax(0).nan_to_num(neginf=0.0)
    weights = torch.exp(exponents - base) * sums
    total = weights.sum(0)
    partial = partial.double().cpu().masked_fill((sums == 0.0)[..., None], 0.0)
    out = (partial * weights[..., None]).sum(0) / torch.where(total == 0.0, 1.0, total)[..., None]
    return out, base + torch.log(total)


def assert_merged(outputs, exponents, sums):
    out, lse = merged(outputs.partial, exponents, sums)
    torch.testing.assert_close(outputs.out.cpu().double(), out, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(outputs.lse.cpu().double(), lse, rtol=1e-6, atol=2e-6)


@triton.jit
def _nothing():
    tl.static_assert(True)  # the interpreter wants a function that knows the language


@pytest.mark.interpreter
@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize("splits", SPLITS)
def test_a_row_has_several_programs_where_merging_begins_early(device, monkeypatch, splits, head_dim):
    """The interpreter runs one kernel after the other, so that there is nothing to wait for."""
    monkeypatch.setitem(combine_kernel.fn.__globals__, "wait_for_kernel_before", _nothing)
    monkeypatch.setattr(launch_decode, "merge_begins_early", lambda plan: True)
    fields = {"seqlens_k": False, "leftpad_k": False, "head_dim": head_dim, "head_dim_v": head_dim}
    call = random_call(named_problem("decode", **fields), 1, device=device.name)
    plan = core_plan(device, call.problem, {}, {"splits": splits})
    with poisoned():
        outputs = launch_decode.Outputs.of(plan, call)
    (launch,) = launch_decode.combine_calls(plan, call, outputs, cores=3)
    assert launch.constexprs["DEPENDENT"]
    assert launch.grid[1] == next_power_of_two(head_dim) // launch_decode.PART
    maxima, sums = random_states(outputs)
    outputs.partial_state.copy_(torch.stack([maxima, sums], -1))
    launch_all([launch], plan, call.q)
    assert_merged(outputs, maxima * LN_2, sums)


@pytest.mark.parametrize("exp", CHOICES["exp"])
@pytest.mark.parametrize("splits", SPLITS)
def test_weights_are_sums_against_the_largest_maximum(device, splits, exp):
    _, outputs, launch = prepared(device, splits, exp=exp)
    maxima, sums = random_states(outputs)
    outputs.partial_state.copy_(torch.stack([maxima, sums], -1))
    launch()
    assert_merged(outputs, maxima * (LN_2 if exp == "exp2" else 1.0), sums)


@pytest.mark.parametrize("exp", CHOICES["exp"])
@pytest.mark.parametrize("splits", SPLITS)
def test_a_share_that_attended_nothing_has_no_weight(device, splits, exp):
    """Its sum says so. Its maximum and its partial result may be anything."""
    _, outputs, launch = prepared(device, splits, exp=exp)
    maxima, sums = random_states(outputs)
    anything = itertools.cycle([NAN, INF, -INF, torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    for split in range(0, splits, 2):
        maxima[split], sums[split] = next(anything), 0.0
        outputs.partial[split] = next(anything)
    maxima[:, 0, 0, 0], sums[:, 0, 0, 0] = NAN, 0.0  # a row without a key in any share
    outputs.partial[:, 0, 0, 0] = NAN
    outputs.partial_state.copy_(torch.stack([maxima, sums], -1))
    launch()
    assert_merged(outputs, maxima * (LN_2 if exp == "exp2" else 1.0), sums)
    assert not outputs.out[0, 0, 0].any()
    assert outputs.lse[0, 0, 0] == -INF


@pytest.mark.parametrize("exp", CHOICES["exp"])
def test_what_is_not_finite_stays_so(device, exp):
    """A share that attended NaN or infinity: its sum is NaN, whatever its maximum is. One of -inf has no weight."""
    _, outputs, launch = prepared(device, 3, exp=exp)
    maxima, sums = random_states(outputs)
    for head, maximum in enumerate((NAN, INF, -INF)):
        maxima[1, :, head], sums[1, :, head] = maximum, NAN
    maxima[1, :, 3], sums[1, :, 3] = -INF, 1.0  # a sink of -inf that no key followed
    outputs.partial[1, :, 3] = 0.0
    outputs.partial_state.copy_(torch.stack([maxima, sums], -1))
    launch()
    assert outputs.out[:, :3].isnan().all()
    assert outputs.lse[:, :3].isnan().all()
    out, lse = merged(outputs.partial, maxima * (LN_2 if exp == "exp2" else 1.0), sums)
    torch.testing.assert_close(outputs.out[:, 3].cpu().double(), out[:, 3], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(outputs.lse[:, 3].cpu().double(), lse[:, 3], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("splits", SPLITS)
def test_variants_shares_merge_by_their_lses(device, splits):
    """The launch that Hopper's kernels share. A share of -inf counts for nothing, with NaN in its result."""
    call, outputs, _ = prepared(device, splits)
    lses = random_states(outputs)[0]
    lses[0] = -INF
    outputs.partial[0] = NAN
    lses[:, 1] = -INF
    outputs.partial[:, 1] = NAN
    lses[1, 0, 0] = NAN
    tensors = {
        "partial": outputs.partial, "partial_lse": lses.float().to(device.name), "out": outputs.out, "lse": outputs.lse,
    }  # fmt: skip
    step = merging(call.problem, splits, tensors)
    kernel, options = step.kernel, {} if device.path == "interpreter" else dict(step.options)
    options.pop("launch_pdl", None)  # nothing was launched before
    kernel[step.grid](**step.arguments | {"DEPENDENT": False}, **options)
    assert outputs.out[0, 0].isnan().all()
    assert outputs.lse[0, 0].isnan().all()
    out, lse = merged(outputs.partial, lses, torch.isfinite(lses).double())
    torch.testing.assert_close(outputs.out[:, 1:].cpu().double(), out[:, 1:], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(outputs.lse[:, 1:].cpu().double(), lse[:, 1:], rtol=1e-6, atol=2e-6)


def test_the_largest_sink_is_the_lse(device):
    """Scores in base 2 cannot hold it, so its state has it as it is (sink_score), and so has the LSE."""
    call, outputs, launch = prepared(device, 3, sinks=True, exp="exp2")
    call.sinks.copy_(torch.tensor([3e38, -3e38, 0.0, 0.5]))
    maxima, sums = random_states(outputs)
    for head, score in enumerate((3e38, -3e38)):
        maxima[0, :, head], sums[0, :, head] = score, 1.0
    sums[1:, :, 1] = 0.0
    outputs.partial[0, :, :2] = 0.0
    outputs.partial_state.copy_(torch.stack([maxima, sums], -1))
    launch()
    assert outputs.lse[:, 0].eq(3e38).all()
    assert outputs.lse[:, 1].eq(-3e38).all()
    assert outputs.out[:, :2].eq(0.0).all()
    out, lse = merged(outputs.partial, maxima * LN_2, sums)
    torch.testing.assert_close(outputs.out[:, 2:].cpu().double(), out[:, 2:], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(outputs.lse[:, 2:].cpu().double(), lse[:, 2:], rtol=1e-6, atol=2e-6)


ONE = {"batch": 1, "heads_q": 1, "heads_k": 1}


@pytest.mark.parametrize("name", ["dense", "decode"])
@pytest.mark.parametrize("pipeline", ["plain", "rotated"])
def test_windows_that_begin_around_a_tiles_end(device, name, pipeline):
    """Windows of two to three tiles: some hold a tile for all rows, and all have edges before and after it."""
    rows = 18 if name == "dense" else 3
    for left in range(2 * TILE, 3 * TILE):
        fields = ONE | {"seq_q": rows, "seq_k": 75, "causal": "bottom_right", "window_left": left}
        if name == "decode":
            fields |= {"seqlens_k": False, "leftpad_k": False}
        check(device, random_call(named_problem(name, **fields), left, device=device.name), pipeline=pipeline)


@pytest.mark.parametrize("pipeline", ["plain", "rotated"])
def test_rows_that_end_around_a_tiles_end(device, pipeline):
    for seq_k in range(2 * TILE, 3 * TILE):
        p = named_problem("dense", **ONE, seq_q=TILE + 2, seq_k=seq_k, causal="bottom_right")
        check(device, random_call(p, seq_k, device=device.name), pipeline=pipeline)


@pytest.mark.parametrize("splits", [17, 21])
def test_more_splits_than_are_merged_at_a_time(device, splits):
    """The largest scores are in the last split, which the merging kernel reads in a second step."""
    fields = {"seq_q": 1, "seq_k": splits * TILE - 5, "batch": 1, "seqlens_k": False, "leftpad_k": False}
    call = random_call(named_problem("decode", **fields), 1, device=device.name)
    call.k[:, :, -TILE + 5 :] *= 4.0
    check(device, call, splits)
