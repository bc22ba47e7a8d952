"""On an accelerator, at the sizes of use: graphs replay, nothing waits, nothing is allocated, batches do not matter."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gpucalls
import pytest
import torch
from gpucalls import NAMES, SPLIT, Pieces, a_kernel_ran, data, normal, perform, prepared, same
from opcalls import one_sequence

import portattn
from portattn.testing.tolerance import budget, largest

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPLIT)
def test_a_sequence_is_bit_for_bit_the_same_among_64(monkeypatch, name, dtype):
    """With num_splits=1, at heads of 128, and latent rows of 576: B = 1, 3 and 64 give the same bits."""
    for size, value in LARGE.items():
        monkeypatch.setattr(gpucalls, size, value)
    arguments = data(name, seed=0, batch=64, dtype=dtype) | {"num_splits": 1}
    out, lse = perform(name, arguments)
    assert portattn.last_plan().path in ("triton", "gluon_mla")
    for b in (0, 1, 17, 62, 63):
        found = perform(name, one_sequence(arguments, b))
        if "cu_seqlens_q" in arguments:
            own = slice(*arguments["cu_seqlens_q"][b : b + 2].tolist())
            same(found, (out[own], lse[:, own]))
        else:
            same(found, (out[b : b + 1], lse[b : b + 1]))
    if "cu_seqlens_q" not in arguments:
        few = data(name, seed=0, batch=64, dtype=dtype) | {"num_splits": 1}
        sequences = [n for n, t in few.items() if isinstance(t, torch.Tensor) and t.shape[0] == 64]
        same(perform(name, few | {n: few[n][10:13] for n in sequences}), (out[10:13], lse[10:13]))


# Training calls on an accelerator: every path that kernels take, against the reference path in float32.
WIDTHS = (64, 128, 256, 80)


def tensors(heads_k: int, rows: int, keys: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows + width)
    shapes = ((2, 4, rows, width), (2, heads_k, keys, width), (2, heads_k, keys, width))
    return [torch.randn(s, device="cuda", generator=generator).to(dtype).requires_grad_() for s in shapes]


def close(inputs: list[torch.Tensor], found: Any, call: Any) -> None:
    """Gradients against those of the same values in float32; a bf16 product is off by some 2⁻⁸ of its terms."""
    exact = [t.detach().float().requires_grad_() for t in inputs]
    out = call(exact, "reference")
    towards = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(9))
    expected = torch.autograd.grad(out, exact, towards)
    ours = torch.autograd.grad(found, inputs, towards.to(found.dtype))
    for name, one, right in zip("qkv", ours, expected, strict=False):
        error = (one.float() - right).norm() / right.norm()
        assert error < (2e-2 if inputs[0].dtype is torch.bfloat16 else 4e-3), (name, float(error))


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("fields", [{}, {"causal": True}, {"causal": True, "window": (100, 0)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients(dtype: torch.dtype, fields: dict[str, Any], width: int, backend: str) -> None:
    inputs = tensors(2, 300, 300, width, dtype)

    def call(given: list[torch.Tensor], path: str) -> torch.Tensor:
        return portattn.attention(*given, backend=path, **fields)

    out = call(inputs, backend)
    assert portattn.plan("attention", *inputs, backend=backend, **fields).path not in ("sdpa", "reference")
    close(inputs, out, call)


@pytest.mark.parametrize("width", WIDTHS)
def test_packed_gradients(width: int) -> None:
    generator = torch.Generator("cuda").manual_seed(width)
    inputs = [
        torch.randn(700, heads, width, device="cuda", generator=generator).bfloat16().requires_grad_()
        for heads in (4, 2, 2)
    ]
    ends = torch.tensor([0, 130, 130, 403, 690], dtype=torch.int32, device="cuda")

    def call(given: list[torch.Tensor], path: str) -> torch.Tensor:
        return portattn.varlen_attention(*given, ends, ends, 290, 290, causal=True, backend=path)

    close(inputs, call(inputs, "auto"), call)


def test_float32_and_features() -> None:
    inputs = tensors(2, 200, 260, 64, torch.float32)
    bias = torch.randn(1, 4, 200, 260, device="cuda").requires_grad_()
    slopes = torch.rand(4, device="cuda").requires_grad_()
    sinks = torch.randn(4, device="cuda").requires_grad_()

    def call(given: list[torch.Tensor], path: str) -> torch.Tensor:
        *qkv, b, a, s = given
        return portattn.attention(*qkv, bias=b, alibi_slopes=a, sinks=s, softcap=5.0, causal=True, backend=path)

    everything = [*inputs, bias, slopes, sinks]
    close(everything, call(everything, "auto"), call)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_deterministic_runs_repeat_bit_by_bit(width: int) -> None:
    q, k, v = tensors(2, 1500, 1500, width, torch.bfloat16)
    grad = torch.randn_like(q)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(portattn.attention(q, k, v, causal=True), (q, k, v), grad) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_a_compiled_and_a_checkpointed_call() -> None:
    inputs = tensors(2, 256, 256, 128, torch.bfloat16)

    def call(*given: torch.Tensor) -> torch.Tensor:
        return portattn.attention(*given, causal=True)

    torch.use_deterministic_algorithms(True)  # adding up in turns is what makes runs alike
    try:
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        grad = torch.randn_like(inputs[0])
        expected = torch.autograd.grad(call(*inputs), inputs, grad)
        for one in (compiled(*inputs), torch.utils.checkpoint.checkpoint(call, *inputs, use_reentrant=False)):
            found = torch.autograd.grad(one, inputs, grad)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_dropout_is_the_same_as_on_a_cpu() -> None:
    q, k, v = tensors(2, 130, 140, 64, torch.float32)
    seed = torch.tensor([77])
    found = torch.autograd.grad(
        portattn.attention(q, k, v, dropout_p=0.3, dropout_seed=seed.cuda(), causal=True).sum(), (q, k, v)
    )
    cpu = [t.detach().cpu().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(portattn.attention(*cpu, dropout_p=0.3, dropout_seed=seed, causal=True).sum(), cpu)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), right, atol=2e-3, rtol=2e-3)


def test_a_second_call_launches_what_was_kept() -> None:
    q, k, v = tensors(2, 300, 300, 128, torch.bfloat16)
    for _ in range(2):
        torch.autograd.grad(portattn.attention(q, k, v, causal=True).sum(), (q, k, v))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(portattn.attention(q, k, v, causal=True), (q, k, v), torch.ones_like(q))
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any("backward" in name or "dkdv" in name or "keys" in name for name in names), names
    assert not any("Memcpy DtoH" in name for name in names), "nothing is read back"


# On an accelerator: lists of blocks and tree masks, at sizes at which loops are pipelined, against float64.
SIZE = 128


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q (B, Hq, Sq, D), k and v (B, Hk, Sk, D), seen broadcast to (B, Hq, Sq, Sk): by definition, in a dtype. What
    nobody sees counts as 0; a row that sees nothing gives 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (torch.nan_to_num(x).to(dtype).repeat_interleave(group, 1) for x in (k, v))
    scores = (q.to(dtype) @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ v


def check(out: torch.Tensor, *given: torch.Tensor) -> None:
    exact, same = (attended(*given, dtype) for dtype in (torch.float64, out.dtype))
    assert torch.isfinite(out).all()
    assert largest(out.double() - exact) <= budget(out.dtype, exact, same)


def lists_of(listed: torch.Tensor) -> portattn.BlockMask:
    """(1, H, R, C) bools as lists of whole blocks."""
    counts = listed.sum(-1).int()
    order = (~listed).int().argsort(dim=-1, stable=True).int()
    return portattn.BlockMask(counts, order, block_size=(SIZE, SIZE))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["random", "documents", "single blocks", "nothing"])
@pytest.mark.parametrize(("rows", "keys", "dim"), [(1024, 1024, 128), (700, 1500, 64)])
def test_lists_of_blocks(kind: str, causal: bool, rows: int, keys: int, dim: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 4, rows, dim, device="cuda").bfloat16()
    k, v = (torch.randn(1, 2, keys, dim, device="cuda").bfloat16() for _ in range(2))
    down, across = -(-rows // SIZE), -(-keys // SIZE)
    row, column = torch.arange(down)[:, None], torch.arange(across)
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "random": lambda: torch.rand(1, 4, down, across) < 0.4,
        "documents": lambda: (row // 3 == column // 3).expand(1, 4, -1, -1),
        "single blocks": lambda: (row % 2 == column % 2).expand(1, 4, -1, -1),
        "nothing": lambda: torch.zeros(1, 4, down, across, dtype=torch.bool),
    }
    listed = makers[kind]().cuda()
    seen = listed.repeat_interleave(SIZE, 2).repeat_interleave(SIZE, 3)[:, :, :rows, :keys]
    if causal:
        seen = seen & torch.ones(rows, keys, dtype=torch.bool, device="cuda").tril(keys - rows)
    unseen = ~listed.any(2).any(1).repeat_interleave(SIZE, 1)[:, :keys]  # blocks that no query of any head attends
    for tensor in (k, v):
        tensor[unseen[:, None].expand(1, 2, keys)] = torch.nan
    out = portattn.attention(q, k, v, block_mask=lists_of(listed), causal=causal)
    assert portattn.last_plan().path not in ("reference", "vendor")
    check(out, q, k, v, seen)


def test_lists_change_in_a_graph() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 512, 64, device="cuda").bfloat16() for _ in range(3))
    lists = lists_of(torch.ones(1, 4, 4, 4, dtype=torch.bool, device="cuda"))
    portattn.attention(q, k, v, block_mask=lists)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = portattn.attention(q, k, v, block_mask=lists)
    listed = (torch.rand(1, 4, 4, 4) < 0.5).cuda()
    for kept, new in zip(lists[:2], lists_of(listed)[:2], strict=True):
        kept.copy_(new)  # type: ignore[arg-type]
    graph.replay()
    torch.cuda.synchronize()
    check(out, q, k, v, listed.repeat_interleave(SIZE, 2).repeat_interleave(SIZE, 3))


def trees(batch: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    parents = torch.tensor([[-1] + [int(torch.randint(i, ())) for i in range(1, count)] for _ in range(batch)])
    seen = torch.eye(count, dtype=torch.bool).repeat(batch, 1, 1)
    for b in range(batch):
        for i in range(1, count):
            seen[b, i] |= seen[b, int(parents[b, i])]
    return parents, seen


@pytest.mark.parametrize("count", [4, 16, 64])
def test_trees_over_pages_follow_a_graph(count: int) -> None:
    """Drafted trees are verified; then other trees, lengths and pages in the same graph."""
    torch.manual_seed(0)
    batch, most, page = 8, 1024, 16
    q = torch.randn(batch, 8, count, 128, device="cuda").bfloat16()
    k, v = (torch.randn(batch * most // page, page, 2, 128, device="cuda").bfloat16() for _ in range(2))
    table = torch.randperm(batch * most // page, dtype=torch.int32, device="cuda").view(batch, -1)
    lengths = torch.full((batch,), most, dtype=torch.int32, device="cuda")
    parents, seen = trees(batch, count)
    words = portattn.tree_mask(parents).cuda()

    def run() -> torch.Tensor:
        out = portattn.paged_attention(q, k, v, table, lengths, tree_mask=words)
        assert isinstance(out, torch.Tensor)
        return out

    def check_now(out: torch.Tensor) -> None:
        for b, length in enumerate(lengths.tolist()):
            rows_k, rows_v = (x[table[b].long()].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (k, v))
            shown = torch.ones(count, length, dtype=torch.bool, device="cuda")
            shown[:, length - count :] = seen[b].cuda()
            check(out[b : b + 1], q[b : b + 1], rows_k, rows_v, shown)

    check_now(run())
    assert portattn.last_plan().path not in ("reference", "vendor")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    parents, seen = trees(batch, count)
    words.copy_(portattn.tree_mask(parents))
    lengths.copy_(torch.randint(count, most, (batch,), dtype=torch.int32))
    table.copy_(table.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    check_now(out)
