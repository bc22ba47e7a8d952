"""merge = "last" on an accelerator, where programs finish in any order: every repeat, stream and replay alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import portattn
from portattn import corepath, dispatch
from portattn.lowering import Lowering

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("core_only")]

B, HQ, HK, D, PAGE, S = 4, 32, 8, 128, 16, 2048
REPEATS = 2_000
Pieces = tuple[torch.Tensor, ...]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def integers(seed: int, low: int, high: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int32).to("cuda")


def data(name: str, seed: int = 0, batch: int = B, length: int = S) -> dict[str, Any]:
    """Arguments of an operation; sequence 0 has no keys."""
    lengths = integers(seed, 1, length, batch)
    lengths[0] = 0
    cache = {"k_cache": normal(1, batch, HK, length, D), "v_cache": normal(2, batch, HK, length, D)}
    table = torch.randperm(batch * length // PAGE, generator=torch.Generator().manual_seed(seed)).int().cuda()
    paged = {"seqlens_k": lengths, "page_table": table.view(batch, -1)}
    pages = {"k_pages": normal(1, table.numel(), PAGE, HK, D), "v_pages": normal(2, table.numel(), PAGE, HK, D)}
    cuts = torch.tensor([0, 3, 3, 20, 37][: batch + 1], dtype=torch.int32, device="cuda")
    return {
        "decode": lambda: {"q": normal(0, batch, HQ, 1, D), **cache, "seqlens_k": lengths},
        "decode with sinks": lambda: {
            "q": normal(0, batch, HQ, 3, D), **cache, "seqlens_k": lengths, "causal": True, "sinks": normal(3, HQ),
        },
        "paged": lambda: {"q": normal(0, batch, HQ, 1, D), **pages, **paged},
        "ragged": lambda: {"q": normal(0, 37, HQ, D), **pages, **paged, "cu_seqlens_q": cuts, "causal": True},
        "mla": lambda: {
            "q_nope": normal(0, batch, HQ, 1, 512), "q_rope": normal(5, batch, HQ, 1, 64),
            "kv_pages": normal(1, table.numel(), PAGE, 576), "scale": 0.1, **paged,
        },
        "sparse": lambda: {
            "q": normal(0, batch, HQ, 1, D), **cache,
            "indices": integers(seed, -1, length - 1, batch, HQ, 300), "counts": integers(seed + 1, 0, 300, batch, HQ),
        },
    }[name]() | {"return_lse": True, "num_splits": 7}  # fmt: skip


NAMES = ("decode", "decode with sinks", "paged", "ragged", "mla", "sparse")
OPS = {"ragged": "paged_attention"}


def perform(name: str, arguments: dict[str, Any]) -> Pieces:
    result: Pieces = getattr(portattn, OPS.get(name, f"{name.split()[0]}_attention"))(**arguments)
    return result


@pytest.fixture
def merge(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has plans merge so from now on."""

    def choose(value: Any) -> None:
        monkeypatch.setattr(corepath, "Lowering", lambda: Lowering(merge=value))
        dispatch.forget_plans()

    return choose


@pytest.fixture
def expected(merge: Callable[[str], None]) -> Callable[[str, dict[str, Any]], Pieces]:
    """What the first call with "last" gives, which is what a launch merges but for the order of its sums."""

    def found(name: str, arguments: dict[str, Any]) -> Pieces:
        merge("launch")
        by_launch = perform(name, arguments)
        merge("last")
        first = perform(name, arguments)
        plan = portattn.last_plan()
        assert plan is not None
        assert (plan.path, plan.specialised[0].merge, plan.specialised[1].splits) == ("triton", "last", 7)
        torch.testing.assert_close(first[0], by_launch[0], atol=1e-6, rtol=8e-3)  # one unit in bf16's last place
        torch.testing.assert_close(first[1], by_launch[1], atol=1e-5, rtol=1e-5)
        return first

    return found


def same(found: Pieces, expected: Pieces) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def differing(found: Pieces, expected: Pieces) -> torch.Tensor:
    """How many elements differ, on the device: nothing waits between two repeats."""
    return sum(
        ((one != other).sum() for one, other in zip(found, expected, strict=True)), torch.zeros((), device="cuda")
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_repeat_gives_the_same_bits(name: str, expected: Callable[..., Pieces]) -> None:
    arguments = data(name)
    first = expected(name, arguments)
    wrong = torch.zeros((), device="cuda")
    for _ in range(REPEATS):
        wrong += differing(perform(name, arguments), first)
    assert wrong.item() == 0


@pytest.mark.parametrize("name", NAMES)
def test_launches_of_two_streams_overlap(name: str, expected: Callable[..., Pieces]) -> None:
    both = [data(name, seed) for seed in (0, 1)]
    firsts = [expected(name, arguments) for arguments in both]
    streams = [torch.cuda.Stream() for _ in both]
    wrongs = [torch.zeros((), device="cuda") for _ in both]
    torch.cuda.synchronize()
    for _ in range(REPEATS // 4):
        for stream, arguments, first, wrong in zip(streams, both, firsts, wrongs, strict=True):
            with torch.cuda.stream(stream):
                wrong += differing(perform(name, arguments), first)
    torch.cuda.synchronize()
    assert [wrong.item() for wrong in wrongs] == [0, 0]


def test_threads_with_streams_of_their_own(expected: Callable[..., Pieces]) -> None:
    arguments = data("decode")
    first, seen = expected("decode", arguments), []
    torch.cuda.synchronize()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            wrong = torch.zeros((), device="cuda")
            for _ in range(200):
                wrong += differing(perform("decode", arguments), first)
            seen.append(wrong.item())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [0] * 4


@pytest.mark.parametrize("how", ["plain", "prepared"])
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_call_replays_beside_others(name: str, how: str, expected: Callable[..., Pieces]) -> None:
    """On another stream than the one that it was captured on, while calls of the same kind run on that one."""
    arguments = data(name)
    first = expected(name, arguments)
    run: Callable[[], Pieces] = lambda: perform(name, arguments)  # noqa: E731
    if how == "prepared":
        handle = portattn.prepare(OPS.get(name, f"{name.split()[0]}_attention"), **arguments)
        out, lse = (torch.empty_like(t) for t in first)
        run = lambda: handle.run(**arguments, out=out, lse=lse)  # noqa: E731
    same(run(), first)
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    results = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append([run(), run()])  # a graph may hold several
        if how == "prepared":
            break  # one piece of memory for partial results: one graph at a time
    streams = [torch.cuda.Stream() for _ in results]
    wrong = torch.zeros((), device="cuda")
    for _ in range(100):
        for stream, graph in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        if how == "plain":
            wrong += differing(run(), first)
    torch.cuda.synchronize()
    assert wrong.item() == 0
    for replayed in results:
        for found in replayed:
            same(found, first)


def test_counters_are_0_between_launches(expected: Callable[..., Pieces]) -> None:
    from portattn.launch import counters

    for name in NAMES:
        expected(name, data(name))
    torch.cuda.synchronize()
    (device,) = counters._of_device.values()
    taken = [next(turns) for turns in device._of_stream.values() for _ in range(counters.TURNS)]
    assert taken
    assert not any(one.any() for one in taken)
    assert not device._captured.any()
