"""Merging partial results and adding up gradients: the kernels and torch's operations against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import support
import torch

import portattn
from portattn.distributed import merging
from portattn.distributed.partials import packed
from portattn.launch.run import load_kernels

INF = math.inf


@pytest.fixture(params=["kernel", "torch"])
def device(request: pytest.FixtureRequest, device: support.Device, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors are; merging.py takes the kernels, or torch's operations."""
    monkeypatch.setattr(merging, "can_fuse", lambda _: request.param == "kernel")
    if device.path == "interpreter":
        monkeypatch.setattr(merging, "load_kernels", lambda module, _: load_kernels(module, interpreted=True))
    return device.name


def exact(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, rows of parts at -inf counting nothing."""
    lse = torch.logsumexp(torch.stack([part.double() for part in lses]), 0)
    total = torch.zeros(outs[0].shape, dtype=torch.float64, device=outs[0].device)
    for out, part in zip(outs, lses, strict=True):
        share = torch.exp(part.double() - lse.masked_fill(lse.isneginf(), 0.0))[..., None]
        total += torch.where(part.isneginf()[..., None], 0.0, out.double()) * share
    return total, lse


def parts(device: str, dtype: torch.dtype, sizes: tuple[int, ...], count: int) -> list[tuple[torch.Tensor, ...]]:
    """Partial results; each has rows that attended nothing, which hold NaN, and row 0 attended nothing in any."""
    generator = torch.Generator().manual_seed(len(sizes) + count)
    found = []
    for place in range(count):
        out = torch.randn(sizes, generator=generator).to(dtype)
        lse = 20 * torch.randn(sizes[:-1], generator=generator)
        for row in {0, place + 1}:
            lse[..., row] = -INF
            out[..., row, :] = math.nan
        found.append((out.to(device), lse.to(device)))
    return found


def near(ours: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> bool:
    """Log-sum-exps are up to 80 here, and float32 has 64 units in the last place of 1 there."""
    limit = (torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps) * float(right.abs().max())
    return float((ours.double() - right).abs().max()) <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_parts_of_rows_are_merged_as_they_come(device: str, dtype: torch.dtype, wide: bool) -> None:
    first, second = parts(device, dtype, (2, 3, 21, 24), 2)
    first[0][:, :, 0] = 0.0  # as local calls return what attended nothing
    merged = merging.StateMerger((2, 3, 21, 24), dtype, torch.device(device), 3 if wide else 2)
    merged.add((0, 21), first[0].masked_fill(first[1].isneginf()[..., None], 0.0), first[1].clone())
    # Rows 5 to 20 alone, of another layout.
    some = second[0][:, :, 5:20].transpose(1, 2).contiguous().transpose(1, 2)
    merged.add((5, 20), some.clone(), second[1][:, :, 5:20].clone())
    merged.finish()
    right, lse = exact([first[0][:, :, 5:20], some], [first[1][:, :, 5:20], second[1][:, :, 5:20]])
    assert merged.out.dtype is (torch.float32 if wide else dtype)
    assert near(merged.out[:, :, 5:20], right, torch.float32 if wide else dtype)
    assert torch.allclose(merged.lse[:, :, 5:20].double(), lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(merged.out[:, :, 20:], first[0][:, :, 20:].to(merged.out.dtype))
    assert not merged.out[:, :, 0].any()
    assert merged.lse[:, :, 0].isneginf().all()


def test_rows_without_a_part_give_nothing(device: str) -> None:
    merged = merging.StateMerger((1, 2, 8, 16), torch.float32, torch.device(device), 2)
    (part,) = parts(device, torch.float32, (1, 2, 4, 16), 1)
    merged.add((2, 6), part[0].clone(), part[1].clone())
    assert merged.lse[:, :, [0, 1, 6, 7]].isneginf().all()
    assert not merged.out[:, :, [0, 1, 2, 3, 6, 7]].any()
    assert torch.equal(merged.out[:, :, 4:6], part[0][:, :, 2:])
    nothing = merging.StateMerger((1, 2, 0, 16), torch.float32, torch.device(device), 0)
    nothing.finish()
    assert nothing.out.shape == (1, 2, 0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_ranks_sent_is_merged(device: str, dtype: torch.dtype, count: int) -> None:
    found = parts(device, dtype, (3, 2, 9, 5), count)  # 5 elements: a row of bf16 ends within a word
    words = torch.stack([packed(out, lse) for out, lse in found])
    out, lse = merging.merge_words(words, 5, dtype)
    right, right_lse = exact([out for out, _ in found], [lse for _, lse in found])
    assert out.dtype is dtype
    assert out.is_contiguous()
    assert near(out, right, dtype)
    assert torch.allclose(lse.double(), right_lse, rtol=1e-6, atol=1e-6)
    assert lse[..., 0].isneginf().all()
    assert merging.merge_words(words[:, :, :0], 5, dtype)[0].shape == (3, 0, 9, 5)


@pytest.mark.parametrize("apart", [200.0, -200.0])
def test_parts_far_apart_are_merged_without_an_overflow(device: str, apart: float) -> None:
    """exp(200) is no float32: each part is weighed against the largest log-sum-exp."""
    found = [(out, lse + i * apart) for i, (out, lse) in enumerate(parts(device, torch.float32, (3, 2, 9, 5), 3))]
    out, lse = merging.merge_words(torch.stack([packed(*one) for one in found]), 5, torch.float32)
    right, right_lse = exact([out for out, _ in found], [lse for _, lse in found])
    assert near(out, right, torch.float32)
    assert torch.allclose(lse.double(), right_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "most"), [([], 0), ([(0, 0)], 0), ([(0, 4), (4, 8)], 1), ([(0, 8), (2, 4), (3, 9), (4, 5)], 3)]
)
def test_most_parts_of_a_row(rows: list[tuple[int, int]], most: int) -> None:
    assert merging.most_parts(rows) == most


def test_sums_of_two_parts_are_those_of_float32() -> None:
    """Bit for bit, in half the memory; of three parts the sum is float32."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(1, 2, 64, 8, generator=generator).bfloat16() for _ in range(3))

    def summed(count: int, *given: tuple[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        found: Any = merging.Sum(a, count)
        for rows, part in given:
            found.add(rows, part.clone())
        return found.result(torch.device("cpu"))

    assert torch.equal(summed(2, ((0, 64), a), ((0, 64), b)), (a.float() + b.float()).bfloat16())
    assert torch.equal(summed(2, ((0, 32), a[:, :, :32]), ((32, 64), b[:, :, 32:]))[:, :, 32:], b[:, :, 32:])
    right = (a.float() + b.float() + c.float()).bfloat16()
    assert torch.equal(summed(3, ((0, 64), a), ((0, 64), b), ((0, 64), c)), right)
    assert not torch.equal((a + b) + c, right)
    assert not summed(2).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["kernel"], indirect=True)
def test_a_pause_writes_nothing(device: str, dtype: torch.dtype) -> None:
    memory = torch.full((4,), 7.0, dtype=dtype, device=device)
    merging.load_kernels("portattn.kernels.pause", False).pause[(1,)](memory, 0.0, 50)
    assert (memory == 7.0).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on this device")
def test_a_device_on_which_no_kernel_runs_is_said_once_and_torch_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    merging.can_fuse.cache_clear()
    try:
        with pytest.warns(
            portattn.FallbackWarning, match=r"merged by torch's operations: kernels do not run on cuda:0"
        ):
            assert not merging.can_fuse(torch.device("cuda", 0))
        assert not merging.can_fuse(torch.device("cuda", 0))
    finally:
        merging.can_fuse.cache_clear()


def test_a_sink_without_weight_changes_nothing() -> None:
    """A sink of -inf, of rows with keys and of rows without."""
    out, lse = torch.randn(1, 2, 3, 4), torch.tensor([[[0.5, -torch.inf, 2.0]] * 2])
    out[:, :, 1] = 0.0
    sum_ = merging.StateMerger((1, 2, 3, 4), torch.float32, torch.device("cpu"), 1)
    sum_.add((0, 3), out.clone(), lse.clone())
    sum_.count_sinks(torch.tensor([-torch.inf, -torch.inf]), None)
    torch.testing.assert_close(sum_.out, out)
    torch.testing.assert_close(sum_.lse, lse)
