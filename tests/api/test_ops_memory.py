"""Values that nobody validated: nothing is read or written outside the storage, and who is not garbage is not touched.
The reference path's indexing raises by itself; under Triton's interpreter every address of every load and store is
checked against the tensors of the launch (opcalls.watched)."""

import random
from typing import Any

import pytest
import torch
from opcalls import CALLS, given, paths, perform, problem, use_small_tiles, watched
from support import Device, poisoned, random_call

import portattn

WILD = (-1, -7, 1000, 2**30, 2**31 - 1, -(2**31))
# Which arguments hold values that are not validated, in each call.
VALUES = (
    "seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k", "cu_seqlens_q", "cu_seqlens_k", "page_table", "indices",
    "counts",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch)


@pytest.fixture
def interpreted(device: Device, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    if device.path != "interpreter":
        pytest.skip("addresses are watched under the interpreter only")
    return monkeypatch


def wild(name: str, tensor: torch.Tensor, seed: int, share: float = 0.5) -> torch.Tensor:
    """The tensor with some values replaced by wild ones, and by others that only look right."""
    chosen = random.Random(f"{name} {seed}")
    values = tensor.flatten().tolist()
    tame = range(max([1, *(v for v in values if 0 <= v < 1000)]) + 1)
    values = [chosen.choice([*WILD, *chosen.choices(tame, k=4)]) if chosen.random() < share else v for v in values]
    return torch.tensor(values, dtype=torch.int32).view(tensor.shape)


def finite(arguments: dict[str, Any]) -> dict[str, Any]:
    """No NaN: garbage may lead to any part of the storage."""
    return {
        n: t.nan_to_num(0.25) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for n, t in arguments.items()
    }


FIELDS: tuple[dict[str, Any], ...] = (
    {}, {"causal": "bottom_right"}, {"causal": "top_left", "window_left": 3}, {"window_left": 5, "window_right": 2},
)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_no_address_leaves_the_tensors(interpreted: pytest.MonkeyPatch, name: str, splits: int, seed: int) -> None:
    op = problem(name).op
    if splits > 1 and op in ("attention", "varlen_attention"):
        pytest.skip("nothing is split")
    fields = {} if op == "sparse_attention" else dict(FIELDS[seed])
    fields |= {"num_splits": splits} if splits > 1 else {}
    fields |= {} if "ragged" in name or op in ("varlen_attention", "sparse_attention") else {"bias": True}
    arguments = finite(given(random_call(problem(name, alibi_slopes=True, **fields), seed)))
    changes = {n: wild(n, arguments[n], seed) for n in VALUES if n in arguments}
    with watched(interpreted) as kernels, poisoned():
        out, lse = perform(op, arguments | changes, backend="interpreter", validate=False)
    assert kernels == [k for k in kernels if k != "combine"] + ["combine"] * (splits > 1)
    assert kernels
    # Tokens are not clamped to the cache but passed over, and rows of no sequence give 0: nothing else is left NaN.
    assert not out.isnan().any()
    assert not lse.isnan().any()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", CALLS)
def test_the_reference_path_takes_anything(name: str, seed: int) -> None:
    op = problem(name).op
    fields = {} if op == "sparse_attention" else dict(FIELDS[seed % len(FIELDS)])
    arguments = finite(given(random_call(problem(name, **fields), seed)))
    changes = {n: wild(n, arguments[n], seed) for n in VALUES if n in arguments}
    with poisoned():
        out, lse = perform(op, arguments | changes, backend="reference", validate=False)
    assert not out.isnan().any()
    assert not lse.isnan().any()


def test_the_watch_sees_what_it_must(interpreted: pytest.MonkeyPatch) -> None:
    """One element less than a tensor has, and the same call is caught, reading and writing."""
    import opcalls

    q, k, v = (torch.zeros(1, 1, rows, 16) for rows in (17, 33, 33))
    with watched(interpreted) as kernels:
        portattn.attention(q, k, v, backend="interpreter")
    assert kernels == ["dense_forward"]
    spans = opcalls.spans
    for shape, what in (((1, 1, 33, 16), "load"), ((1, 1, 17, 8), "store")):
        interpreted.setattr(opcalls, "spans", lambda t, shape=shape: spans(t) - 4 * (t.shape == shape))
        with pytest.raises(Exception, match=f"{what} at byte .*, which has"), watched(interpreted):
            portattn.attention(q, k, torch.zeros(1, 1, 33, 8), backend="interpreter")


PER_SEQUENCE = {
    "attention": ("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k"), "decode": ("seqlens_k", "leftpad_k"),
    "paged": ("seqlens_k", "page_table"), "ragged": ("seqlens_k", "page_table"),
    "sparse": ("seqlens_k", "indices", "counts"), "sparse paged": ("seqlens_k", "indices", "counts", "page_table"),
    "mla": ("seqlens_k", "page_table"), "mla ragged": ("seqlens_k", "page_table"),
}  # fmt: skip


@pytest.mark.parametrize("path", ["reference", "core"])
@pytest.mark.parametrize("name", PER_SEQUENCE)
def test_garbage_stays_with_its_sequence(device: Device, path: str, name: str) -> None:
    """The others give what they give beside a sequence that is none: kernels bit for bit, and the reference path to
    rounding, since the longest sequence decides the shape of its products."""
    call = random_call(problem(name), seed=1, device=device.name)
    p, arguments = call.problem, finite(given(call)) | {"validate": False}
    way = paths(device)[path]
    out, lse = perform(p.op, arguments, **way)
    bad, tolerance = 1, {"atol": 2e-6, "rtol": 1e-5} if path == "reference" else {"atol": 0.0, "rtol": 0.0}
    for seed in range(2):
        changes = {}
        for n in PER_SEQUENCE[name]:
            changes[n] = arguments[n].clone()
            changes[n][bad] = wild(n, arguments[n][bad].cpu(), seed, share=1.0).to(device.name)
        found, found_lse = perform(p.op, arguments | changes, **way)
        for b in (b for b in range(3) if b != bad):
            if p.packed:
                own = slice(*call.cu_seqlens_q[b : b + 2].tolist())
                pairs = (found[own], out[own]), (found_lse[:, own], lse[:, own])
            else:
                pairs = (found[b], out[b]), (found_lse[b], lse[b])
            for one, other in pairs:
                torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("path", ["reference", "core"])
@pytest.mark.parametrize("name", ["varlen", "ragged", "mla ragged"])
def test_an_end_beyond_the_rows_is_the_last_row(device: Device, path: str, name: str) -> None:
    """Of packed sequences only the last can be wild alone: where one begins says where the one before it ends."""
    call = random_call(problem(name), seed=2, device=device.name)
    arguments = finite(given(call)) | {"validate": False}
    way = paths(device)[path]
    for n in ("cu_seqlens_q", "cu_seqlens_k"):
        if n not in arguments:
            continue
        rows = 33 if n == "cu_seqlens_q" else 70
        meant, beyond = arguments[n].clone(), arguments[n].clone()
        meant[-1], beyond[-1] = rows, 2**31 - 1
        most = {n.replace("cu_seqlens", "max_seqlen"): rows} if name == "varlen" else {}
        expected = perform(call.problem.op, arguments | {n: meant} | most, **way)
        found = perform(call.problem.op, arguments | {n: beyond} | most, **way)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("path", ["reference", "core"])
def test_wild_lengths_are_clamped(device: Device, path: str) -> None:
    way = paths(device)[path] | {"validate": False}
    for name in ("attention", "decode", "paged", "ragged", "sparse", "sparse paged", "mla", "mla ragged"):
        call = random_call(problem(name), seed=3, device=device.name)
        p, arguments = call.problem, finite(given(call))
        if p.page_size:
            arguments["page_table"] = arguments["page_table"].clamp(0, 3)
        if "leftpad_k" in arguments:
            arguments["leftpad_k"] = torch.zeros_like(arguments["leftpad_k"])
        wild_ones = torch.tensor([2**31 - 1, -(2**31), p.seq_k + 1], dtype=torch.int32, device=device.name)
        meant = torch.tensor([p.seq_k, 0, p.seq_k], dtype=torch.int32, device=device.name)
        found, expected = (perform(p.op, arguments | {"seqlens_k": n}, **way) for n in (wild_ones, meant))
        assert torch.equal(found[0], expected[0]), name
        assert torch.equal(found[1], expected[1]), name


@pytest.mark.parametrize("path", ["reference", "core"])
def test_wild_page_ids_are_clamped(device: Device, path: str) -> None:
    way = paths(device)[path] | {"validate": False}
    for name in ("paged", "ragged", "sparse paged", "mla", "mla ragged"):
        call = random_call(problem(name), seed=4, device=device.name)
        p, arguments = call.problem, finite(given(call))
        last = call.k.shape[0] - 1
        inside, ids = (torch.full_like(arguments["page_table"], n) for n in (last, 2**31 - 1))
        inside[:, ::2], ids[:, ::2], ids[:, :1] = 0, -5, -(2**31)
        found, expected = (perform(p.op, arguments | {"page_table": t}, **way) for t in (ids, inside))
        assert torch.equal(found[0], expected[0]), name
        assert torch.equal(found[1], expected[1]), name


@pytest.mark.parametrize("path", ["reference", "core"])
@pytest.mark.parametrize("name", ["sparse", "sparse paged"])
def test_wild_counts_are_clamped_and_wild_tokens_passed_over(device: Device, path: str, name: str) -> None:
    way = paths(device)[path] | {"validate": False}
    arguments = finite(given(random_call(problem(name), seed=5, device=device.name)))
    like = arguments["counts"]
    for value, meant in ((2**31 - 1, 20), (21, 20), (-1, 0), (-(2**31), 0)):
        found, expected = (
            perform("sparse_attention", arguments | {"counts": torch.full_like(like, n)}, **way) for n in (value, meant)
        )
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    none = torch.full_like(arguments["indices"], -1)
    for value in (2**31 - 1, -(2**31), 40, 37):
        wild_ones = torch.full_like(arguments["indices"], value)
        if value == 37 and name == "sparse paged":
            arguments["seqlens_k"] = arguments["seqlens_k"].clamp(max=37)
        found, expected = (perform("sparse_attention", arguments | {"indices": t}, **way) for t in (wild_ones, none))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_an_allocator_for_descriptors_is_put_back() -> None:
    """Triton has one for everybody: another library's kernels must not build their descriptors in a handle's memory."""
    triton = pytest.importorskip("triton")
    from triton.runtime import _allocation

    from portattn.launch.run import DescriptorMemory, descriptor_memory

    if not hasattr(triton, "set_allocator"):
        pytest.skip("this Triton has no descriptors")

    def current() -> Any:
        held = _allocation._allocator
        return held.get() if hasattr(held, "get") else held

    before = current()
    with descriptor_memory(DescriptorMemory(torch.device("cpu"), held={})) as _:
        assert isinstance(current(), DescriptorMemory)
        assert current()(256, 16, None) is current()(256, 16, None)
    assert current() is before
    with pytest.raises(RuntimeError, match="planted"), descriptor_memory(DescriptorMemory(torch.device("cpu"))):
        raise RuntimeError("planted")
    assert current() is before

    def theirs(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8)

    triton.set_allocator(theirs)
    try:
        with descriptor_memory(DescriptorMemory(torch.device("cpu"))):
            assert current() is theirs
    finally:
        triton.set_allocator(before)
