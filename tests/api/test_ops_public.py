"""Every public operation with every feature against the float64 oracle: each argument arrives where it should."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import reference_cases
import torch
from opcalls import CALLS, assert_right, given, int32, paths, perform, problem, use_small_tiles, watched
from support import Device, poisoned, random_call

import portattn
from portattn.api.out_argument import into
from portattn.errors import ArgumentError

PLACED: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"}, "top_left": {"causal": "top_left"},
    "window": {"window_left": 4, "window_right": 2}, "bias": {"bias": True}, "mask": {"mask": True},
    "all": reference_cases.PLACED["all"],
}  # fmt: skip
CHOSEN: dict[str, dict[str, Any]] = {
    "log_weights": {"log_weights": True}, "magicpig": {"magicpig": True},
    "all": {"log_weights": True, "magicpig": True, "softcap": True, "alibi_slopes": True, "sinks": True},
}  # fmt: skip
EVERYWHERE: dict[str, dict[str, Any]] = {
    "plain": {}, "softcap": {"softcap": True}, "alibi_slopes": {"alibi_slopes": True}, "sinks": {"sinks": True},
    "bshd": {"layout": "bshd"}, "hpd": {"page_layout": "hpd"}, "no lse": {"return_lse": False},
    "fp16": {"dtype": "fp16"}, "bf16": {"dtype": "bf16"},
}  # fmt: skip


def features(name: str) -> dict[str, dict[str, Any]]:
    p = problem(name)
    found = EVERYWHERE | (CHOSEN if p.op == "sparse_attention" else PLACED)
    if p.op not in ("paged_attention", "sparse_attention") or not p.page_size:
        found = {k: v for k, v in found.items() if k != "hpd"}
    if p.packed:
        found = {k: v for k, v in found.items() if k not in ("bias", "mask", "bshd")}
        found["all"] = {k: v for k, v in PLACED["all"].items() if k not in ("bias", "mask")}
    return found


CASES = [(name, feature) for name in CALLS for feature in features(name)]


@pytest.mark.parametrize("path", ["reference", "core"])
@pytest.mark.parametrize(("name", "feature"), CASES)
def test_results_are_right(device: Device, monkeypatch: pytest.MonkeyPatch, path: str, name: str, feature: str) -> None:
    use_small_tiles(monkeypatch)
    call = random_call(problem(name, **features(name)[feature]), seed=1, device=device.name)
    with poisoned():
        result = perform(call.problem.op, given(call), **paths(device)[path])
    assert portattn.last_plan().path == ("reference" if path == "reference" else device.path)
    out, lse = result if call.problem.return_lse else (result, None)
    assert_right(call, out, lse)


@pytest.mark.parametrize("name", CALLS)
def test_the_plan_is_that_of_the_call(device: Device, name: str) -> None:
    """plan(), explain() and the call itself speak of one Problem, and plan() runs nothing."""
    call = random_call(problem(name), seed=2, device=device.name)
    op, arguments = call.problem.op, given(call)
    made = portattn.plan(op, **arguments)
    assert portattn.last_plan() is None
    perform(op, arguments)
    assert portattn.last_plan() == made
    assert str(made.problem) in portattn.explain(op, **arguments)


@pytest.mark.parametrize("name", CALLS)
def test_inputs_are_not_changed(device: Device, name: str) -> None:
    call = random_call(problem(name), seed=3, device=device.name)
    arguments = given(call)
    before = {n: t.clone() for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    for path in paths(device).values():
        perform(call.problem.op, arguments, **path)
        for n, copy in before.items():
            assert torch.equal(arguments[n].nan_to_num(7.0), copy.nan_to_num(7.0)), n


STRIDED = ("spare", "transposed", "sliced", "expanded")


@pytest.mark.parametrize("path", ["reference", "core"])
@pytest.mark.parametrize("name", CALLS)
def test_any_strides(device: Device, monkeypatch: pytest.MonkeyPatch, path: str, name: str) -> None:
    use_small_tiles(monkeypatch)
    for seed, strides in enumerate(STRIDED):
        call = random_call(problem(name), seed=seed, device=device.name, strides=strides, scale=-0.3)
        with poisoned():
            out, lse = perform(call.problem.op, given(call), **paths(device)[path])
        assert_right(call, out, lse)


@pytest.mark.parametrize("path", ["reference", "core"])
@pytest.mark.parametrize("page_layout", ["phd", "hpd"])
@pytest.mark.parametrize("name", ["paged", "ragged", "sparse paged"])
def test_keys_and_values_in_one_cache(device, monkeypatch, path, page_layout, name):
    """(P, 2, Hk, page, D) and (P, 2, page, Hk, D), each half a view; and (P, page, 2, Hk, D), which is SGLang's way."""
    use_small_tiles(monkeypatch)
    p = problem(name, page_layout=page_layout, head_dim_v=16)
    call = random_call(p, seed=4, device=device.name, strides="combined")
    arguments = given(call)
    names = [n for n in arguments if n[1:] in ("_pages", "_cache")]
    k, v = (arguments[n] for n in names)
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    with poisoned():
        out, lse = perform(p.op, arguments, **paths(device)[path])
    assert_right(call, out, lse)
    axis = 2 if page_layout == "phd" else 3
    other = dict(zip(names, torch.stack([k, v], dim=axis).unbind(axis), strict=True))
    assert not other[names[0]].is_contiguous()
    again, again_lse = perform(p.op, arguments | other, **paths(device)[path])
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)


# Nothing is legal too: no batch, no rows, no keys, no pages, no columns, no tokens.
@pytest.fixture(params=["reference", "core"])
def way(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Keyword arguments of either path. An empty tensor has no memory that might be touched: addresses are watched."""
    if request.param == "core" and device.path == "interpreter":
        with watched(monkeypatch):
            yield paths(device)["core"]
    else:
        yield paths(device)[request.param]


def assert_nothing(result: tuple[torch.Tensor, torch.Tensor], out: tuple[int, ...], lse: tuple[int, ...]) -> None:
    """Zeros and an LSE of -inf, of these shapes."""
    assert (tuple(result[0].shape), tuple(result[1].shape)) == (out, lse)
    assert not result[0].any()
    assert not result[0].isnan().any()
    assert torch.isneginf(result[1]).all()


BATCHED = {
    # arguments whose first axis is the batch; cu_seqlens begin with one 0 more
    "attention": ("q", "k", "v", "seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k"),
    "decode": ("q", "k_cache", "v_cache", "seqlens_k", "leftpad_k"),
    "paged": ("q", "page_table", "seqlens_k"),
    "sparse": ("q", "k_cache", "v_cache", "indices", "counts", "seqlens_k"),
    "sparse paged": ("q", "indices", "counts", "page_table", "seqlens_k"),
    "mla": ("q_nope", "q_rope", "page_table", "seqlens_k"),
}


@pytest.mark.parametrize("name", BATCHED)
def test_no_sequence(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), device=device.name)
    arguments = given(call)
    empty = {n: arguments[n][:0] for n in BATCHED[name]}
    out, lse = perform(call.problem.op, arguments | empty | {"validate": True}, **way)
    assert tuple(out.shape) == (0, 4, call.problem.seq_q, call.problem.head_dim_v)
    assert tuple(lse.shape) == (0, 4, call.problem.seq_q)


@pytest.mark.parametrize("name", ["varlen", "ragged", "mla ragged"])
@pytest.mark.parametrize("rows", [0, 5])
def test_no_packed_sequence(device: Device, way: dict[str, str], name: str, rows: int) -> None:
    call = random_call(problem(name), device=device.name)
    arguments = given(call)
    changes = {n: arguments[n][:rows] for n in ("q", "q_nope", "q_rope") if n in arguments}
    changes |= {n: arguments[n][:0] for n in ("page_table", "seqlens_k") if n in arguments}
    changes |= {n: int32(device, 0) for n in ("cu_seqlens_q", "cu_seqlens_k") if n in arguments}
    sinks = torch.ones(4, device=device.name)
    with poisoned():
        result = perform(call.problem.op, arguments | changes | {"sinks": sinks}, **way)
    assert_nothing(result, (rows, 4, call.problem.head_dim_v), (4, rows))


@pytest.mark.parametrize("name", ["varlen", "ragged", "mla ragged"])
def test_sequences_without_rows(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), device=device.name)
    arguments = given(call)
    changes = {"cu_seqlens_q": int32(device, 0, 0, 0, 0)}
    with poisoned():
        result = perform(call.problem.op, arguments | changes, **way)
    assert_nothing(result, (33, 4, call.problem.head_dim_v), (4, 33))
    changes |= {n: arguments[n][:0] for n in ("q", "q_nope", "q_rope") if n in arguments}
    assert_nothing(perform(call.problem.op, arguments | changes, **way), (0, 4, call.problem.head_dim_v), (4, 0))


@pytest.mark.parametrize("name", [n for n in CALLS if n != "varlen"])
def test_sequences_without_keys(device: Device, way: dict[str, str], name: str) -> None:
    """With a sink, a row still has that as its LSE."""
    call = random_call(problem(name), device=device.name)
    p, arguments = call.problem, given(call)
    arguments["seqlens_k"] = int32(device, 0, 0, 0)
    for cache in (call.k, call.v):
        cache.fill_(float("nan"))
    if p.page_size:  # what a table then holds is nobody's business
        arguments["page_table"] = torch.full_like(arguments["page_table"], 2**31 - 1)
    out = (33, 4, p.head_dim_v) if p.packed else (3, 4, p.seq_q, p.head_dim_v)
    lse = (4, 33) if p.packed else (3, 4, p.seq_q)
    with poisoned():
        assert_nothing(perform(p.op, arguments, **way), out, lse)
        sunk = perform(p.op, arguments | {"sinks": torch.full((4,), 0.5, device=device.name)}, **way)
    assert not sunk[0].any()
    finite = torch.isfinite(sunk[1])
    assert (sunk[1][finite] == 0.5).all()
    assert finite.all() == (name != "attention")  # whose padding rows have no sink


@pytest.mark.parametrize("name", ["paged", "ragged", "sparse paged", "mla", "mla ragged"])
def test_no_columns_and_no_pages(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), device=device.name)
    p, arguments = call.problem, given(call)
    arguments["seqlens_k"] = int32(device, 0, 0, 0)
    if name == "sparse paged":
        arguments |= {"counts": torch.zeros_like(arguments["counts"]), "validate": True}
    out = (33, 4, p.head_dim_v) if p.packed else (3, 4, p.seq_q, p.head_dim_v)
    lse = (4, 33) if p.packed else (3, 4, p.seq_q)
    narrow = {"page_table": arguments["page_table"][:, :0]}
    none = {n: arguments[n][:0] for n in ("k_pages", "v_pages", "k_cache", "v_cache", "kv_pages") if n in arguments}
    for changes in (narrow, none, narrow | none):
        with poisoned():
            assert_nothing(perform(p.op, arguments | changes, **way), out, lse)
    if name == "sparse paged":  # a full table of a cache without pages: there is no key, whatever the table says
        changes = none | {"seqlens_k": None}
        assert_nothing(perform(p.op, arguments | changes, **way), out, lse)


@pytest.mark.parametrize("name", ["attention", "varlen", "decode", "sparse"])
def test_no_keys_at_all(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), device=device.name)
    p, arguments = call.problem, given(call)
    for n in ("k", "v", "k_cache", "v_cache"):
        if n in arguments:
            arguments[n] = arguments[n][:0] if name == "varlen" else arguments[n][:, :, :0]
    for n in ("seqlens_k", "leftpad_k", "cu_seqlens_k", "counts"):
        if n in arguments:
            arguments[n] = torch.zeros_like(arguments[n])
    out = (33, 4, 24) if p.packed else (3, 4, p.seq_q, 24)
    with poisoned():
        assert_nothing(perform(p.op, arguments, **way), out, (4, 33) if p.packed else (3, 4, p.seq_q))


@pytest.mark.parametrize("name", ["attention", "decode", "paged", "mla"])
def test_no_query_rows(device: Device, way: dict[str, str], name: str) -> None:
    call = random_call(problem(name), device=device.name)
    arguments = given(call)
    for n in ("q", "q_nope", "q_rope"):
        if n in arguments:
            arguments[n] = arguments[n][:, :, :0]
    for n in ("seqlens_q", "leftpad_q"):
        if n in arguments:
            arguments[n] = torch.zeros_like(arguments[n])
    out, lse = perform(call.problem.op, arguments, **way)
    assert (tuple(out.shape), tuple(lse.shape)) == ((3, 4, 0, call.problem.head_dim_v), (3, 4, 0))


@pytest.mark.parametrize("name", ["sparse", "sparse paged"])
def test_no_places_for_tokens(device: Device, way: dict[str, str], name: str) -> None:
    arguments = given(random_call(problem(name), device=device.name))
    changes = {"indices": arguments["indices"][..., :0], "counts": torch.zeros_like(arguments["counts"])}
    for splits in (None, 2):
        with poisoned():
            result = perform("sparse_attention", arguments | changes, num_splits=splits, **way)
        assert_nothing(result, (3, 4, 1, 24), (3, 4, 1))


# into(): a result in memory that the caller brings. A CPU copies it; kernels: tests/launch/test_hot_path.py.
Q = torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(1))
NAN = float("nan")


def paged(**changed: Any) -> dict[str, Any]:
    pages = torch.randn(6, 4, 2, 16, generator=torch.Generator().manual_seed(2))
    table = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
    given = {"q": Q[:, :, :1], "k_pages": pages, "v_pages": pages, "page_table": table}
    return given | {"seqlens_k": torch.tensor([7, 3], dtype=torch.int32), "return_lse": False} | changed


def strided() -> torch.Tensor:
    return torch.full((5, 16, 4, 2), NAN).permute(3, 2, 0, 1)


def part() -> torch.Tensor:
    return torch.full((3, 4, 5, 16), NAN)[1:]


@pytest.mark.parametrize("make", [lambda: torch.full_like(Q, NAN), strided, part], ids=["alike", "strided", "part"])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_result(make: Callable[[], torch.Tensor], causal: bool) -> None:
    wanted = portattn.attention(Q, Q, Q, causal=causal)
    for _ in range(3):  # the first of its kind, and later ones
        place = make()
        whole = place._base if place._base is not None and place._base.shape[0] == 3 else None
        assert into(place, "attention", Q, Q, Q, causal=causal) is place
        assert torch.equal(place, wanted)
        assert whole is None or whole[0].isnan().all()


def test_pages_and_positional_arguments() -> None:
    given = paged()
    wanted = portattn.paged_attention(**given)
    place = torch.full_like(wanted, NAN)
    assert into(place, "paged_attention", *list(given.values())[:5]) is place
    assert torch.equal(place, wanted)
    given["page_table"] = portattn.PageTable(
        given["page_table"], torch.tensor([2, 1], dtype=torch.int32), torch.tensor([3, 3], dtype=torch.int32)
    )
    del given["seqlens_k"]
    assert torch.equal(into(torch.full_like(wanted, NAN), "paged_attention", **given), wanted)


def test_over_its_own_query() -> None:
    wanted, q = portattn.attention(Q, Q, Q), Q.clone()
    for _ in range(2):
        q.copy_(Q)
        assert torch.equal(into(q, "attention", q, q, q), wanted)


def test_in_a_compiled_function_and_under_autocast() -> None:
    def step(place: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return into(place, "attention", q, q, q) + 1

    place = torch.full_like(Q, NAN)
    assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(place, Q), place + 1)
    assert torch.equal(place, portattn.attention(Q, Q, Q))
    with torch.autocast("cpu", torch.bfloat16):
        half = torch.full_like(Q, NAN, dtype=torch.bfloat16)
        assert torch.equal(into(half, "attention", Q, Q, Q), portattn.attention(Q, Q, Q))


@pytest.mark.parametrize(
    ("place", "more", "text"),
    [
        (torch.full((2, 4, 5, 8), NAN), {}, "must be as the result: (2, 4, 5, 16), torch.float32, cpu"),
        (torch.full_like(Q, NAN, dtype=torch.bfloat16), {}, "must be as the result"),
        (torch.full_like(Q, NAN).requires_grad_(), {}, "must be False: results in given memory have no gradient"),
        (torch.full_like(Q, NAN), {"return_lse": True}, "must be False: there is a place for out alone"),
        (torch.full_like(Q, NAN), {"causal": "left"}, "causal"),
    ],
    ids=["width", "dtype", "gradient", "lse", "the operation's own"],
)
def test_what_cannot_be_is_said_and_nothing_is_written(place: torch.Tensor, more: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError) as error:
        into(place, "attention", Q, Q, Q, **more)
    assert text in str(error.value)
    assert place.detach().isnan().all()


@pytest.mark.parametrize(("place", "q", "text"), [
    ([NAN], Q, "place is 'list', but must be a torch.Tensor"),
    (torch.full_like(Q, NAN), Q.to_sparse(), "q is 'a torch.sparse_coo tensor', but must be a dense"),
], ids=["no tensor", "sparse queries"])  # fmt: skip
def test_what_has_no_memory(place: Any, q: torch.Tensor, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        into(place, "attention", q, Q, Q)


def test_no_gradients() -> None:
    place, q = torch.full_like(Q, NAN), Q.clone().requires_grad_()
    with pytest.raises(ArgumentError, match="have no gradient"):
        into(place, "attention", q, q, q)
    assert place.isnan().all()
    with torch.no_grad():
        assert torch.equal(into(place, "attention", q, q, q), portattn.attention(Q, Q, Q))


def test_under_a_transform_it_is_a_copy() -> None:
    """Tensors of torch.func have no memory of their own to look at."""
    x = torch.randn(3, 1, 2, 5, 16)
    found = torch.func.vmap(lambda one: into(torch.empty_like(one), "attention", one, one, one))(x)
    assert torch.allclose(found, torch.stack([portattn.attention(one, one, one) for one in x]), atol=1e-6)


@pytest.mark.parametrize("op", ["append_kv", "no_such_operation"])
def test_an_operation_without_a_result_is_named(op: str) -> None:
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(portattn.ArgumentError, match=f"op is '{op}', but must be one of attention, .*varlen_attention"):
        into(torch.empty(1), op, q, q, q)
