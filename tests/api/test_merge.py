"""merge_states: parts of the keys, merged, are all of them."""

import itertools
from typing import Any

import pytest
import torch
from support import DTYPES, Device
from torch import zeros

import portattn

NAN, INF = float("nan"), float("inf")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return portattn.attention(q, k, v, return_lse=True, **rest)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(scores, dim=-1) @ v.double(), torch.logsumexp(scores, dim=-1)


def parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: tuple[int, ...]) -> list[tuple[torch.Tensor, ...]]:
    return [attend(q, *pair) for pair in zip(k.split(sizes, 2), v.split(sizes, 2), strict=True)]


@pytest.mark.parametrize("sizes", [(30,), (13, 17), (1, 28, 1), (0, 30), (10, 0, 0, 20), (1,) * 30], ids=str)
def test_parts_in_any_order_are_the_whole(sizes: tuple[int, ...]) -> None:
    q, k, v = normal(2, 4, 5, 16), normal(2, 4, 30, 16, seed=1), normal(2, 4, 30, 24, seed=2)
    expected, expected_lse = exact(3 * q, k, v)
    pieces = parts(3 * q, k, v, sizes)
    for order in itertools.islice(itertools.permutations(pieces), 6):
        out, lse = portattn.merge_states(*zip(*order, strict=True))
        assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_outs_of_16_bits_are_rounded_once(dtype: str) -> None:
    """The sum runs in float32: many equal parts give each part again, exactly."""
    out = normal(3, 8).to(DTYPES[dtype])
    lse = normal(3, seed=1)
    merged, merged_lse = portattn.merge_states([out] * 64, [lse] * 64)
    assert merged.dtype == DTYPES[dtype]
    assert torch.equal(merged, out)
    torch.testing.assert_close(merged_lse, lse + torch.log(torch.tensor(64.0)))
    q, k, v = (t.to(DTYPES[dtype]) for t in (normal(2, 4, 5, 16), normal(2, 4, 30, 16), normal(2, 4, 30, 16)))
    found, _ = portattn.merge_states(*zip(*parts(q, k, v, (13, 17)), strict=True))
    torch.testing.assert_close(found, exact(q, k, v)[0].to(found.dtype), atol=2e-2 if dtype == "bf16" else 2e-3, rtol=0)


def test_lses_far_apart_neither_overflow_nor_vanish() -> None:
    outs = [torch.full((2, 4), float(i)) for i in range(3)]
    for lses in ([-1e4, 3e4, 0.0], [-3e38, -3e38 / 2, -2e38], [200.0, 200.0, -200.0]):
        out, lse = portattn.merge_states(outs, list(torch.tensor(lses)[:, None].expand(3, 2).contiguous()))
        weights = torch.softmax(torch.tensor(lses).double(), dim=0)
        torch.testing.assert_close(out[0, 0].double(), (weights * torch.arange(3.0)).sum(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(
            lse[0].double(), torch.logsumexp(torch.tensor(lses).double(), 0), atol=1e-6, rtol=1e-6
        )


def test_a_part_that_attended_nothing_can_hold_anything() -> None:
    q, k, v = normal(2, 4, 5, 16), normal(2, 4, 30, 16, seed=1), normal(2, 4, 30, 24, seed=2)
    (one, one_lse), (other, other_lse) = parts(q, k, v, (13, 17))
    expected = portattn.merge_states([one, other], [one_lse, other_lse])
    nothing = torch.full_like(one_lse, -INF)
    for value in (NAN, INF, -INF, 3e38):
        garbage = torch.full_like(one, value)
        for place in range(3):
            outs, lses = [one, other], [one_lse, other_lse]
            outs.insert(place, garbage)
            lses.insert(place, nothing)
            found = portattn.merge_states(outs, lses)
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])
    # Only some rows of a part are empty.
    some_lse, some = one_lse.clone(), one.clone()
    some_lse[:, :, 2:], some[:, :, 2:] = -INF, NAN
    out, lse = portattn.merge_states([some, other], [some_lse, other_lse])
    assert torch.equal(out[:, :, :2], expected[0][:, :, :2])
    torch.testing.assert_close(out[:, :, 2:], other[:, :, 2:])
    torch.testing.assert_close(lse[:, :, 2:], other_lse[:, :, 2:])


@pytest.mark.parametrize("count", [1, 3])
def test_rows_that_no_part_attended_give_zero(count: int) -> None:
    garbage = torch.full((2, 5, 8), NAN, dtype=torch.float16)
    out, lse = portattn.merge_states([garbage] * count, [torch.full((2, 5), -INF)] * count)
    assert out.dtype == torch.float16
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full((2, 5), -INF))


def test_a_positive_infinite_lse_is_an_error() -> None:
    """FlashAttention 2 gives it to rows without keys, which have −inf here."""
    out, lse = normal(2, 5, 8), normal(2, 5, seed=1)
    bad = lse.clone()
    bad[1, 3] = INF
    with pytest.raises(
        portattn.ArgumentError,
        match=r"merge_states: lses\[1\]\[1, 3\] is inf, but .*must be below \+inf.*lse\.masked_fill\(lse == inf, -inf",
    ):
        portattn.merge_states([out, out], [lse, bad])
    with pytest.raises(portattn.ArgumentError, match=r"lses\[0\]\[1, 3\]"):
        portattn.merge_states([out], [bad.requires_grad_()])
    with portattn.settings(validate="never"):
        assert portattn.merge_states([out, out], [lse, bad])[0][1, 3].isnan().all()
    mapped = torch.func.vmap(lambda o, one: portattn.merge_states([o], [one])[0])(out, bad.detach())
    assert mapped[1, 3].isnan().all(), "values are not read in a transform"
    compiled = torch.compile(portattn.merge_states, backend="eager", fullgraph=True)
    assert compiled([out, out], [lse, bad.detach()])[0][1, 3].isnan().all()


def test_what_was_attended_stays_visible() -> None:
    """A NaN that has a weight is an answer, and no error of ours to hide."""
    out, lse = normal(2, 5, 8), normal(2, 5, seed=1)
    bad = out.clone()
    bad[0, 0, 0] = NAN
    found, _ = portattn.merge_states([out, bad], [lse, lse])
    assert found.isnan().sum() == 1
    assert found[0, 0, 0].isnan()
    bad_lse = lse.clone()
    bad_lse[1, 2] = NAN
    found, found_lse = portattn.merge_states([out, out], [lse, bad_lse])
    assert found[1, 2].isnan().all()
    assert found_lse[1, 2].isnan()
    assert found.isnan().sum() == 8


def test_one_part_is_itself() -> None:
    out, lse = normal(2, 4, 5, 8), 30.0 * normal(2, 4, 5, seed=1)
    merged, merged_lse = portattn.merge_states([out], [lse])
    assert torch.equal(merged, out)
    assert torch.equal(merged_lse, lse)


def test_tensors_tuples_and_lists_are_one_call() -> None:
    outs, lses = normal(3, 2, 4, 5, 8), normal(3, 2, 4, 5, seed=1)
    expected = portattn.merge_states(outs, lses)
    for given in ((list(outs), list(lses)), (tuple(outs), lses), (outs, tuple(lses))):
        found = portattn.merge_states(*given)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_a_shared_prefix_of_packed_queries() -> None:
    """Cascade attention as its docstring says: all rows over the prefix, each sequence over its own keys."""
    q, k, v = normal(7, 4, 16), normal(12, 2, 16, seed=1), normal(12, 2, 24, seed=2)
    prefix_k, prefix_v = normal(9, 2, 16, seed=3), normal(9, 2, 24, seed=4)

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    cu_q = int32(0, 4, 7)
    shared = portattn.varlen_attention(q, prefix_k, prefix_v, int32(0, 7), int32(0, 9), 7, 9, return_lse=True)
    own = portattn.varlen_attention(q, k, v, cu_q, int32(0, 5, 12), 4, 7, return_lse=True)
    out, lse = portattn.merge_states([shared[0].transpose(0, 1), own[0].transpose(0, 1)], [shared[1], own[1]])
    both_k, both_v = (torch.cat([before, t[:5], before, t[5:]]) for before, t in ((prefix_k, k), (prefix_v, v)))
    expected = portattn.varlen_attention(q, both_k, both_v, cu_q, int32(0, 14, 30), 4, 16, return_lse=True)
    torch.testing.assert_close(out.transpose(0, 1), expected[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected[1], atol=2e-6, rtol=1e-6)


def test_a_sink_goes_with_one_part() -> None:
    q, k, v, sinks = normal(2, 4, 5, 16), normal(2, 4, 30, 16), normal(2, 4, 30, 24), normal(4, seed=5)
    expected = attend(q, k, v, sinks=sinks)
    pieces = [attend(q, k[:, :, :13], v[:, :, :13], sinks=sinks), attend(q, k[:, :, 13:], v[:, :, 13:])]
    torch.testing.assert_close(portattn.merge_states(*zip(*pieces, strict=True)), expected, atol=2e-6, rtol=1e-5)
    # A part that has the sink and nothing else: its out is 0, and its LSE the sink.
    pieces = [attend(q, k[:, :, :0], v[:, :, :0], sinks=sinks), attend(q, k, v)]
    torch.testing.assert_close(portattn.merge_states(*zip(*pieces, strict=True)), expected, atol=2e-6, rtol=1e-5)


def test_gradients_are_those_of_attention_over_all_keys() -> None:
    q, k, v = (t.requires_grad_() for t in (normal(2, 4, 5, 16), normal(2, 4, 30, 16), normal(2, 4, 30, 24)))
    weight_out, weight_lse = normal(2, 4, 5, 24, seed=6), normal(2, 4, 5, seed=7)

    def gradients(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((out * weight_out).sum() + (lse * weight_lse).sum(), (q, k, v))

    merged = portattn.merge_states(*zip(*parts(q, k, v, (13, 0, 17)), strict=True))
    torch.testing.assert_close(gradients(*merged), gradients(*exact(q, k, v)), atol=2e-5, rtol=1e-4)


def test_gradients_by_out_and_by_lse_are_those_of_the_formula() -> None:
    outs, lses = normal(3, 2, 5, 8), 3 * normal(3, 2, 5, seed=1)
    lses[1, 0, 0], lses[:, 1, 4] = -INF, -INF
    weight_out, weight_lse = normal(2, 5, 8, seed=2), normal(2, 5, seed=3)
    there = torch.isfinite(lses).any(dim=0)

    def gradients(merge: Any) -> tuple[torch.Tensor, ...]:
        a, b = outs.clone().requires_grad_(), lses.clone().requires_grad_()
        out, lse = merge(a, b)
        return torch.autograd.grad((out * weight_out).sum() + (lse * weight_lse)[there].sum(), (a, b))

    def formula(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.logsumexp(b.double().masked_fill(~there, 0.0), dim=0)
        return (torch.exp(b.double() - lse)[..., None] * a.double()).sum(dim=0), lse.masked_fill(~there, -INF)

    for ours, theirs in zip(gradients(portattn.merge_states), gradients(formula), strict=True):
        assert not ours.isnan().any()
        torch.testing.assert_close(ours, theirs.to(ours.dtype), atol=1e-5, rtol=1e-4)
        assert not ours[:, 1, 4].any()
        assert not ours[1, 0, 0].any()


def test_inputs_are_not_changed() -> None:
    outs, lses = [torch.full((2, 3), NAN), normal(2, 3)], [torch.full((2,), -INF), normal(2)]
    before = [t.clone() for t in (*outs, *lses)]
    portattn.merge_states(outs, lses)
    for now, then in zip((*outs, *lses), before, strict=True):
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))


def test_empty_rows_and_columns() -> None:
    for shape in ((0, 4, 5, 8), (2, 4, 0, 8), (2, 4, 5, 0)):
        out, lse = portattn.merge_states(torch.zeros(2, *shape), torch.zeros(2, *shape[:-1]))
        assert (tuple(out.shape), tuple(lse.shape)) == (shape, shape[:-1])


OUT, LSE = torch.zeros(2, 5, 8), torch.zeros(2, 5)
BAD: list[tuple[Any, Any, str, str]] = [
    # outs, lses, "argument is value", limit
    ([], [], "outs and lses is (0, 0)", "must be as many, and at least one"),
    (zeros(0, 2, 5, 8), zeros(0, 2, 5), "outs and lses is (0, 0)", "at least one"),
    ([OUT, OUT], [LSE], "outs and lses is (2, 1)", "must be as many"),
    (None, [LSE], "outs is 'NoneType'", "must be a sequence of tensors, or one tensor of them"),
    ([OUT], 3, "lses is 'int'", "must be a sequence of tensors, or one tensor of them"),
    (torch.tensor(1.0), [LSE], "outs is 'Tensor'", "must be a sequence of tensors, or one tensor"),
    ([1.0], [LSE], "outs[0] is 'float'", "must be a torch.Tensor"),
    ([OUT, OUT], [LSE, None], "lses[1] is 'NoneType'", "must be a torch.Tensor"),
    ([OUT, OUT[:, :4]], [LSE, LSE[:, :4]], "outs[1] is ((2, 4, 8), torch.float32, 'cpu')",
     "must be as outs[0], ((2, 5, 8), torch.float32, 'cpu')"),
    ([OUT, OUT.half()], [LSE, LSE], "outs[1] is ((2, 5, 8), torch.float16", "must be as outs[0], ("),
    ([OUT, OUT.to("meta")], [LSE, LSE], "outs[1] is ((2, 5, 8), torch.float32, 'meta')", "'cpu')"),
    ([OUT.int()], [LSE], "outs[0] is ((2, 5, 8), torch.int32)", "must be floating-point, (..., Sq, Dv)"),
    ([OUT[0, 0]], [LSE[0, 0]], "outs[0] is ((8,), torch.float32)", "must be floating-point, (..., Sq, Dv)"),
    ([OUT], [OUT], "lses[0] is ((2, 5, 8), torch.float32, 'cpu')", "must be float32 (2, 5)"),
    ([OUT], [LSE.half()], "lses[0] is ((2, 5), torch.float16, 'cpu')", "must be float32 (2, 5)"),
    ([OUT], [LSE.to("meta")], "lses[0] is ((2, 5), torch.float32, 'meta')", "beside its out"),
    ([OUT, OUT], [LSE, LSE.double()], "lses[1] is ((2, 5), torch.float64, 'cpu')", "must be float32"),
    ([zeros(7, 4, 8)], [zeros(4, 7)], "lses[0] is ((4, 7)", "must be float32 (7, 4)"),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda case: str(case[1]))
def test_errors_name_argument_value_and_limit(bad: tuple[Any, Any, str, str]) -> None:
    outs, lses, what, limit = bad
    with pytest.raises(portattn.ArgumentError) as error:
        portattn.merge_states(outs, lses)
    message = str(error.value)
    assert message.startswith(f"merge_states: {what}"), message
    assert limit in message.partition(", but ")[2], message


@pytest.mark.gpu
def test_it_runs_on_the_device_and_waits_for_nothing(device: Device) -> None:
    q, k, v = (t.cuda() for t in (normal(2, 4, 5, 16), normal(2, 4, 30, 16, seed=1), normal(2, 4, 30, 24, seed=2)))
    pieces = parts(q, k, v, (13, 17))
    portattn.merge_states(*zip(*pieces, strict=True))
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = portattn.merge_states(*zip(*pieces, strict=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.device.type == lse.device.type == "cuda"
    torch.testing.assert_close(out.cpu().double(), exact(q.cpu(), k.cpu(), v.cpu())[0], atol=2e-5, rtol=1e-4)
