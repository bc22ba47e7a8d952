"""append_kv and write_pages as they are called: beside attention over what they wrote, in graphs, prepared, refused."""

import functools
from typing import Any

import pytest
import torch
from opcalls import symbolic
from support import Device
from torch import zeros
from torch.fx.experimental.proxy_tensor import make_fx

import portattn
from portattn.config import Settings
from portattn.launch import kernel_calls
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.ops import ROWS
from portattn.schema.symbolic_int import Trace, plain_sizes
from portattn.validate import build_call

PAGES, PAGE, HEADS, WIDTH = 6, 8, 2, 16
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int8]
INT4 = torch.uint8  # two numbers a byte: half as wide


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pages(dtype: torch.dtype = torch.bfloat16, hpd: bool = False, width: int = WIDTH) -> torch.Tensor:
    width = width // 2 if dtype is INT4 and width == WIDTH else width  # others are bytes of rows with scales in them
    shape = (PAGES, HEADS, PAGE, width) if hpd else (PAGES, PAGE, HEADS, width)
    return torch.zeros(shape, dtype=dtype)


def tables(rows: int = 32, dim: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(dim // 2) / (dim // 2))
    return angles.cos(), angles.sin()


def writing(tokens: int = 5, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> dict[str, Any]:
    slots = torch.tensor([3, 40, -1, 17, 8])[:tokens]
    given = {"k": normal(tokens, HEADS, WIDTH), "v": normal(tokens, HEADS, WIDTH, seed=1), "k_pages": pages(dtype),
             "v_pages": pages(dtype), "slot_mapping": slots}  # fmt: skip
    return given | changes


def appending(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> dict[str, Any]:
    given = {"k": normal(3, HEADS, 2, WIDTH), "v": normal(3, HEADS, 2, WIDTH, seed=1),
             "k_cache": torch.zeros(3, HEADS, 12, WIDTH // 2 if dtype is INT4 else WIDTH, dtype=dtype),
             "v_cache": torch.zeros(3, HEADS, 12, WIDTH // 2 if dtype is INT4 else WIDTH, dtype=dtype),
             "seqlens_k": torch.tensor([4, -1, 10], dtype=torch.int32)}  # fmt: skip
    return given | changes


def moved(given: dict[str, Any], device: Device) -> dict[str, Any]:
    return {name: value.to(device.name) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


CALLS: dict[str, Any] = {"append_kv": appending, "write_pages": writing}


def scales(op: str, kind: str) -> dict[str, torch.Tensor]:
    shape = {"one": (), "head": (HEADS,), "token": (3, HEADS, 12) if op == "append_kv" else (PAGES, PAGE, HEADS)}[kind]
    return {name: torch.full(shape, 0.5 if kind != "token" else -1.0) for name in ("k_scale", "v_scale")}


def caches(given: dict[str, Any]) -> list[torch.Tensor]:
    names = ("k_cache", "v_cache", "k_pages", "v_pages", "k_scale", "v_scale")
    return [given[name].view(torch.uint8) if given[name].dtype.itemsize == 1 else given[name]
            for name in names if given.get(name) is not None]  # fmt: skip


@pytest.mark.parametrize("rotary", ["", "neox", "interleaved"])
@pytest.mark.parametrize("kind", ["one", "head", "token"])
@pytest.mark.parametrize("dtype", [*EIGHT_BITS, INT4], ids=str)
@pytest.mark.parametrize("op", CALLS)
def test_paths_write_the_same_bits(op: str, dtype: torch.dtype, kind: str, rotary: str, device: Device) -> None:
    found = []
    for path in (device.path, "reference"):
        given = CALLS[op](dtype, **scales(op, kind)) if op == "append_kv" else CALLS[op](5, dtype, **scales(op, kind))
        if rotary:
            given |= dict(zip(("cos", "sin"), tables(dim=12), strict=True)) | {"rotary": rotary}
            given |= {"positions": torch.arange(5) * 3} if op == "write_pages" else {}
        given = moved(given, device)
        assert getattr(portattn, op)(**given, backend=path) is None
        assert portattn.last_plan().path == path
        found.append(caches(given))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert bool(found[0][0].any())


@pytest.mark.parametrize("page_layout", ["phd", "hpd"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, INT4], ids=str)
def test_attention_reads_what_was_written(dtype: torch.dtype, page_layout: str, device: Device) -> None:
    """Pages of an engine's form, [numbers | float32 scale]: one prompt, then a token more."""
    hpd = page_layout == "hpd"
    found = []
    width = WIDTH // 2 if dtype is INT4 else WIDTH
    for _ in range(2):
        memory = pages(torch.uint8, hpd, width + 4).to(device.name)
        found.append((memory[..., :width].view(dtype), memory[..., width:].view(torch.float32)[..., 0]))
    (k_pages, k_scale), (v_pages, v_scale) = found
    keys, values = (normal(19, HEADS, WIDTH, seed=seed).to(device.name) for seed in (2, 3))
    table = torch.tensor([[4, 1, 5]], dtype=torch.int32, device=device.name)
    token = torch.arange(19, device=device.name)
    slots = table[0, token // PAGE] * PAGE + token % PAGE
    for part in (slice(0, 18), slice(18, 19)):
        portattn.write_pages(
            keys[part], values[part], k_pages, v_pages, slots[part], k_scale=k_scale, v_scale=v_scale,
            page_layout=page_layout, backend=device.path,
        )  # fmt: skip
    q = normal(1, 4, 1, WIDTH, seed=4).to(device.name)
    lengths = torch.tensor([19], dtype=torch.int32, device=device.name)
    ours = portattn.paged_attention(
        q, k_pages, v_pages, table, lengths, k_scale=k_scale, v_scale=v_scale, page_layout=page_layout
    )
    exact = portattn.attention(q.float(), keys.transpose(0, 1)[None].float(), values.transpose(0, 1)[None].float())
    assert float((ours - exact).abs().max()) < (0.3 if dtype is INT4 else 0.1)
    assert float(exact.abs().max()) > 0.2


def test_appending_is_attending_to_one_more(device: Device) -> None:
    keys, values = (normal(2, HEADS, 9, WIDTH, seed=seed, dtype=torch.float32) for seed in (5, 6))
    k_cache, v_cache = torch.full((2, HEADS, 12, WIDTH), 7.0), torch.full((2, HEADS, 12, WIDTH), 7.0)
    lengths = torch.zeros(2, dtype=torch.int32)
    for i in range(9):
        row = keys[:, :, i : i + 1], values[:, :, i : i + 1]
        portattn.append_kv(*row, k_cache, v_cache, lengths, backend=device.path if device.name == "cpu" else None)
        lengths += 1
    q = normal(2, 4, 1, WIDTH, seed=7, dtype=torch.float32)
    ours = portattn.decode_attention(q, k_cache, v_cache, lengths)
    assert torch.equal(k_cache[:, :, :9], keys)
    assert torch.equal(ours, portattn.decode_attention(q, keys, values, lengths))
    assert bool((v_cache[:, :, 9:] == 7.0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rotary", ["neox", "interleaved"])
def test_a_fused_rotation_is_the_one_before(rotary: str, dtype: torch.dtype) -> None:
    cos, sin = tables()
    positions = torch.tensor([9, 0, 5, 31, 2], dtype=torch.int32)
    fused, apart = writing(dtype=dtype), writing(dtype=dtype)
    portattn.write_pages(**fused, cos=cos, sin=sin, positions=positions, rotary=rotary)
    c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
    k = apart["k"].float()
    x, y = k.chunk(2, -1) if rotary == "neox" else (k[..., 0::2], k[..., 1::2])
    both = (x * c - y * s, y * c + x * s)
    apart["k"] = (torch.cat(both, -1) if rotary == "neox" else torch.stack(both, -1).flatten(-2)).bfloat16()
    portattn.write_pages(**apart)
    assert all(torch.equal(one, other) for one, other in zip(caches(fused), caches(apart), strict=True))


def test_either_integers_and_halves_of_one_tensor() -> None:
    both = torch.zeros(PAGES, 2, PAGE, HEADS, WIDTH, dtype=torch.bfloat16)
    given = writing(k_pages=both[:, 0], v_pages=both[:, 1])
    given["slot_mapping"] = given["slot_mapping"].int()
    portattn.write_pages(**given)
    apart = writing()
    portattn.write_pages(**apart)
    assert torch.equal(both[:, 0], apart["k_pages"])
    assert torch.equal(both[:, 1], apart["v_pages"])


E4M3 = torch.float8_e4m3fn
NAN = float("nan")
TABLES = dict(zip(("cos", "sin"), tables(), strict=True))
POSITIONS = torch.zeros(5, dtype=torch.int64)
ONE = torch.ones(())
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("write_pages", {"slot_mapping": torch.tensor([0, 1, 48, 2, 3])}, "slot_mapping[2] is 48, but must be in 0..47"),
    ("write_pages", {"slot_mapping": torch.tensor([0])}, "must be (tokens,), (5,)"),
    ("write_pages", {"slot_mapping": zeros(5)}, "must be torch.int32 or torch.int64"),
    ("write_pages", {"slot_mapping": [0] * 5}, "slot_mapping is 'list'"),
    ("write_pages", {"slot_mapping": zeros(10, dtype=torch.int64)[::2]}, "must be contiguous"),
    ("write_pages", {"v_pages": pages(E4M3)}, "v_pages.dtype is torch.float8_e4m3fn"),
    ("write_pages", {"v": normal(5, HEADS, WIDTH).float()}, "must be k's, torch.bfloat16"),
    ("write_pages", {"k_pages": pages(torch.float8_e5m2fnuz)}, "k_pages.dtype is torch.float8_e5m2fnuz"),
    ("write_pages", {"k": pages(E4M3)[0]}, "k.dtype is torch.float8_e4m3fn"),
    ("write_pages", {"k_pages": pages(torch.int8), "v_pages": pages(torch.int8)}, "k_scale is None"),
    ("write_pages", {"k_pages": pages(INT4), "v_pages": pages(INT4)},
     "k_scale is None, but must be a float32 torch.Tensor with a cache of torch.uint8"),
    ("write_pages", {"k_pages": pages(INT4, width=2 * WIDTH), "v_pages": pages(INT4), "k_scale": ONE, "v_scale": ONE},
     "k_pages's head_dim is 32, but must be 8 as torch.uint8: two int4 numbers"),
    ("write_pages",
     {"k": normal(5, HEADS, 15), "k_pages": pages(INT4), "v_pages": pages(INT4), "k_scale": ONE, "v_scale": ONE},
     "k's head_dim is 15, but must be even with a cache of torch.uint8"),
    ("write_pages", {"k_pages": pages(INT4), "v_pages": pages(torch.int8), "k_scale": ONE, "v_scale": ONE},
     "v_pages.dtype is torch.int8, but must be k_pages's, torch.uint8"),
    ("write_pages", {"k_pages": pages()[:, :, :1], "v_pages": pages()[:, :, :1]},
     "k_pages's heads is 1, but must be k's, 2"),
    ("write_pages", {"v_pages": pages(width=8)}, "v_pages's head_dim is 8, but must be v's, 16"),
    ("write_pages", {"k_pages": pages()[:1].expand(PAGES, -1, -1, -1)},
     "k_pages.stride() is (0, 16, 32, 1), but must not be 0"),
    ("write_pages", {"k_scale": torch.ones(()), "v_scale": torch.ones(())},
     "goes with a cache of one of torch.float8_e4m3fn"),
    ("write_pages", {"positions": POSITIONS}, "goes with cos and sin"),
    ("write_pages", TABLES, "positions is 'NoneType'"),
    ("write_pages", TABLES | {"positions": POSITIONS + 32}, "positions[0] is 32, but must be in 0..31"),
    ("write_pages", {"cos": TABLES["cos"].half(), "sin": TABLES["sin"], "positions": POSITIONS},
     "cos.dtype is torch.float16"),
    ("write_pages", {"cos": TABLES["cos"], "positions": POSITIONS}, "sin is 'NoneType'"),
    ("write_pages", {"cos": tables(dim=18)[0], "sin": tables(dim=18)[1], "positions": POSITIONS},
     "rotary_dim at most k's head_dim, 16"),
    ("write_pages", {"rotary": "gptj"}, "rotary is 'gptj', but must be one of neox, inter"),
    ("write_pages", {"page_layout": "hdp"}, "page_layout is 'hdp'"),
    ("write_pages", {"k": normal(5, HEADS, WIDTH).requires_grad_()}, "write_pages writes in place and has no gradient"),
    ("append_kv", {"seqlens_k": torch.tensor([4, -1, 11], dtype=torch.int32)},
     "seqlens_k[2] is 11, but must be at most 10, for 2 more rows of 12"),
    ("append_kv", {"seqlens_k": None}, "seqlens_k is 'NoneType'"),
    ("append_kv", {"seqlens_k": zeros(3, dtype=torch.int64)}, "must be torch.int32"),
    ("append_kv", {"cos": tables(11)[0], "sin": tables(11)[1]}, "must leave positions in 0..10"),
    ("append_kv", {"k_cache": zeros(2, HEADS, 12, WIDTH, dtype=torch.bfloat16)},
     "k_cache's batch is 2, but must be k's, 3"),
    ("append_kv", {"layout": "hsbd"}, "layout is 'hsbd'"),
]  # fmt: skip


@pytest.mark.parametrize("case", WRONG, ids=lambda case: str(case[2]))
def test_what_is_wrong_is_said_and_nothing_is_written(case: tuple[Any, ...]) -> None:
    op, changes, text = case
    given = CALLS[op](**changes)
    before = [tensor.clone() for tensor in caches(given)]
    with pytest.raises(portattn.ArgumentError) as found:
        getattr(portattn, op)(**given)
    assert text in str(found.value)
    assert str(found.value).startswith(f"{op}: ")
    assert all(torch.equal(one, other) for one, other in zip(caches(given), before, strict=True))


BAD_SCALES: dict[str, tuple[Any, str]] = {
    "zero": (torch.tensor([1.0, 0.0]), "k_scale of sequence 0, head 1 is 0.0, but must be positive and finite"),
    "negative": (torch.tensor(-1.0), "is -1.0, but must be positive and finite"),
    "NaN": (torch.tensor([NAN, 1.0]), "is nan, but must be positive and finite"),
    "infinite": (torch.tensor(float("inf")), "is inf, but must be positive and finite"),
    "a number": (0.5, "k_scale is 'float', but must be a float32 torch.Tensor"),
    "float64": (torch.ones(HEADS).double(), "k_scale.dtype is torch.float64"),
    "other heads": (torch.ones(3), "k_scale.shape is (3,)"), "none": (None, "k_scale is None"),
    "one token for all": (torch.ones(1, 1, 1).expand(PAGES, PAGE, HEADS), "k_scale.stride() is (0, 0, 0)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SCALES)
def test_wrong_scales(case: str) -> None:
    scale, text = BAD_SCALES[case]
    whole = torch.ones(PAGES, PAGE, HEADS) if case == "one token for all" else torch.ones(HEADS)
    given = writing(dtype=E4M3, k_scale=scale, v_scale=whole)
    with pytest.raises(portattn.ArgumentError) as found:
        portattn.write_pages(**given)
    assert text in str(found.value)
    assert not any(bool(given[name].view(torch.uint8).any()) for name in ("k_pages", "v_pages"))


def test_what_is_not_checked_is_not_written_either(device: Device) -> None:
    """As on an accelerator: slots and rows beyond the cache, positions beyond the tables."""
    for path in (device.path, "reference"):
        given = moved(writing(slot_mapping=torch.tensor([48, 2**40, -(2**40), 47, -1])), device)
        rotation = moved({**TABLES, "positions": POSITIONS + 10**6}, device)
        portattn.write_pages(**given, **rotation, validate=False, backend=path)
        assert bool(given["k_pages"][5, 7].any())
        assert int(given["v_pages"].any(-1).sum()) == HEADS
        given = moved(appending(seqlens_k=torch.tensor([11, 12, 2**31 - 1], dtype=torch.int32)), device)
        portattn.append_kv(**given, validate=False, backend=path)
        assert torch.equal(given["v_cache"][0, :, 11], given["v"][0, :, 0])
        assert int(given["v_cache"].any(-1).sum()) == HEADS


@pytest.mark.parametrize("kind", ["", "one", "token"])
@pytest.mark.parametrize("op", CALLS)
def test_opcheck(op: str, kind: str) -> None:
    """Schema with what is written, fake tensors, ahead-of-time autograd."""
    dtype = torch.int8  # torch cannot compare float8 tensors there
    given = CALLS[op](**({"dtype": dtype} if kind else {}), **(scales(op, kind) if kind else {}))
    tensors = [given.get(name) for name in dict.fromkeys(ROWS[op].parameters)]
    operator = getattr(torch.ops.portattn, op).default
    words = ["neox", "bhsd" if op == "append_kv" else "phd", None, None]
    assert set(torch.library.opcheck(operator, (*tensors, *words)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", CALLS)
def test_compiled_it_is_one_node_that_writes(op: str) -> None:
    def step(k: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        getattr(portattn, op)(k * 2, **given)
        return given["k_cache" if op == "append_kv" else "k_pages"].sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        given = CALLS[op]()
        k = given.pop("k")
        results.append((function(k, given), *caches(given)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert bool(results[0][1].any())


@pytest.mark.parametrize("op", CALLS)
def test_a_recorded_graph_has_the_call(op: str) -> None:
    given = CALLS[op]()
    names = list(given)

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        getattr(portattn, op)(**dict(zip(names, tensors, strict=True)))
        return tensors[0]

    graph = make_fx(step)(*given.values())
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called == [getattr(torch.ops.portattn, op).default]
    fresh, eager = CALLS[op](), CALLS[op]()
    graph(*fresh.values())
    getattr(portattn, op)(**eager)
    assert all(torch.equal(one, other) for one, other in zip(caches(fresh), caches(eager), strict=True))


@pytest.mark.parametrize("op", CALLS)
def test_a_gradient_is_refused_in_graphs_too(op: str) -> None:
    given = CALLS[op]()
    given["k"] = given["k"].requires_grad_()
    with pytest.raises(portattn.ArgumentError, match="has no gradient"):
        getattr(torch.ops.portattn, op)(*(given.get(n) for n in dict.fromkeys(ROWS[op].parameters)), "neox",
                                        "bhsd" if op == "append_kv" else "phd", None, None)  # fmt: skip
    with torch.no_grad():
        getattr(portattn, op)(**given)
    assert bool(caches(given)[0].any())


@pytest.mark.parametrize("op", CALLS)
def test_autocast_leaves_caches_alone(op: str) -> None:
    given = CALLS[op]()
    given = {name: t.float() if t.is_floating_point() else t for name, t in given.items()}
    with torch.autocast("cpu", torch.bfloat16):
        getattr(portattn, op)(**given)
    cache = given["k_cache"] if op == "append_kv" else given["k_pages"]
    assert bool(cache.any())
    assert portattn.last_plan().problem.dtype == "fp32"


@pytest.mark.parametrize("op", CALLS)
def test_prepared_planned_and_explained(op: str) -> None:
    given = CALLS[op](E4M3) if op == "append_kv" else CALLS[op](dtype=E4M3)
    handle = portattn.prepare(op, **given)
    assert handle.plan == portattn.plan(op, **given)
    assert not any(bool(one.any()) for one in caches(given)), "planning wrote"
    assert handle.run(**given) is None
    assert bool(caches(given)[0].any())
    assert portattn.explain(op, **given).startswith(f"{op} new (")
    assert "cache e4m3 scales none" in portattn.explain(op, **given)
    with pytest.raises(portattn.ArgumentError, match="fills a cache, and has no result"):
        handle.run(**given, out=given["k"])


def test_warming_up_writes_nothing() -> None:
    given = writing()
    assert [one.failed for one in portattn.warmup([{"op": "write_pages", **given}]).specs] == [""]
    assert not any(bool(one.any()) for one in caches(given))


def test_tokens_are_a_size_of_a_class() -> None:
    """A decode step and a prompt are not planned each: sizes are traced through checks, plan and launch."""
    shaped = functools.partial(symbolic, Trace())
    tensors: dict[str, Any] = dict.fromkeys(ROWS["write_pages"].tensors)
    tensors |= {name: shaped(torch.bfloat16, 640, 8, 128) for name in ("q", "new_v")}
    tensors |= {name: shaped(torch.float8_e4m3fn, 100, 16, 8, 128) for name in ("k", "v")}
    tensors |= {name: shaped(torch.float32, 100, 16, 8) for name in ("k_scale", "v_scale")}
    tensors |= {name: shaped(torch.int64, 640) for name in ("slots", "positions")}
    tensors |= {name: shaped(torch.float32, 4096, 64) for name in ("cos", "sin")}
    call = build_call("write_pages", Settings(), tensors, {"rotary": "neox", "page_layout": "phd"})
    target = parse_target("cuda:sm_90", "triton==3.6.0")
    made = plan(call.problem, target)
    launches, out, lse = kernel_calls(made, call, target.arch.cores)
    assert made.path == "triton"
    assert lse is None
    assert out.numel() == 0
    assert plain_sizes(launches[0].arguments["rows"]) == 640 * 8
    assert not isinstance(launches[0].arguments["rows"], int), "the number of tokens was pinned"


def split(memory: torch.Tensor, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K's and V's cache (3, HEADS, 12, WIDTH) of one buffer."""
    rows, count = 12, 3 * HEADS * 12 * WIDTH
    flat = memory[: 3 * HEADS * rows * 2 * WIDTH]
    if way == "columns":  # (…, 2·D), as vLLM's
        return tuple(flat.view(3, HEADS, rows, 2 * WIDTH).split(WIDTH, dim=3))  # type: ignore[return-value]
    if way == "planes":
        return flat.view(3, 2, HEADS, rows, WIDTH).unbind(1)  # type: ignore[return-value]
    if way == "heads":
        return flat.view(3, HEADS, 2, rows, WIDTH).unbind(2)  # type: ignore[return-value]
    if way == "apart":
        return flat.view(2, 3, HEADS, rows, WIDTH).unbind(0)  # type: ignore[return-value]
    if way == "heads of other strides":
        k_cache = memory.as_strided((3, HEADS, rows, WIDTH), (HEADS * rows * WIDTH, rows * WIDTH, WIDTH, 1))
        return k_cache, memory.as_strided(k_cache.shape, (HEADS * rows * WIDTH, WIDTH, HEADS * WIDTH, 1), WIDTH)
    if way == "planes of other strides":  # V's by row
        k_cache, v_cache = flat.view(3, 2, HEADS * rows * WIDTH).unbind(1)
        return k_cache.view(3, HEADS, rows, WIDTH), v_cache.view(3, rows, HEADS, WIDTH).transpose(1, 2)
    shift = {"one": 0, "a row later": WIDTH, "a column later": 1, "a head later": rows * WIDTH}[way]
    shape = (3, HEADS, rows, WIDTH)
    return memory[:count].view(shape), memory[shift : shift + count].view(shape)


@pytest.mark.parametrize("way", ["columns", "planes", "heads", "apart", "planes of other strides"])
def test_caches_that_are_views_of_one_buffer_are_written(way: str) -> None:
    k_cache, v_cache = split(torch.zeros(3 * HEADS * 12 * 2 * WIDTH, dtype=torch.bfloat16), way)
    given = appending(k_cache=k_cache, v_cache=v_cache)
    portattn.append_kv(**given)
    for cache, new in ((k_cache, given["k"]), (v_cache, given["v"])):
        assert torch.equal(cache[0, :, 4:6], new[0])
        assert torch.equal(cache[2, :, 10:12], new[2])
        assert cache.count_nonzero() == new[[0, 2]].count_nonzero()


@pytest.mark.parametrize("way", ["one", "a row later", "a column later", "a head later", "heads of other strides"])
def test_caches_that_share_memory_are_refused(way: str) -> None:
    memory = torch.zeros(3 * HEADS * 12 * 2 * WIDTH, dtype=torch.bfloat16)
    caches = split(memory, way)
    for k_cache, v_cache in (caches, caches[::-1]):
        with pytest.raises(
            portattn.ArgumentError, match=r"v_cache.data_ptr\(\) is .* must share no element with k_cache"
        ):
            portattn.append_kv(**appending(k_cache=k_cache, v_cache=v_cache))
    shared = pages()
    with pytest.raises(portattn.ArgumentError, match=r"v_pages.data_ptr\(\) is .* must share no element with k_pages"):
        portattn.write_pages(**writing(k_pages=shared, v_pages=shared))
    assert not memory.any()
