"""Biases, sinks and weights of tokens as large as float32 goes: finite, and what the oracle and torch's SDPA say. A
score near float32's limits has lost what the key added to it, in float64 too: a row that has only such scores is the
mean of its values."""

import itertools

import pytest
import torch
from kernel_cases import OPS, SPLITTING, problem, run
from support import DTYPES, TILE, Device, assert_right, poisoned, random_call

import portattn
from portattn.reference import blockwise
from portattn.schema.call import Call
from portattn.schema.lowering import CHOICES
from portattn.testing.oracle import oracle

INF = float("inf")
LOWEST, HIGHEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
# How a kernel holds scores, and what it makes of masked ones; then the reference path.
WAYS: dict[str, dict[str, str] | None] = {
    **{f"{exp} {mask}": {"exp": exp, "mask_value": mask} for exp, mask in itertools.product(
        CHOICES["exp"], CHOICES["mask_value"])},
    "reference": None,
}  # fmt: skip
BIASED = ("dense", "padded", "decode", "paged", "mla")
SINKS = (3e38, -3e38, HIGHEST, LOWEST)
LSE_STEPS = 4 * torch.finfo(torch.float32).eps


def results(device: Device, call: Call, way: str, splits: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    lowering = WAYS[way]
    if lowering is not None:
        out, lse = run(device, call, splits, **lowering)
    else:
        with poisoned(), torch.no_grad():
            out, lse = blockwise.run(call)
    assert lse is not None
    return out, lse


def assert_each_right(call: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Also each LSE by its own size: beside one of 1e38 the budget of all would pass anything."""
    assert_right(call, out, lse)
    expected = oracle(call)[1].cpu()
    torch.testing.assert_close(lse.cpu().double(), expected, rtol=LSE_STEPS, atol=1e-5)


def extreme_rows(shape: tuple[int, ...], lowest: float) -> torch.Tensor:
    """Biases (B, Hq, Sq, Sk): rows of five kinds in turn, over heads and queries."""
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat, even = bias.view(-1, shape[-1]), torch.arange(shape[-1]) % 2 == 0
    flat[0::5] = lowest  # every key alike: the mean
    flat[1::5] = flat[1::5].masked_fill(even, lowest)  # the others have all the weight
    flat[2::5, 5] = -lowest  # one key has all the weight
    flat[3::5] = torch.where(even, lowest, lowest * 0.75)  # the higher half has, both are beyond 1e38
    flat[4::5] = torch.where(even, lowest, -INF)  # what is left of a row, and nothing beside it
    return bias


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BIASED)
def test_the_largest_biases(device: Device, name: str, way: str) -> None:
    call = random_call(problem(name, bias=True), 4, device=device.name)
    for x in (call.q, call.k, call.v, call.q_rope):
        if x is not None:
            x.nan_to_num_(0.5)
    call.bias = extreme_rows(tuple(call.bias.shape), LOWEST).to(device.name)
    assert_each_right(call, *results(device, call, way))


@pytest.mark.parametrize("way", ["exp2 -inf", "exp finite", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_the_dtypes_lowest_bias_is_what_sdpa_says(device: Device, dtype: str, way: str) -> None:
    """The mean of the values, nearly so in fp16, whose lowest number leaves something of a score."""
    call = random_call(problem("dense", dtype=dtype, bias=True), 4, device=device.name)
    for x in (call.q, call.k, call.v):
        x.nan_to_num_(0.5)
    call.bias = torch.full(call.bias.shape, torch.finfo(DTYPES[dtype]).min, dtype=DTYPES[dtype], device=device.name)
    out, lse = results(device, call, way)
    assert_each_right(call, out, lse)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.cpu().float() for x in (call.q, call.k, call.v)), attn_mask=call.bias.cpu().float(), scale=call.scale,
        enable_gqa=True,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu().float(), theirs, rtol=0.0, atol=1e-2 if dtype != "fp32" else 1e-5)


@pytest.mark.parametrize("way", ["exp2 -inf", "exp2 finite", "reference"])
@pytest.mark.parametrize(("name", "bias"), [*((name, False) for name in OPS), ("dense", True), ("decode", True)])
def test_the_largest_sinks(device: Device, name: str, bias: bool, way: str) -> None:
    """One takes all the weight or none; a row with nothing to attend has it as its LSE."""
    for first in (0, 2) if OPS[name].get("heads_q", 4) == 2 else (0,):
        call = random_call(problem(name, sinks=True, bias=bias), 4, device=device.name, extremes=True)
        call.sinks = torch.tensor(SINKS[first : first + call.problem.heads_q], device=device.name)
        out, lse = results(device, call, way, 2 if name in SPLITTING else 1)
        assert_each_right(call, out, lse)
        assert bool((lse.abs() > 1e38).any())


@pytest.mark.parametrize("way", ["exp2 -inf", "exp2 finite", "exp -inf", "reference"])
@pytest.mark.parametrize(("name", "bias"), [*((name, False) for name in OPS), ("dense", True), ("decode", True)])
def test_infinite_sinks(device: Device, name: str, bias: bool, way: str) -> None:
    """+inf takes all the weight, -inf none: out is 0 and the LSE +inf, or as without a sink."""
    for sinks in ((INF, -INF, 0.5, HIGHEST), (0.5, INF, -INF, INF)):
        call = random_call(problem(name, sinks=True, bias=bias), 4, device=device.name, extremes=True)
        call.sinks = torch.tensor(sinks[: call.problem.heads_q], device=device.name)
        out, lse = results(device, call, way, 2 if name in SPLITTING else 1)
        assert_each_right(call, out, lse)
        first = call.sinks == INF
        assert not out[:, first].any()
        assert lse.isposinf().any()
        assert not lse[:, ~first].isposinf().any()


@pytest.mark.parametrize("backend", ["auto", "interpreter", "reference"])
@pytest.mark.parametrize("scale", [1e-45, -1e-45, 1e-40, -0.0])
def test_a_scale_below_the_normal_numbers_counts_as_0(device: Device, backend: str, scale: float) -> None:
    if device.name != "cpu" and backend == "interpreter":
        backend = "triton"
    q, k = torch.randn(1, 2, 3, 16, device=device.name), torch.randn(1, 2, 20, 16, device=device.name)
    out, lse = portattn.attention(q, k, k, scale=scale, return_lse=True, backend=backend)
    torch.testing.assert_close(out, k.mean(2, keepdim=True).expand_as(out), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, torch.full_like(lse, 20.0).log())


@pytest.mark.parametrize("backend", ["auto", "interpreter", "reference"])
def test_rows_without_keys_are_0_beside_a_sink_of_nan(device: Device, backend: str) -> None:
    """So are the gradients of their queries; of the LSE and of the other sequence's rows the NaN stays visible."""
    if device.name != "cpu" and backend == "interpreter":
        backend = "triton"
    q, k = (torch.randn(rows, 2, 16, device=device.name, requires_grad=True) for rows in (5, 3))
    sinks = torch.tensor([float("nan"), 0.0], device=device.name)
    begin_q, begin_k = (torch.tensor(rows, dtype=torch.int32, device=device.name) for rows in ([0, 2, 5], [0, 0, 3]))
    out, lse = portattn.varlen_attention(q, k, k, begin_q, begin_k, 3, 3, sinks=sinks, return_lse=True, backend=backend)
    of_q, of_k = torch.autograd.grad(out.sum() + lse.sum(), (q, k))
    for rows in (out, of_q):
        assert not rows[:2].any()
        assert rows[2:, 0].isnan().all()
        assert rows[2:, 1].isfinite().all()
    assert of_k[:, 1].isfinite().all()
    assert lse.isnan().sum() == 5
    lengths = torch.tensor([0], dtype=torch.int32, device=device.name)
    with torch.no_grad():
        cached = portattn.decode_attention(
            q[None, :1].transpose(1, 2), k[None].transpose(1, 2), k[None].transpose(1, 2), lengths, sinks=sinks,
            backend=backend,
        )  # fmt: skip
    assert not cached.any()


@pytest.mark.parametrize("backend", ["auto", "interpreter", "reference"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_beside_infinite_sinks(device: Device, backend: str, with_lse: bool) -> None:
    """Of a head whose sink is +inf, that of the LSE alone: each row's is the sink's."""
    if device.name != "cpu" and backend == "interpreter":
        backend = "triton"
    made = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 3, n, 16, generator=made).to(device.name).requires_grad_() for n in (5, 9, 9)]
    sinks = torch.tensor([INF, -INF, 0.5], device=device.name, requires_grad=True)
    out, lse = portattn.attention(*tensors, sinks=sinks, causal=True, return_lse=True, backend=backend)
    weight = torch.randn(out.shape, generator=made).to(device.name)
    loss = (out * weight).sum() + (lse[:, 1:].sum() + 2.0 * lse[:, 0].sum() if with_lse else 0.0)
    found = torch.autograd.grad(loss, [*tensors, sinks])
    scores = tensors[0].double() @ tensors[1].double().mT * 0.25
    hidden = torch.ones(5, 9, dtype=torch.bool, device=device.name).triu(5)
    column = torch.tensor([1e4, -INF, 0.5], dtype=torch.float64, device=device.name, requires_grad=True)
    scores = torch.cat([scores.masked_fill(hidden, -INF), column[None, :, None, None].expand(1, 3, 5, 1)], dim=3)
    exact = torch.softmax(scores, dim=3)[..., :-1] @ tensors[2].double()
    exact_lse = torch.logsumexp(scores, dim=3)
    exact_loss = (exact * weight).sum()
    exact_loss = exact_loss + (exact_lse[:, 1:].sum() + 2.0 * exact_lse[:, 0].sum() if with_lse else 0.0)
    for ours, expected in zip(found, torch.autograd.grad(exact_loss, [*tensors, column]), strict=True):
        torch.testing.assert_close(ours.double(), expected.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["sparse", "sparse paged"])
def test_the_largest_weights_of_tokens(device: Device, name: str, way: str) -> None:
    call = random_call(problem(name, log_weights=True, sinks=True), 4, device=device.name, extremes=True)
    weights = extreme_rows(tuple(call.log_weights.shape), LOWEST).to(device.name)
    call.log_weights = torch.where(call.log_weights == -INF, -INF, weights)
    call.sinks = torch.tensor([LOWEST, -INF, 0.0, HIGHEST], device=device.name)
    assert_each_right(call, *results(device, call, way))


def mixed_shares(shape: tuple[int, ...], lowest: float) -> torch.Tensor:
    """Biases (B, Hq, Sq, Sk) whose tiles of keys differ: rows of six kinds in turn, over heads and queries."""
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    flat, tile = bias.view(-1, shape[-1]), torch.arange(shape[-1]) // TILE
    first = tile == 0
    flat[0::6] = lowest  # shares of other sizes, which count by their keys
    flat[1::6] = flat[1::6].masked_fill(first, lowest)  # the first share has no weight
    flat[2::6] = flat[2::6].masked_fill(~first, lowest)  # it has all
    flat[3::6] = torch.where(first, -INF, lowest)  # it has nothing to attend
    flat[4::6] = torch.where(first, lowest, -INF)  # the others have nothing
    flat[5::6] = torch.where(first, -lowest, lowest)  # 6.8e38 apart
    return bias


@pytest.mark.parametrize("way", [way for way in WAYS if way != "reference"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in BIASED if name in SPLITTING])
def test_shares_merge_by_maximum_and_sum(device: Device, name: str, dtype: str, way: str) -> None:
    """An LSE of 1e38 would not tell how many keys a share has."""
    fields = {"seqlens_k": False} if name == "decode" else {}
    call = random_call(problem(name, dtype=dtype, bias=True, **fields), 4, device=device.name)
    for x in (call.q, call.k, call.v, call.q_rope):
        if x is not None:
            x.nan_to_num_(0.5)
    bias = mixed_shares(tuple(call.bias.shape), torch.finfo(DTYPES[dtype]).min)
    call.bias = bias.to(device.name, DTYPES[dtype])
    for splits in (2, 3):
        assert_each_right(call, *results(device, call, way, splits))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "reference"])
@pytest.mark.parametrize("name", ["sparse", "sparse paged"])
def test_shares_of_tokens_merge_by_maximum_and_sum(device: Device, name: str, way: str) -> None:
    call = random_call(problem(name, log_weights=True), 4, device=device.name, extremes=True)
    weights = mixed_shares(tuple(call.log_weights.shape), LOWEST).to(device.name)
    call.log_weights = torch.where(call.log_weights == -INF, -INF, weights)  # of such tokens K and V are NaN
    assert_each_right(call, *results(device, call, way, 2))


@pytest.mark.parametrize("size", [LOWEST, -3e38, 3e38, HIGHEST])
def test_states_with_the_largest_lses_merge(size: float) -> None:
    outs, near = [torch.full((1, 3, 4), x) for x in (1.0, 3.0)], torch.zeros(1, 3)
    out, lse = portattn.merge_states(outs, [near + size, near + size])
    assert torch.equal(out, torch.full_like(out, 2.0))
    assert torch.equal(lse, near + size)
    out, lse = portattn.merge_states(outs, [near, near + size])
    assert torch.equal(out, outs[1 if size > 0 else 0])
    assert torch.equal(lse, near + max(size, 0.0))
