"""What must be one and the same answer: packing, paging, splits, batches, and arguments said in two ways. That each
feature is the definition's: test_ops_public.py, against the oracle."""

import math
from typing import Any

import pytest
import torch
from opcalls import CALLS, given, int32, one_sequence, paths, perform, problem, use_small_tiles
from support import Device, random_call

import portattn

PATHS = ["reference", "core"]


@pytest.fixture(params=PATHS)
def way(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    use_small_tiles(monkeypatch)
    return paths(device)[request.param]


@pytest.fixture
def core(device: Device, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    use_small_tiles(monkeypatch)
    return paths(device)["core"]


def close(one: Any, other: Any) -> None:
    """To rounding: in plain float32 products here, and on an accelerator in the split ones that its plans choose."""
    coarse = 10.0 if torch.cuda.is_available() else 1.0
    torch.testing.assert_close(one, other, atol=coarse * 3e-6, rtol=coarse * 1e-5)


def same(one: Any, other: Any) -> None:
    if isinstance(one, tuple):
        for a, b in zip(one, other, strict=True):
            same(a, b)
        return
    bits = {2: torch.int16, 4: torch.int32}[one.element_size()]
    assert one.shape == other.shape
    assert torch.equal(one.view(bits), other.view(bits))


def normal(device: Device, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape) + len(shape))
    return torch.randn(shape, generator=generator).to(device.name)


# Rows of queries and of keys of each sequence: the ends of tiles of 16, an empty one of each kind, and both.
ROWS = ((17, 33), (0, 5), (16, 16), (3, 0), (0, 0), (1, 40))


@pytest.mark.parametrize("features", [
    {}, {"causal": True}, {"causal": "top_left"}, {"window": (5, 2)}, {"causal": True, "window": (7, None)},
    {"softcap": 2.0}, {"sinks": True}, {"alibi_slopes": True},
], ids=str)  # fmt: skip
def test_packed_is_padded_is_alone(device: Device, way: dict[str, str], features: dict[str, Any]) -> None:
    features = {n: normal(device, 4).exp() if x is True and n != "causal" else x for n, x in features.items()}
    total_q, total_k = (sum(rows[side] for rows in ROWS) for side in (0, 1))
    q, k, v = normal(device, total_q, 4, 16), normal(device, total_k, 2, 16), normal(device, total_k, 2, 24)
    cu = [torch.tensor([0, *[r[side] for r in ROWS]]).cumsum(0).int().to(device.name) for side in (0, 1)]
    packed = portattn.varlen_attention(q, k, v, *cu, 17, 40, return_lse=True, **features, **way)
    padded_q, padded_k, padded_v = (
        torch.full((len(ROWS), heads, longest, width), float("nan"), device=device.name)
        for heads, longest, width in ((4, 17, 16), (2, 40, 16), (2, 40, 24))
    )
    for b, (rows_q, rows_k) in enumerate(ROWS):
        padded_q[b, :, :rows_q] = q[cu[0][b] : cu[0][b + 1]].transpose(0, 1)
        padded_k[b, :, :rows_k] = k[cu[1][b] : cu[1][b + 1]].transpose(0, 1)
        padded_v[b, :, :rows_k] = v[cu[1][b] : cu[1][b + 1]].transpose(0, 1)
    lengths = {"seqlens_q": int32(device, *[r[0] for r in ROWS]), "seqlens_k": int32(device, *[r[1] for r in ROWS])}
    padded = portattn.attention(padded_q, padded_k, padded_v, **lengths, return_lse=True, **features, **way)
    for b, (rows_q, rows_k) in enumerate(ROWS):
        own = slice(int(cu[0][b]), int(cu[0][b + 1]))
        alone = portattn.attention(
            padded_q[b : b + 1, :, :rows_q], padded_k[b : b + 1, :, :rows_k], padded_v[b : b + 1, :, :rows_k],
            return_lse=True, **features, **way,
        )  # fmt: skip
        close(packed[0][own].transpose(0, 1), alone[0][0])
        close(packed[1][:, own], alone[1][0])
        close(padded[0][b, :, :rows_q], alone[0][0])
        close(padded[1][b, :, :rows_q], alone[1][0])
        assert not padded[0][b, :, rows_q:].any()
        assert torch.isneginf(padded[1][b, :, rows_q:]).all()


def paged(cache: torch.Tensor, page: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous cache (B, Hk, S, D) on shuffled pages (P, page, Hk, D), two of them of nobody, and their table."""
    b, h, s, d = cache.shape
    columns = -(-s // page)
    ids = torch.randperm(b * columns + 2, generator=torch.Generator().manual_seed(seed))[: b * columns]
    ids = ids.view(b, columns).to(cache.device)
    pages = torch.full((b * columns + 2, page, h, d), float("nan"), device=cache.device)
    for i in range(s):
        pages[ids[:, i // page], i % page] = cache[:, :, i]
    return pages, ids.int()


@pytest.mark.parametrize("page", [1, 4, 16, 24])
def test_paged_is_contiguous(device: Device, way: dict[str, str], page: int) -> None:
    q, k, v = normal(device, 3, 4, 2, 16), normal(device, 3, 2, 40, 16), normal(device, 3, 2, 40, 24)
    features = {
        "seqlens_k": int32(device, 40, 0, 17), "causal": True, "softcap": 3.0, "sinks": normal(device, 4),
        "window": (20, None), "return_lse": True, **way,
    }  # fmt: skip
    expected = portattn.decode_attention(q, k, v, **features)
    pages, table = paged(k, page, seed=1)
    values, _ = paged(v, page, seed=1)
    close(portattn.paged_attention(q, pages, values, table, **features), expected)
    swapped = pages.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()
    close(portattn.paged_attention(q, *swapped, table, **features, page_layout="hpd"), expected)


def test_ragged_is_varlen(device: Device, way: dict[str, str]) -> None:
    """Chunked prefill: new rows of three sequences over pages, and the same rows over packed keys."""
    rows, lengths = (5, 1, 20), (33, 40, 20)
    k, v = normal(device, 3, 2, 40, 16), normal(device, 3, 2, 40, 24)
    q = normal(device, sum(rows), 4, 16)
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int().to(device.name) for n in (rows, lengths))
    flat = [torch.cat([t[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)]) for t in (k, v)]
    expected = portattn.varlen_attention(q, *flat, cu_q, cu_k, 20, 40, causal=True, return_lse=True, **way)
    (pages, table), (values, _) = paged(k, 8, seed=2), paged(v, 8, seed=2)
    for most in (None, 20):
        found = portattn.paged_attention(
            q, pages, values, table, int32(device, *lengths), cu_seqlens_q=cu_q, max_seqlen_q=most, causal=True,
            return_lse=True, **way,
        )  # fmt: skip
        close(found, expected)


@pytest.mark.parametrize("name", ["paged", "ragged", "sparse paged", "mla", "mla ragged"])
def test_where_pages_lie_does_not_matter(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), seed=3, device=device.name)
    arguments = given(call)
    expected = perform(call.problem.op, arguments, **way)
    count = call.k.shape[0]
    moved = torch.randperm(count, generator=torch.Generator().manual_seed(4)).to(device.name)
    changes: dict[str, Any] = {}
    for n, tensor in arguments.items():
        if n.endswith(("_pages", "_cache")):
            changes[n] = torch.empty_like(tensor)
            changes[n][moved] = tensor
    table = arguments["page_table"].long()
    inside = (table >= 0) & (table < count)
    changes["page_table"] = torch.where(inside, moved[table.clamp(0, count - 1)], table).int()
    assert not torch.equal(changes["page_table"], arguments["page_table"])
    same(perform(call.problem.op, arguments | changes, **way), expected)


def test_a_page_shared_by_two_sequences(device: Device, way: dict[str, str]) -> None:
    q, pages, values = normal(device, 2, 4, 1, 16), normal(device, 5, 8, 2, 16), normal(device, 5, 8, 2, 24)
    shared = int32(device, [3, 1, 0], [3, 1, 2])
    lengths = int32(device, 20, 24)
    found = portattn.paged_attention(q, pages, values, shared, lengths, **way)
    for b in range(2):
        one = slice(b, b + 1)
        close(found[one], portattn.paged_attention(q[one], pages, values, shared[one], lengths[one], **way))


@pytest.mark.parametrize("name", ["decode", "paged", "ragged", "sparse", "sparse paged", "mla", "mla ragged"])
def test_any_number_of_splits_agrees(device: Device, core: dict[str, str], name: str) -> None:
    fields = {} if name.startswith("sparse") else {"causal": "bottom_right"}
    call = random_call(problem(name, sinks=True, **fields), seed=5, device=device.name, extremes=True)
    arguments = given(call)
    expected = perform(call.problem.op, arguments, backend="reference")
    close(perform(call.problem.op, arguments, num_splits=2, backend="reference"), expected)
    # More splits than key tiles leave programs with nothing.
    for splits in (None, 1, 2, 5) + (128,) * (device.path == "triton"):
        found = perform(call.problem.op, arguments, num_splits=splits, **core)
        assert splits in (None, portattn.last_plan().launch.splits)
        close(found, expected)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", ["decode", "paged", "ragged", "sparse", "sparse paged", "mla", "mla ragged"])
def test_a_sequence_is_bit_for_bit_what_it_is_alone(device, core, name, splits):
    """With a number of splits demanded, whatever the rest of the batch is, and however many they are."""
    fields: dict[str, Any] = {} if name.startswith("sparse") else {"causal": "bottom_right"}
    call = random_call(problem(name, batch=4, **fields), seed=6, device=device.name)
    arguments = given(call) | {"num_splits": splits}
    out, lse = perform(call.problem.op, arguments, **core)
    for b in range(4):
        alone, alone_lse = perform(call.problem.op, one_sequence(arguments, b), **core)
        if call.problem.packed:
            own = slice(*call.cu_seqlens_q[b : b + 2].tolist())
            same((alone, alone_lse), (out[own], lse[:, own]))
        else:
            same((alone, alone_lse), (out[b : b + 1], lse[b : b + 1]))


def test_a_ragged_sequence_is_what_it_is_as_a_uniform_one(device: Device, core: dict[str, str]) -> None:
    call = random_call(problem("paged", causal="bottom_right"), seed=7, device=device.name)
    uniform = given(call) | {"num_splits": 1}
    out, lse = perform("paged_attention", uniform, **core)
    b, h, s, d = call.q.shape
    ragged = uniform | {
        "q": call.q.transpose(1, 2).reshape(b * s, h, d),
        "cu_seqlens_q": torch.arange(0, b * s + 1, s, dtype=torch.int32, device=device.name),
    }
    del ragged["layout"]
    packed, packed_lse = perform("paged_attention", ragged, **core)
    close(packed.view(b, s, h, -1).transpose(1, 2), out)
    close(packed_lse.view(h, b, s).transpose(0, 1), lse)


@pytest.mark.parametrize("name", CALLS)
def test_nan_where_nothing_may_look_changes_nothing(device: Device, way: dict[str, str], name: str) -> None:
    """Bit for bit: pages of nobody, padding, masked keys, and tokens that nobody chose can hold anything."""
    p = problem(name)
    fields = {} if p.op == "sparse_attention" else {"causal": "bottom_right", "window_left": 6}
    fields |= {} if p.packed or p.op == "sparse_attention" else {"mask": True}
    arguments = given(random_call(problem(name, **fields), seed=8, device=device.name, extremes=True))
    floating = [n for n, t in arguments.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    assert any(arguments[n].isnan().any() for n in floating)
    expected = perform(p.op, arguments, **way)
    assert not expected[0].isnan().any()
    for value in (0.0, -3.0, float("inf"), 60000.0):
        other = {n: torch.where(arguments[n].isnan(), value, arguments[n]) for n in floating}
        same(perform(p.op, arguments | other, **way), expected)


WINDOWED = [n for n in CALLS if not n.startswith("sparse")]


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_said_in_several_ways(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), seed=9, device=device.name)
    arguments = given(call)

    def result(causal: Any, window: Any) -> Any:
        return perform(call.problem.op, arguments | {"causal": causal, "window": window}, **way)

    none = result(False, None)
    for nothing in ((-1, -1), (10**6, 10**6)):  # tests/validate says the same of the Problem, in all forms
        same(result(False, nothing), none)
    causal = result(True, None)
    assert not torch.equal(causal[0], none[0])
    same(result(False, (None, 0)), causal)
    same(result(True, (10**6, 3)), causal)
    window = result(True, (4, None))
    assert not torch.equal(window[0], causal[0])
    same(result(False, (4, 0)), window)
    same(result("bottom_right", (4, 7)), window)


@pytest.mark.parametrize("name", CALLS)
def test_a_softcap_of_nothing_is_none(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), seed=10, device=device.name)
    arguments = given(call)
    none = perform(call.problem.op, arguments, **way)
    same(perform(call.problem.op, arguments | {"softcap": 0.0}, **way), none)
    assert not torch.equal(perform(call.problem.op, arguments | {"softcap": 1.0}, **way)[0], none[0])
