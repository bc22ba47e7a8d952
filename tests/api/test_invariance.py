"""invariant=True: a row's bits do not depend on its batch, on chunks, pages, lengths, graphs, or on the operation."""

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opcalls import given, problem
from support import Device, random_call

import portattn
from portattn import PathUnavailable, Plan, Problem, Registry
from portattn.config import Settings
from portattn.planning.kernel_specs import DECIDING
from portattn.planning.planner import plan

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FLOAT8 = torch.float8_e4m3fn


@dataclasses.dataclass
class Batch:
    """Sequences of one head layout, of which the first is judged: q, k, v (S, H, D) each."""

    generator: random.Random
    where: str
    dtype: torch.dtype = torch.float32
    float8: bool = False  # keys and values are float8, in caches alone
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (16, 16)
    page: int = 8
    longest: int = 40
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    tensors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.tensors:
            return
        seeds = torch.Generator().manual_seed(self.generator.randrange(2**31))
        sizes = [self.generator.randint(1, self.longest) for _ in range(self.generator.randint(2, 4))]
        for size in sizes:
            shapes = [
                (size, h, d)
                for h, d in zip(
                    (self.heads[0], *self.heads[1:] * 2), (*self.widths[:1] * 2, self.widths[1]), strict=True
                )
            ]
            q, k, v = (torch.randn(shape, generator=seeds).to(self.where, self.dtype) for shape in shapes)
            self.tensors.append((q, k.to(FLOAT8) if self.float8 else k, v.to(FLOAT8) if self.float8 else v))
        if self.generator.random() < 0.3:
            self.options["sinks"] = torch.randn(self.heads[0], generator=seeds).to(self.where)
        if self.generator.random() < 0.3:
            self.options["alibi_slopes"] = torch.rand(self.heads[0], generator=seeds).to(self.where)
        self.options |= self.generator.choice([{}, {}, {"window": (self.generator.randint(0, 30), 0)}, {"chunk": 24}])
        self.options |= self.generator.choice([{}, {}, {"softcap": 2.0}])
        self.options |= {"causal": True}

    def index(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.where)

    def some(self) -> list[int]:
        """The judged sequence and some others, in any order; its place is that of 0."""
        others = self.generator.sample(range(1, len(self.tensors)), self.generator.randrange(len(self.tensors)))
        found = [0, *others]
        self.generator.shuffle(found)
        return found

    def pages(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Caches of pages in any order (P, page, H, D), NaN where nobody's keys lie, and the table of all sequences."""
        need = [-(-len(k) // self.page) for _, k, _ in self.tensors]
        ids = list(range(sum(need) + 2))
        self.generator.shuffle(ids)
        table = torch.zeros(len(need), max(need) + self.generator.randrange(3), dtype=torch.int32)
        caches = [
            torch.full((len(ids), self.page, *one.shape[1:]), float("nan")).to(self.where, one.dtype)
            for one in self.tensors[0][1:]
        ]
        for row, ((_, *kv), count) in enumerate(zip(self.tensors, need, strict=True)):
            for number in range(count):
                table[row, number] = page = ids.pop()
                for cache, one in zip(caches, kv, strict=True):
                    part = one[number * self.page : (number + 1) * self.page]
                    cache[page, : len(part)] = part
        return caches[0], caches[1], table.to(self.where)

    def padded(self, which: list[int], place: int, room: int) -> torch.Tensor:
        """One of q, k and v of some sequences, padded on the right with NaN: (B, H, S, D)."""
        room += max(len(self.tensors[n][place]) for n in which)
        first = self.tensors[0][place]
        held = torch.full((len(which), room, *first.shape[1:]), float("nan")).to(self.where, first.dtype)
        for row, n in enumerate(which):
            held[row, : len(self.tensors[n][place])] = self.tensors[n][place]
        return held.transpose(1, 2)


def dense(batch: Batch, which: list[int]) -> list[torch.Tensor]:
    rows, keys = batch.generator.randrange(20), batch.generator.randrange(20)
    q, k, v = (batch.padded(which, place, keys if place else rows) for place in range(3))
    sizes = [len(batch.tensors[n][0]) for n in which]
    out = portattn.attention(q, k, v, seqlens_q=batch.index(*sizes), seqlens_k=batch.index(*sizes), **batch.options)
    return [one[:, :size].transpose(0, 1) for one, size in zip(out, sizes, strict=True)]


def packed(batch: Batch, which: list[int]) -> list[torch.Tensor]:
    sizes = [len(batch.tensors[n][0]) for n in which]
    q, k, v = (torch.cat([batch.tensors[n][place] for n in which]) for place in range(3))
    begins = batch.index(0, *itertools.accumulate(sizes))
    out = portattn.varlen_attention(q, k, v, begins, begins, max(sizes), max(sizes), **batch.options)
    return list(out.split(sizes))


def chunked(batch: Batch, which: list[int], begin: int, end: int) -> torch.Tensor:
    """Rows [begin, end) of the judged sequence over pages, beside chunks of others."""
    k, v, table = batch.pages()
    spans = {n: (begin, end) if n == 0 else _span(batch, len(batch.tensors[n][0])) for n in which}
    q = torch.cat([batch.tensors[n][0][a:b] for n, (a, b) in spans.items()])
    ends = [0, *itertools.accumulate(b - a for a, b in spans.values())]
    out = portattn.paged_attention(
        q, k, v, table[which], batch.index(*(b for _, b in spans.values())), cu_seqlens_q=batch.index(*ends),
        max_seqlen_q=max(b - a for a, b in spans.values()), page_layout="phd", **batch.options,
    )  # fmt: skip
    return out[ends[which.index(0)] : ends[which.index(0) + 1]]


def _span(batch: Batch, size: int) -> tuple[int, int]:
    begin = batch.generator.randrange(size)
    return begin, batch.generator.randint(begin + 1, size)


def decoded(batch: Batch, which: list[int], row: int, paged: bool) -> torch.Tensor:
    """A row of the judged sequence as the one query of its sequence, beside last rows of others."""
    rows = [row if n == 0 else len(batch.tensors[n][0]) - 1 for n in which]
    q = torch.stack([batch.tensors[n][0][at] for n, at in zip(which, rows, strict=True)])[:, :, None]
    lengths = batch.index(*(at + 1 for at in rows))
    if paged:
        k, v, table = batch.pages()
        out = portattn.paged_attention(q, k, v, table[which], lengths, page_layout="phd", **batch.options)
    else:
        room = batch.generator.randrange(20)
        k, v = (batch.padded(which, place, room) for place in (1, 2))
        out = portattn.decode_attention(q, k, v, seqlens_k=lengths, **batch.options)
    return out[which.index(0), :, 0][None]


def ways(batch: Batch) -> Iterator[tuple[str, torch.Tensor, slice]]:
    """Every way to compute rows of the judged sequence; the first gives all rows."""
    size = len(batch.tensors[0][0])
    every, which = slice(0, size), batch.some()
    if batch.float8:
        yield "prefill", chunked(batch, [0], 0, size), every
    else:
        yield "alone", dense(batch, [0])[0], every
        yield "in a batch", dense(batch, which)[which.index(0)], every
        yield "packed", packed(batch, which)[which.index(0)], every
    for paged in (False, True):
        row = batch.generator.randrange(size)
        yield f"decoded, paged {paged}", decoded(batch, batch.some(), row, paged), slice(row, row + 1)
    begin, end = _span(batch, size)
    yield "chunk", chunked(batch, batch.some(), begin, end), slice(begin, end)


def differing(batch: Batch) -> list[str]:
    (_, whole, _), *others = ways(batch)
    assert torch.isfinite(whole).all()
    return [name for name, rows, at in others if not torch.equal(rows, whole[at])]


def gradients(batch: Batch, call: Any, which: list[int]) -> list[torch.Tensor]:
    """Gradients of the judged sequence's q, k and v, where all sequences of the batch have some."""
    leaves = [tuple(one.detach().clone().requires_grad_() for one in tensors) for tensors in batch.tensors]
    held = dataclasses.replace(batch, tensors=leaves)
    rows = call(held, which)
    seeds = [torch.Generator().manual_seed(n) for n in which]
    towards = [torch.randn(r.shape, generator=g).to(r) for r, g in zip(rows, seeds, strict=True)]
    return list(torch.autograd.grad(rows, leaves[0], towards))


def check(seeds: range, where: str, backend: str, **fields: Any) -> None:
    with portattn.settings(invariant=True, backend=backend, fallback="error"):
        for seed in seeds:
            batch = Batch(random.Random(seed), where, **fields)
            assert differing(batch) == [], (seed, batch.options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", range(0, 120, 12))
def test_a_row_has_the_same_bits_everywhere_on_the_reference(start: int, dtype: str) -> None:
    check(range(start, start + 12), "cpu", "auto", dtype=DTYPES[dtype], longest=90)


KERNELS: dict[str, dict[str, Any]] = {
    "float32": {"longest": 100}, "float8 caches": {"dtype": torch.bfloat16, "float8": True},
    "bfloat16": {"dtype": torch.bfloat16, "longest": 150}, "heads alone": {"heads": (2, 2), "widths": (40, 24)},
}  # fmt: skip


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("seed", range(6))
def test_a_row_has_the_same_bits_everywhere_in_kernels(seed: int, kind: str, device: Device) -> None:
    check(range(seed, seed + 1), device.name, device.path, **KERNELS[kind])


@pytest.mark.parametrize(
    ("kind", "scales"), [("int8", "token"), ("int4", "token"), ("int4", "head"), ("nvfp4", "head")]
)
def test_rows_over_a_quantised_cache_have_the_same_bits_everywhere(kind: str, scales: str, device: Device) -> None:
    """Of each sequence its rows alone, chunks of them, and the last as decoding has it, over the pages of all."""
    fields = {"kv_format": kind, "kv_scales": scales, "causal": "bottom_right", "dtype": "bf16", "return_lse": False}
    call = random_call(problem("ragged", head_dim=32, **fields | {"head_dim_v": 32}), seed=3, device=device.name)
    named: dict[str, Any] = given(call) | {"max_seqlen_q": 64}
    pages = {n: t for n, t in named.items() if n.endswith("_scale") and scales == "head" and t.shape[0] == 3}
    assert bool(pages) == (scales == "head")

    def attend(b: int, begin: int, stop: int, length: int) -> Any:
        own = {name: t[b : b + 1] for name, t in (pages | {"page_table": named["page_table"]}).items()}
        lengths = torch.tensor([length], dtype=torch.int32, device=device.name)
        bounds = torch.tensor([0, stop - begin], dtype=torch.int32, device=device.name)
        rows = named["q"][begin:stop]
        return portattn.paged_attention(**named | own | {"q": rows, "seqlens_k": lengths, "cu_seqlens_q": bounds})

    with portattn.settings(invariant=True, backend=device.path, fallback="error"):
        whole = portattn.paged_attention(**named)
        for b, (first, end) in enumerate(itertools.pairwise(named["cu_seqlens_q"].tolist())):
            for begin, stop in {(first, end), (first, (first + end) // 2), (end - 1, end)} if end > first + 1 else ():
                found = attend(b, begin, stop, int(named["seqlens_k"][b]) - (end - stop))
                assert torch.equal(found, whole[begin:stop]), (b, begin, stop)


@pytest.mark.parametrize("call", [dense, packed])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_do_not_depend_on_the_batch(seed: int, call: Any, device: Device) -> None:
    batch = Batch(random.Random(seed), device.name, longest=80)
    with portattn.settings(invariant=True, backend=device.path, fallback="error"):
        alone = gradients(batch, call, [0])
        for which in (batch.some(), [*range(len(batch.tensors))]):
            for name, one, other in zip("qkv", alone, gradients(batch, call, which), strict=True):
                assert torch.equal(one, other), (name, which, batch.options)


@pytest.mark.parametrize("seed", range(4))
def test_latent_rows_have_the_same_bits_everywhere(seed: int, device: Device) -> None:
    """Whole, in chunks and decoded, over pages in any order, beside other requests."""
    batch = Batch(random.Random(seed), device.name, heads=(4, 1), widths=(48, 48), dtype=torch.bfloat16, longest=90)

    def attend(spans: dict[int, tuple[int, int]]) -> torch.Tensor:
        cache, _, table = batch.pages()
        q = torch.cat([batch.tensors[n][0][a:b] for n, (a, b) in spans.items()])
        ends = [0, *itertools.accumulate(b - a for a, b in spans.values())]
        out = portattn.mla_attention(
            q[..., :32], q[..., 32:], cache[:, :, 0], table[[*spans]], batch.index(*(b for _, b in spans.values())),
            cu_seqlens_q=batch.index(*ends), max_seqlen_q=max(b - a for a, b in spans.values()), causal=True,
            scale=0.125,
        )  # fmt: skip
        place = list(spans).index(0)
        return out[ends[place] : ends[place + 1]]

    size = len(batch.tensors[0][0])
    others = {n: _span(batch, len(batch.tensors[n][0])) for n in range(1, len(batch.tensors))}
    with portattn.settings(invariant=True, backend=device.path, fallback="error"):
        whole = attend({0: (0, size)})
        for begin, end in ((0, size), (size - 1, size), _span(batch, size), _span(batch, size)):
            assert torch.equal(attend(others | {0: (begin, end)}), whole[begin:end]), (begin, end)


def test_without_the_contract_some_bits_differ() -> None:
    """Otherwise the tests above could not fail."""
    assert any(differing(Batch(random.Random(seed), "cpu", longest=90)) for seed in range(5))


SIZES: dict[str, tuple[dict[str, Any], ...]] = {
    "attention": ({"seq_q": 70}, {"seq_q": 9000, "batch": 64, "needs_grad": True}),
    "varlen_attention": ({"seq_q": 70, "total_q": 100, "total_k": 100}, {"seq_q": 1, "total_q": 900, "total_k": 900}),
    "decode_attention": ({"seq_q": 1, "seqlens_k": True}, {"seq_q": 1, "batch": 500, "seqlens_k": True}),
    "paged_attention": (
        {"seq_q": 1, "page_size": 16, "seqlens_k": True},
        {"seq_q": 300, "total_q": 700, "page_size": 128, "seqlens_k": True, "batch": 40},
    ),
}  # fmt: skip
SHAPE = {"batch": 3, "heads_q": 8, "heads_k": 2, "seq_q": 70, "seq_k": 9000, "causal": "bottom_right", "head_dim": 128}


def planned(target: Any, **fields: Any) -> Plan:
    return plan(Problem(**(SHAPE | {"dtype": "bf16"} | fields)), target, settings=Settings(invariant=True))


def deciding(made: Plan) -> tuple[Any, ...]:
    if made.lowering is None:
        return made.path, *(made.schedule[name] for name in ("width", "keys", "lazy", "columns", "halved", "splits"))
    lowering, launch = made.specialised
    choices = {name: getattr(lowering, name) for name in ("exp", "mask_value", "dot_precision", "warps", "unpack")}
    values = {name: launch.get(name) for name in DECIDING - choices.keys()}
    return tuple(sorted(choices.items())), tuple(sorted(values.items())), launch.splits


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("release", ["triton==3.2.0", "triton==3.4.0", "triton==3.6.0", "triton-ascend==3.2.0"])
def test_operations_share_what_decides_bits_on_every_chip(release: str, dtype: str) -> None:
    seen = set()
    for target in Registry.load().targets(release):
        for width in (64, 128):
            found = {}
            for op, fields in ((op, fields) for op, every in SIZES.items() for fields in every):
                with contextlib.suppress(PathUnavailable):
                    found[op, str(fields)] = deciding(planned(target, op=op, head_dim=width, dtype=dtype, **fields))
            assert len(set(found.values())) <= 1, (target.name, found)
            seen |= {target.backend} if found else set()
    assert {"ascend"} <= seen if "ascend" in release else {"cuda", "rocm"} <= seen


STORED: dict[str, dict[str, Any]] = {
    "int8": {"kv_format": "int8", "kv_scales": "token"}, "int4": {"kv_format": "int4", "kv_scales": "token"},
    "nvfp4": {"kv_format": "nvfp4", "kv_scales": "head"},
    "chosen blocks": {"op": "block_sparse_attention", "tokens": 20, "block_k": 64, "seqlens_k": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", STORED)
def test_quantised_caches_and_chosen_blocks_share_it_too(kind: str) -> None:
    every = [{"seq_q": 1}, {"seq_q": 1, "batch": 500}, {"seq_q": 700, "batch": 2}]
    if kind != "chosen blocks":
        every = [{"op": op} | fields for op in ("decode_attention", "paged_attention") for fields in SIZES[op]]
    free = set()
    for target in Registry.load().targets("triton==3.6.0"):
        found = {}
        for fields in every:
            with contextlib.suppress(PathUnavailable):
                found[str(fields)] = deciding(planned(target, **STORED[kind], **fields))
                other = Problem(**(SHAPE | {"dtype": "bf16"} | STORED[kind] | fields))
                free.add((target.name, deciding(plan(other, target))))
        assert len(set(found.values())) <= 1, (target.name, found)
    assert len(free) > len({name for name, _ in free})  # otherwise nothing could differ


def test_a_quirk_of_one_operation_is_a_quirk_of_all() -> None:
    """Smaller tiles for dense_forward alone would be other bits than decode_split's."""
    made = planned(portattn.target("gfx1100", "triton==3.4.0"), op="decode_attention", seq_q=1, seqlens_k=True)
    assert "rocm-0121-rdna3-spills" in [quirk.id for quirk in made.quirks if quirk.sets]
    assert made.specialised[1].block_m == 16


def test_a_plan_says_what_it_keeps_and_why_other_paths_cannot() -> None:
    target = portattn.target("h100", "triton==3.6.0")
    made = planned(target, op="attention")
    text = made.explain()
    assert "summed in one order (invariant=True): key tiles of one size, keys not split" in text
    assert "invariant" in text.splitlines()[0]
    free = plan(Problem(**SHAPE, dtype="bf16"), target)
    assert made.key != free.key
    text = planned(target, op="attention", dtype="fp32").explain()
    assert "tiles of 32 rows and 32 keys for any sizes, keys not split" in text
    settings = Settings(invariant=True, backend="sdpa")
    with pytest.raises(PathUnavailable, match="invariant: it cannot keep the order of keys"):
        plan(Problem(**SHAPE), portattn.target("h100", "triton==3.6.0"), settings=settings)


@pytest.mark.parametrize("release", ["triton==3.6.0", "triton==3.8.0", "triton==3.9.0"])
@pytest.mark.parametrize("width", [64, 72, 128, 256])
@pytest.mark.parametrize("options", [{}, {"softcap": True}, {"sinks": True}, {"window_left": 70}])
def test_a_chip_with_a_kernel_of_its_own_has_it_for_every_operation(
    release: str, width: int, options: dict[str, Any]
) -> None:
    target = portattn.target("h100", release)
    every = [{"op": op} | fields for op in SIZES for fields in SIZES[op]]
    every.append({"op": "decode_attention", "seq_q": 1, "seqlens_k": True, "num_splits": 1})
    [(path, *_)] = {deciding(planned(target, head_dim=width, **fields | options)) for fields in every}
    assert path == "gluon_forward"


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("op", ["attention_backward", "varlen_attention_backward"])
def test_its_gradients_are_summed_in_an_order_that_no_size_decides(op: str, width: int, causal: str) -> None:
    fields: dict[str, Any] = {"op": op, "head_dim": width, "causal": causal, "deterministic": True}
    rows, found = [(3, 70, 9000), (1, 4096, 4096), (64, 300, 300), (500, 1, 40)], set()
    for batch, seq_q, seq_k in rows:
        sizes = {"total_q": batch * seq_q, "total_k": batch * seq_k} if "varlen" in op else {}
        sizes |= {"batch": batch, "seq_q": seq_q, "seq_k": seq_k}
        made = planned(portattn.target("h100", "triton==3.6.0"), **fields | sizes)
        found.add((made.path, made.schedule["keys"], made.schedule["messages"] > 0, made.schedule["turns"]))
    assert found == {("gluon_backward", 64, False, False) if width == 256 else ("gluon_backward", 128, True, True)}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"aligned": False, "needs_grad": True}, "contiguous rows, bases and strides of 16 bytes"),
        ({"aligned": False}, "contiguous rows, bases and strides of 16 bytes"),
        ({"op": "paged_attention", "seq_q": 1, "page_size": 8, "seqlens_k": True}, "multiple of 16 tokens, not 8"),
        ({"batch": 2**28, "seq_q": 1}, "too many tiles of rows"),
    ],
)
def test_rows_of_such_a_kernel_do_not_get_the_bits_of_the_core(fields: dict[str, Any], reason: str) -> None:
    target, problem = portattn.target("h100", "triton==3.6.0"), Problem(**SHAPE | {"dtype": "bf16"} | fields)
    with pytest.raises(PathUnavailable, match=f"(?s)in one order.*{reason}.*backend='triton' in every call"):
        plan(problem, target, settings=Settings(invariant=True))
    assert plan(problem, target, settings=Settings(invariant=True, backend="triton")).path == "triton"
    assert plan(problem, portattn.target("h100", "triton==3.4.0"), settings=Settings(invariant=True)).path == "triton"


@pytest.mark.parametrize("option", ["tree_mask", "mask", "alibi_slopes", "leftpad_k", "kv_format"])
def test_options_that_such_a_kernel_lacks_are_the_cores_in_every_operation(option: str) -> None:
    fields: dict[str, Any] = {"kv_format": "e4m3", "kv_scales": "head"} if option == "kv_format" else {option: True}
    if option in ("tree_mask", "kv_format"):
        fields |= {"op": "decode_attention", "seq_q": 4, "seqlens_k": True}
    assert planned(portattn.target("h100", "triton==3.6.0"), **fields).path == "triton"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"op": "decode_attention", "seq_q": 1, "num_splits": 3}, "num_splits is 3"),
        ({"dropout": True}, "draws depend on a sequence's place"),
        ({"op": "attention_backward", "leftpad_k": True}, "left padding moves the tiles of gradients"),
        ({"op": "indexer_logits", "heads_k": 1, "causal": "none"}, "cannot keep the order of keys"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    for target in (portattn.target("h100", "triton==3.6.0"), portattn.target("cpu:generic", "triton==3.6.0")):
        with pytest.raises(PathUnavailable, match=reason):
            planned(target, **fields)


def test_the_reference_refuses_by_name() -> None:
    cpu = portattn.target("cpu:generic", "triton==3.6.0")
    with pytest.raises(PathUnavailable, match="its gradients are products over all rows"):
        planned(cpu, needs_grad=True)
    with pytest.raises(PathUnavailable, match="left padding moves its tiles of keys"):
        planned(cpu, leftpad_k=True)


def test_no_call_runs_what_was_cached_under_the_other_setting() -> None:
    q = torch.randn(1, 2, 5, 16)
    for _ in range(2):
        portattn.attention(q, q, q)
        assert portattn.last_plan().path == "sdpa"
        with portattn.settings(invariant=True):
            portattn.attention(q, q, q)
        assert portattn.last_plan().path == "reference"


@pytest.mark.parametrize("start", range(1000, 3000, 200))
def test_thousands_of_batches_have_the_same_bits_on_the_reference(start: int) -> None:
    for dtype in DTYPES.values():
        check(range(start, start + 200), "cpu", "auto", dtype=dtype, longest=90)
