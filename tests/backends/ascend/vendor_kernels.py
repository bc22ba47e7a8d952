"""Kernels of torch_npu's attention operators by their documents, in float64. A call is bound through the operator's
real schema (schemas/, by torch_npu's release). What is documented as undefined comes back as NaN, so that nothing can
lean on it; what is documented as refused is an AssertionError. The documents: torch_npu/_op_plugin_docs.py."""

import functools
import math
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

INT_MAX = 2147483647
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
TYPES = {"Tensor": torch.Tensor, "int": int, "float": float, "str": str, "bool": bool, "List[int]": list}
RELEASES = {
    path.stem: {schema.name: schema for schema in map(torch._C.parse_schema, path.read_text().splitlines())}
    for path in sorted((Path(__file__).parent / "schemas").glob("*.txt"))
}
RELEASE = "2.13.0"
SCHEMAS = RELEASES[RELEASE]


def bind(schema: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return every argument of an operator by name, defaults included; stricter on numbers than torch's binding."""
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    given = dict(zip(positional, args, strict=len(args) > len(positional))) | kwargs
    bound = {a.name: given.pop(a.name, a.default_value) for a in schema.arguments}
    assert not given, f"{schema.name} has no {', '.join(given)}"
    for argument in schema.arguments:
        value, kind = bound[argument.name], str(argument.type)
        wanted: Any = TYPES[kind.removeprefix("Optional[").removesuffix("]" * kind.startswith("Optional["))]
        absent = value is None and kind.startswith("Optional[")
        alike = isinstance(value, torch.Tensor) if wanted is torch.Tensor else type(value) is wanted
        assert absent or alike, f"{schema.name}: {argument.name} is {value!r}, not {kind}"
    return bound


def require(**limits: bool) -> None:
    """Raise AssertionError with the names of the documented limits that a call breaks."""
    broken = [name for name, kept in limits.items() if not kept]
    assert broken == []


class VendorKernels(types.ModuleType):
    """Install as sys.modules["torch_npu"]. `calls` holds (operator, arguments) in order."""

    def __init__(self, release: str = RELEASE) -> None:
        super().__init__("torch_npu")
        self.__version__, self.schemas = release, RELEASES[release]
        self.calls: list[tuple[str, dict[str, Any]]] = []
        for name in KERNELS:
            setattr(self, name.removeprefix("npu::"), functools.partial(self._run, name))

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        bound = bind(self.schemas[name], args, kwargs)
        self.calls.append((name.removeprefix("npu::"), bound))
        if name not in GRADIENT_OF:
            assert not any(isinstance(v, torch.Tensor) and v.requires_grad for v in bound.values()), "for inference"
            return KERNELS[name](**bound)
        return _Formula.apply(self.schemas, name, bound, *(bound.get(operand) for operand in OPERANDS))


class _Formula(torch.autograd.Function):
    """A fusion operator as torch_npu's formula differentiates it: only the first result's gradient, `dy`, counts."""

    @staticmethod
    def forward(schemas: Any, name: str, bound: dict[str, Any], *operands: torch.Tensor) -> Any:
        return KERNELS[name](**bound | dict(zip(OPERANDS, operands, strict=True)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.schemas, ctx.name, ctx.bound, *operands = inputs
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, *statistics: torch.Tensor | None) -> Any:
        if dy is None:
            raise RuntimeError("npu_fusion_attention_grad: dy is an undefined tensor")
        gradient = GRADIENT_OF[ctx.name]
        schema = ctx.schemas[gradient]
        given = {"scale_value": ctx.bound["scale"], "dy": dy, **ctx.bound}
        given |= dict(zip(OPERANDS, ctx.saved_tensors, strict=True))
        names = [argument.name for argument in schema.arguments if argument.name in given]
        dq, dk, dv, dpse, *_, dsink = KERNELS[gradient](**bind(schema, (), {n: given[n] for n in names}))
        found = zip(OPERANDS, (dq, dk, dv, dpse, dsink), strict=True)
        return None, None, None, *(None if given[name] is None else tensor for name, tensor in found)


# Semantics of one sequence: q (N, Sq, D), k (Nk, Sk, D), v (Nk, Sk, Dv), seen (1 or N, Sq, Sk)


def seen_keys(mode: int, rows: int, keys: int, band: tuple[int, int], mask: torch.Tensor | None) -> torch.Tensor:
    """Keys that each row sees by a sparse mode."""
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    diagonal = j - i - (keys - rows)  # 0 at the lower right corner
    if mode in (0, 1):
        return torch.ones(1, rows, keys, dtype=torch.bool) if mask is None else ~mask
    assert mode != 4 or sum(band) >= 0, "the sides of a band must meet"
    seen = {2: j <= i, 3: diagonal <= 0, 4: (diagonal >= -band[0]) & (diagonal <= band[1])}
    return seen[mode][None]


def scores_of(q: torch.Tensor, k: torch.Tensor, scale: float, seen: torch.Tensor, pse: torch.Tensor | None,
        pse_type: int) -> torch.Tensor:  # fmt: skip
    products = q.double() @ k.double().repeat_interleave(q.shape[0] // k.shape[0], 0).mT
    added = torch.zeros(()) if pse is None else pse.double()
    scores = {0: products * scale + added, 1: (products + added) * scale}[pse_type]
    return scores.masked_fill(~seen, -math.inf)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, seen: torch.Tensor,
        pse: torch.Tensor | None = None, pse_type: int = 1,
        sink: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out, maximum and sum of the softmax, NaN in rows that see no key; a masked value of NaN spreads."""
    scores = scores_of(q, k, scale, seen, pse, pse_type)
    largest = scores.amax(-1)
    if sink is not None:
        largest = largest.maximum(sink.double()[:, None])
    weights = torch.exp(scores - largest[..., None])
    total = weights.sum(-1) if sink is None else weights.sum(-1) + torch.exp(sink.double()[:, None] - largest)
    values = v.double().repeat_interleave(q.shape[0] // k.shape[0], 0)
    blind = ~seen.any(-1)
    out = (weights @ values / total[..., None]).masked_fill(blind[..., None], math.nan)
    return out, largest.masked_fill(blind, math.nan), total.masked_fill(blind, math.nan)


def gradients_of(dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, seen: torch.Tensor,
        pse: torch.Tensor | None, pse_type: int,
        sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return dQ, dK, dV and the sink's gradient, written out: operators beneath autograd record nothing.
    With P = softmax(S): dV = Pᵀ dO, dS = P ∘ (dP - rowsum(dP ∘ P)), and the sink's score has a dP of 0."""
    group, shared = q.shape[0] // k.shape[0], (k.shape[0], -1, *k.shape[1:2])
    _, largest, total = attend(q, k, v, scale, seen, pse, pse_type, sink)
    p = torch.exp(scores_of(q, k, scale, seen, pse, pse_type) - largest[..., None]) / total[..., None]
    keys, values = (t.double().repeat_interleave(group, 0) for t in (k, v))
    dp = dy.double() @ values.mT
    mean = (dp * p).sum(-1, keepdim=True)
    ds = p * (dp - mean) * scale
    dk = (ds.mT @ q.double()).reshape(*shared, q.shape[2]).sum(1)
    dv = (p.mT @ dy.double()).reshape(*shared, dy.shape[2]).sum(1)
    own = torch.zeros(q.shape[0]) if sink is None else torch.exp(sink.double()[:, None] - largest) / total
    dsink = -(own * mean[..., 0]).sum(1) if sink is not None else own
    return ds @ keys, dk, dv, dsink


# npu_fusion_attention and its second version


def fusion(**a: Any) -> tuple[Any, ...]:
    a = _checked_fusion(a)
    packed = a["input_layout"] == "TND"
    found = [attend(*sequence) for sequence in _sequences(a)]
    out, largest, total = (
        torch.cat([values.transpose(0, 1) for values in part]) if packed else torch.stack(part)
        for part in zip(*found, strict=True)
    )
    statistics = [part[..., None].expand(*part.shape, 8).to(torch.float32) for part in (largest, total)]
    if packed and a["softmax_layout"] == "":  # documented: the order of (N, T, 8) in that shape
        statistics = [part.transpose(0, 1).reshape(part.shape) for part in statistics]
    return out.to(a["query"].dtype), *statistics, torch.empty(0, dtype=a["query"].dtype), 0, 0, 0


def fusion_grad(**a: Any) -> tuple[Any, ...]:
    assert a["dy"] is not None, "dy is an undefined tensor"
    a = _checked_fusion(a | {"scale": a["scale_value"]})
    packed = a["input_layout"] == "TND"
    dys = _split(a["dy"], a["actual_seq_qlen"]) if packed else a["dy"].unbind(0)
    found = [gradients_of(dy, *sequence) for sequence, dy in zip(_sequences(a), dys, strict=True)]
    *parts, sinks = zip(*found, strict=True)
    gradients = [torch.cat([g.transpose(0, 1) for g in part]) if packed else torch.stack(part) for part in parts]
    dsink = torch.empty(0) if a["sink"] is None else torch.stack(sinks).sum(0).float()
    dpse = torch.empty(0) if a["pse"] is None else torch.full_like(a["pse"], math.nan)  # documented nowhere
    ropes = [torch.empty(0)] * 2 if "query_rope" in a else []
    return *(g.to(a["query"].dtype) for g in gradients), dpse, *ropes, dsink


def _sequences(a: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    q, k, v = (a[name] for name in OPERANDS[:3])
    if a["input_layout"] == "TND":
        ends_q, ends_k = a["actual_seq_qlen"], a["actual_seq_kvlen"]
        pieces = zip(_split(q, ends_q), _split(k, ends_k), _split(v, ends_k), strict=True)
    else:
        pieces = zip(q, k, v, strict=True)
    whole = a["atten_mask"] if a["sparse_mode"] == 1 else None
    for b, (one_q, one_k, one_v) in enumerate(pieces):
        mask, pse = (None if t is None else t[b if len(t) > 1 else 0] for t in (whole, a["pse"]))
        seen = seen_keys(a["sparse_mode"], one_q.shape[1], one_k.shape[1], a["band"], mask)
        yield one_q, one_k, one_v, a["scale"], seen, pse, a["pse_type"], a["sink"]


def _split(tensor: torch.Tensor, ends: list[int]) -> list[torch.Tensor]:
    return [tensor[a:b].transpose(0, 1) for a, b in zip([0, *ends], ends, strict=False)]


def _checked_fusion(a: dict[str, Any]) -> dict[str, Any]:
    query, key, value = (a[name] for name in OPERANDS[:3])
    band = [a.get(f"{side}_tockens", a.get(f"{side}_tokens")) for side in ("pre", "next")]
    a = {"pse_type": 1, "band": tuple(band), "sink": None, "softmax_layout": ""} | a  # not of every release
    packed, heads = a["input_layout"] == "TND", a["head_num"]
    rows, keys, kv_heads = query.shape[0 if packed else 2], key.shape[0 if packed else 2], key.shape[1]
    require(
        layout=a["input_layout"] in ("TND", "BNSD"), heads=query.shape[1] == heads <= 256 and heads % kv_heads == 0,
        dtype=key.dtype == value.dtype == query.dtype in (*SIXTEEN_BIT, torch.float32),
        rank=query.dim() == key.dim() == (3 if packed else 4), keys=key.shape[:-1] == value.shape[:-1],
        batch=packed or len(query) == len(key), widths=768 >= query.shape[-1] == key.shape[-1] >= value.shape[-1],
        sizes=1 <= rows <= 1 << 20 and 1 <= keys <= 1 << 20, inner_precise=a["inner_precise"] in (0, 2),
        no_dropout_of_its_own=a["keep_prob"] == 1.0, softmax_layout=a["softmax_layout"] in ("", *(["TND"] * packed)),
        lists_if_packed=all((a[name] is not None) == packed for name in ("actual_seq_qlen", "actual_seq_kvlen")),
    )  # fmt: skip
    unused = ("padding_mask", "prefix", "dropout_mask", "query_rope", "key_rope", "q_start_idx", "kv_start_idx")
    assert [name for name in unused if a.get(name) is not None] == []
    if packed:
        _check_ends(a["actual_seq_qlen"], rows, 1024)
        _check_ends(a["actual_seq_kvlen"], keys, 1024)
        assert len(a["actual_seq_qlen"]) == len(a["actual_seq_kvlen"])
    mask, sink, pse = a["atten_mask"], a["sink"], a["pse"]
    if a["sparse_mode"] == 1:
        batches = {heads: (len(query),), 1: (len(query), 1)}[mask.shape[1]]  # no (1, N, Sq, Sk)
        _check_whole_mask(mask, batches, (heads, 1), rows, keys)
        assert not packed, "varlen: (Sq, Sk) alone"
    else:
        _check_compressed_mask(a["sparse_mode"], mask, query.device)
    assert sink is None or (sink.shape, sink.dtype) == ((heads,), torch.float32)
    if pse is not None:
        shapes = [(batch, heads, rows, keys) for batch in (1, len(query))]
        dtype, kind = pse.dtype == query.dtype, a["pse_type"] in (0, 1)
        require(dense=not packed, dtype=dtype, kind=kind, shape=pse.shape in shapes)
    return a


# npu_fused_infer_attention_score and its second version


def fused_infer(**a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    unused = [n for n in a if "quant" in n and "mode" not in n and n not in SCALES]
    unused += ["pse_shift", "query_padding_size", "kv_padding_size", "key_shared_prefix", "value_shared_prefix"]
    unused += ["actual_shared_prefix_len", "query_rope", "key_rope"]
    assert [n for n in unused if a[n] is not None] == []
    tokens_first = a["input_layout"] == "BSND"
    query, key, value = (a[name] for name in OPERANDS[:3])
    contiguous = all(tensor.is_contiguous() for tensor in (query, key, value))
    if tokens_first:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    batch, heads, seq_q, head_dim = query.shape
    one_row, kv_heads, paged = seq_q == 1, a["num_key_value_heads"], a["block_table"] is not None
    require(
        layout=a["input_layout"] in ("BNSD", "BSND"), contiguous=contiguous, dtype=query.dtype in SIXTEEN_BIT,
        interleaved=not tokens_first or (not paged and (one_row or heads * head_dim < 65535)),
        heads=a["num_heads"] == heads <= 256, group=heads % kv_heads == 0 and heads <= 64 * kv_heads,
        batch=1 <= batch <= 65536, seq_q=1 <= seq_q <= 20971520, head_dim=head_dim <= 512,
        values=key.shape == value.shape, row=head_dim % 16 == 0, antiquant_mode=a["antiquant_mode"] == 0,
        inner_precise=a["inner_precise"] in ((0, 1) if one_row else (0, 2)),
    )  # fmt: skip
    modes = (a["key_antiquant_mode"], a["value_antiquant_mode"])
    scales = [a[name] for name in SCALES]
    quantised = scales[0] is not None
    assert key.dtype == value.dtype == (torch.int8 if quantised else query.dtype)
    assert quantised or (modes == (0, 0) and scales[1] is None)
    if paged:
        capacity = _check_pages(a, key, batch, kv_heads, head_dim, one_row, quantised)
        mode, shape = 5, (key.shape[0], kv_heads, a["block_size"])
    else:
        capacity = key.shape[2]
        mode, shape = 3, (batch, kv_heads, capacity)
        require(block_size=a["block_size"] == 0, keys=key.shape == (batch, kv_heads, capacity, head_dim))
    assert 1 <= capacity <= (262144 if one_row else 20971520)
    if quantised:
        require(one_row=one_row, modes=modes == (mode, mode), shapes=all(scale.shape == shape for scale in scales))
        assert all(scale.dtype == torch.float32 and scale.is_contiguous() for scale in scales)
    mask = a["atten_mask"]
    if one_row:  # the incremental branch
        ignored = [a[name] for name in ("sparse_mode", "pre_tokens", "next_tokens", "actual_seq_lengths")]
        assert ignored == [0, INT_MAX, INT_MAX, None], "they do nothing for a single row"
    _check_compressed_mask(a["sparse_mode"], mask, query.device)
    rows = _check_lengths(a["actual_seq_lengths"], batch, seq_q)
    lengths = _check_lengths(a["actual_seq_lengths_kv"], batch, capacity)
    band = (a["pre_tokens"], a["next_tokens"])
    out = torch.full((batch, heads, seq_q, head_dim), math.nan, dtype=torch.float64)
    lse = torch.full((batch, heads, seq_q), math.nan, dtype=torch.float64)
    for b in range(batch):
        seen = seen_keys(a["sparse_mode"], rows[b], lengths[b], band, None)
        k, v = (
            _cached(tensor, scale, a["block_table"], b, lengths[b], kv_heads)
            for tensor, scale in zip((key, value), scales, strict=True)
        )
        out[b, :, : rows[b]], largest, total = attend(query[b, :, : rows[b]], k, v, a["scale"], seen)
        lse[b, :, : rows[b]] = largest + total.log()
    out = out.to(query.dtype).transpose(1, 2).contiguous() if tokens_first else out.to(query.dtype)
    return out, lse[..., None].float() if a["softmax_lse_flag"] else torch.zeros(0)


def fused_infer_v2(**a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = {"num_query_heads", "num_key_value_heads", "softmax_scale", "input_layout", "sparse_mode", "pre_tokens",
               "next_tokens", "return_softmax_lse", "atten_mask", "actual_seq_qlen", "actual_seq_kvlen"}  # fmt: skip
    assert [n for n in a if n not in numbers and n not in OPERANDS and a[n] is not None and a[n] != 0] == []
    assert a["input_layout"] == "TND"
    query, key, value = (a[name] for name in OPERANDS[:3])
    heads, kv_heads, band = a["num_query_heads"], a["num_key_value_heads"], (a["pre_tokens"], a["next_tokens"])
    require(
        contiguous=all(tensor.is_contiguous() for tensor in (query, key, value)), rows=len(query) <= 1 << 20,
        dtype=query.dtype == key.dtype == value.dtype == torch.bfloat16, keys=len(value) == len(key) <= 1 << 20,
        heads=(query.shape[1], key.shape[1], value.shape[1]) == (heads, kv_heads, kv_heads) and heads <= 256,
        group=heads % kv_heads == 0 and heads <= 64 * kv_heads, key_dim=key.shape[2] == query.shape[2],
        head_dims=(query.shape[2], value.shape[2]) in ((128, 128), (192, 128), (192, 192)),
        sparse_mode=a["sparse_mode"] in (0, 3, 4),
    )  # fmt: skip
    ends_q, ends_k = a["actual_seq_qlen"], a["actual_seq_kvlen"]
    _check_ends(ends_q, len(query), 4096)
    _check_ends(ends_k, len(key), 4096)
    _check_compressed_mask(a["sparse_mode"], a["atten_mask"], query.device)
    found = []
    for q, k, v in zip(_split(query, ends_q), _split(key, ends_k), _split(value, ends_k), strict=True):
        rows, keys = q.shape[1], k.shape[1]
        assert a["sparse_mode"] != 3 or rows < keys
        assert a["sparse_mode"] != 4 or (band[0] >= -rows and band[1] >= -keys)
        found.append(attend(q, k, v, a["softmax_scale"], seen_keys(a["sparse_mode"], rows, keys, band, None)))
    out, largest, total = (torch.cat([x.transpose(0, 1) for x in part]) for part in zip(*found, strict=True))
    lse = (largest + total.log())[..., None].float()
    return out.to(query.dtype), lse if a["return_softmax_lse"] else torch.zeros(0)


def _check_pages(a: dict[str, Any], key: torch.Tensor, batch: int, kv_heads: int, head_dim: int, one_row: bool,
        quantised: bool) -> int:  # fmt: skip
    """Return the tokens that a row of the table has room for."""
    table, size, lengths = a["block_table"], a["block_size"], a["actual_seq_lengths_kv"]
    flat, rows = key.dim() == 3, zip(table.tolist(), lengths, strict=True)
    require(
        table=(table.dtype, table.ndim, len(table)) == (torch.int32, 2, batch) and table.is_contiguous(),
        blocks=sum(-(-length // size) for length in lengths) <= len(key),
        ids=all(set(row) == set(row[: -(-n // size)]) <= set(range(len(key))) for row, n in rows),
        cache=not one_row or key.numel() <= INT_MAX,
        block_size=0 < size <= 512 and size % (128 if not one_row else 32 if quantised else 16) == 0,
        pages=key.shape[1:] == ((size, kv_heads * head_dim) if flat else (kv_heads, size, head_dim)),
        width=not flat or kv_heads * head_dim <= 65535,
    )  # fmt: skip
    return size * table.shape[1]


def _cached(cache: torch.Tensor, scale: torch.Tensor | None, table: torch.Tensor | None, b: int, length: int,
        heads: int) -> torch.Tensor:  # fmt: skip
    """Return a sequence's keys or values (Nk, length, D); pages behind its end are not read."""
    if table is None:
        kept, factors = cache[b, :, :length], None if scale is None else scale[b, :, :length]
    else:
        pages = cache.unflatten(2, (heads, -1)).transpose(1, 2) if cache.dim() == 3 else cache
        used = table[b, : -(-length // pages.shape[2])].tolist()
        kept, factors = (
            None if t is None else t[used].transpose(0, 1).flatten(1, 2)[:, :length] for t in (pages, scale)
        )
    return kept if factors is None else kept.double() * factors[..., None].double()


def _check_ends(ends: Any, total: int, most: int) -> None:
    ints = all(type(n) is int for n in ends)
    require(sequences=1 <= len(ends) <= most, ints=ints, order=[0, *ends] == sorted({0, *ends}), end=ends[-1] == total)


def _check_lengths(lengths: Any, batch: int, capacity: int) -> list[int]:
    if lengths is None:
        return [capacity] * batch
    assert [type(n) is int and 1 <= n <= capacity for n in lengths] == [True] * batch
    return lengths


def _check_whole_mask(mask: Any, batches: Any, heads: Any, rows: int, keys: int) -> None:
    shapes = [(b, h, rows, keys) for b in batches for h in heads]
    require(dtype=mask.dtype == torch.bool, contiguous=mask.is_contiguous(), shape=mask.shape in shapes)


def _check_compressed_mask(sparse_mode: int, mask: Any, device: torch.device) -> None:
    if sparse_mode == 0:
        assert mask is None
        return
    assert not mask.is_inference(), "could not be saved for a backward pass"
    require(dtype=mask.dtype == torch.bool, device=mask.device == device, contiguous=mask.is_contiguous())
    assert torch.equal(mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))


SCALES = ("key_antiquant_scale", "value_antiquant_scale")
OPERANDS = ("query", "key", "value", "pse", "sink")
KERNELS: dict[str, Callable[..., Any]] = {
    "npu::npu_fusion_attention": fusion, "npu::npu_fusion_attention_grad": fusion_grad,
    "npu::npu_fusion_attention_v2": fusion, "npu::npu_fusion_attention_grad_v2": fusion_grad,
    "npu::npu_fused_infer_attention_score": fused_infer, "npu::npu_fused_infer_attention_score_v2": fused_infer_v2,
}  # fmt: skip
GRADIENT_OF = {
    "npu::npu_fusion_attention": "npu::npu_fusion_attention_grad",
    "npu::npu_fusion_attention_v2": "npu::npu_fusion_attention_grad_v2",
}
