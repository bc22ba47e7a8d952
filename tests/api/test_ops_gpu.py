"""On an accelerator, at the sizes of use: graphs replay, nothing waits, nothing is allocated, batches do not matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gpucalls
import pytest
import torch
from gpucalls import NAMES, SPLIT, Pieces, a_kernel_ran, data, normal, perform, prepared, same

import portattn

pytestmark = pytest.mark.gpu


def captured(run: Callable[[], Pieces]) -> tuple[Callable[[], None], Pieces]:
    """A graph of the run: what replays it, and the results that it fills."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph.replay, found


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Inside the block torch raises where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("how", ["plain", "prepared"])
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_replays_with_data_changed_in_place(name: str, how: str, splits: int | None) -> None:
    """Lengths, page tables, beginnings, counts, tokens and all values: as a fresh call gives it, bit for bit."""
    if splits and name not in SPLIT:
        pytest.skip("nothing is split")
    changes = {"num_splits": splits} if splits else {}
    arguments = data(name, seed=0)
    run = prepared(name, arguments, **changes) if how == "prepared" else lambda: perform(name, arguments, **changes)
    replay, found = captured(run)
    a_kernel_ran(arguments)
    for seed in (1, 2, 0):
        for n, tensor in data(name, seed).items():
            if isinstance(tensor, torch.Tensor):
                arguments[n].copy_(tensor)
        replay()
        torch.cuda.synchronize()
        results = [t.clone() for t in found]
        same(results, perform(name, data(name, seed), **changes))
        same(results, perform(name, arguments, **changes))


@pytest.mark.parametrize("name", NAMES)
def test_a_second_call_never_waits_for_the_device(name: str) -> None:
    arguments, other = data(name, seed=0), data(name, seed=1)
    run = prepared(name, arguments)
    expected = perform(name, arguments), perform(name, other)
    run()
    with nothing_waits():
        found = perform(name, arguments), perform(name, other)
        results = run()
    same(found[0], expected[0])
    same(found[1], expected[1])
    same(results, expected[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_first_call_waits_only_to_compile(name: str) -> None:
    """Validation reads nothing back by itself: with the kernels compiled, a call of a new shape does not wait."""
    perform(name, data(name, seed=0))
    portattn.api.dispatch.forget_plans()
    arguments = data(name, seed=1)
    with nothing_waits():
        perform(name, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_a_prepared_run_allocates_nothing(name: str) -> None:
    arguments = data(name, seed=0)
    run = prepared(name, arguments, **({"num_splits": 3} if name in SPLIT else {}))
    expected = [t.clone() for t in run()]
    a_kernel_ran(arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    found = run()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    same(found, expected)


def test_a_prepared_run_with_descriptors_allocates_nothing() -> None:
    """Descriptors that a kernel builds for itself live in memory that its launcher provides."""
    q, k, v = (normal(i, 2, 8, 512, 128) for i in range(3))
    handle = portattn.prepare("attention", q, k, v, backend="triton")
    if handle.plan.lowering.load != "descriptor":
        pytest.skip("no descriptor is planned here")
    out = torch.empty_like(q)
    handle.run(q, k, v, backend="triton", out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    handle.run(q, k, v, backend="triton", out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_partial_results_are_reused() -> None:
    arguments = data("decode_attention", seed=0) | {"num_splits": 3}
    handle = portattn.prepare("decode_attention", **arguments)
    buffers = handle._cached.buffers(handle._memory, handle._sizes)
    assert len(buffers) == 2
    for seed in (0, 1):
        for buffer in buffers.values():
            buffer.fill_(float("nan"))
        same(handle.run(**(data("decode_attention", seed) | {"num_splits": 3})),
             perform("decode_attention", data("decode_attention", seed), num_splits=3))  # fmt: skip
        assert not any(buffer.isnan().all() for buffer in buffers.values()), "partial results did not go there"


@pytest.mark.parametrize("name", NAMES)
def test_kernels_and_the_reference_path_agree(name: str) -> None:
    arguments = data(name, seed=3)
    out, lse = perform(name, arguments)
    a_kernel_ran(arguments)
    expected, expected_lse = perform(name, arguments, backend="reference")
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(lse, expected_lse, atol=2e-3, rtol=1e-3)


LARGE = {"D": 128, "HQ": 32, "HK": 8, "RANK": 512, "ROPE": 64, "PAGE": 64, "COLUMNS": 32, "S": 2048}


def alone(arguments: dict[str, Any], b: int) -> dict[str, Any]:
    """Sequence b as a call of its own, over the same pages."""
    found = dict(arguments)
    names = {"page_table", "seqlens_k", "indices", "counts", "log_weights"}
    if "cu_seqlens_q" in found:
        first, end = found["cu_seqlens_q"][b : b + 2].tolist()
        found |= {n: found[n][first:end] for n in ("q", "q_nope", "q_rope") if n in found}
        found["cu_seqlens_q"] = found["cu_seqlens_q"][b : b + 2] - first
    else:
        names |= {"q", "q_nope", "q_rope"}
    if "page_table" not in found:
        names |= {"k_cache", "v_cache"}
    return found | {n: found[n][b : b + 1] for n in names if n in found}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPLIT)
def test_a_sequence_is_bit_for_bit_the_same_among_64(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """With num_splits=1, at heads of 128, and latent rows of 576: B = 1, 3 and 64 give the same bits."""
    for size, value in LARGE.items():
        monkeypatch.setattr(gpucalls, size, value)
    arguments = data(name, seed=0, batch=64, dtype=dtype) | {"num_splits": 1}
    out, lse = perform(name, arguments)
    assert portattn.last_plan().path in ("triton", "gluon_mla")
    for b in (0, 1, 17, 62, 63):
        found = perform(name, alone(arguments, b))
        if "cu_seqlens_q" in arguments:
            own = slice(*arguments["cu_seqlens_q"][b : b + 2].tolist())
            same(found, (out[own], lse[:, own]))
        else:
            same(found, (out[b : b + 1], lse[b : b + 1]))
    if "cu_seqlens_q" not in arguments:
        few = data(name, seed=0, batch=64, dtype=dtype) | {"num_splits": 1}
        sequences = [n for n, t in few.items() if isinstance(t, torch.Tensor) and t.shape[0] == 64]
        same(perform(name, few | {n: few[n][10:13] for n in sequences}), (out[10:13], lse[10:13]))
