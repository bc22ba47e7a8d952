"""Sets of single operators beside a peer: float8 attention, writes into a paged cache, sparse latent attention."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

import portattn
from portattn.tools.bench.contenders import OURS
from portattn.tools.bench.peers import has_vllm, neutral
from portattn.tools.bench.peers.packages import has_op
from portattn.tools.bench.workloads import Measure, Row, attend, judge_attention, judge_result

TOKENS, COLUMNS, CHECKED = 16384, 2048, 256
MOST_RMS = 0.1  # root mean square error by the root mean square of the result
FP8 = [(dim, length, causal) for dim in (128, 256) for length in (4096, 16384) for causal in (False, True)]
FP8_TINY = [(64, 64, False), (64, 64, True)]


def fp8_forward(measure: Measure) -> Iterator[Row]:
    """Attention over e4m3 queries, keys and values, beside the same call in bfloat16.

    Widths 128 and 256, 4,096 and 16,384 tokens, full and causal; 16,384 tokens in all, 2,048 columns of all heads.
    Tensors are quantised beforehand, with a scale for each head. TFLOP/s count two products of 2·Sq·Sk·D, of causal
    calls half. `error` is the root mean square error of one head's last rows against float64 attention over the
    tensors before they were quantised, by its root mean square."""
    tokens, columns = (128, 128) if measure.tiny else (TOKENS, COLUMNS)
    for dim, length, causal in FP8_TINY if measure.tiny else FP8:
        name = f"D={dim} S={length}{' causal' * causal}"
        if not measure.wanted(name):
            continue
        torch.manual_seed(0)
        shape = (max(1, tokens // length), columns // dim, length, dim)
        wide = [measure.normal(*shape) for _ in range(3)]
        runs = _fp8_contenders(wide, causal, measure.device)
        flops = 4 * wide[0].numel() * length * (0.5 if causal else 1.0)

        def judge(run: Callable[[], torch.Tensor], ours: bool, wide: list[Any] = wide, causal: bool = causal) -> Row:
            rms = relative_rms(run(), wide, causal)
            path = portattn.last_plan().path if ours else ""
            return {"error": rms, "budget": MOST_RMS, "right": rms <= MOST_RMS, "path": path}

        judges = {n: lambda n=n, run=run: judge(run, not n.startswith("Flash")) for n, run in runs.items()}
        for row in measure.rows(name, runs, judges, graphs=False, peer="bf16"):
            yield row | ({"tflops": flops / row["ms"] * 1e-9} if "ms" in row else {})


def _fp8_contenders(wide: list[torch.Tensor], causal: bool, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    narrow = portattn.quantize(*wide, "e4m3")
    given = narrow.arguments()
    asked = "gluon_forward_fp8" if device == "cuda" else None  # e4m3 probabilities must be asked for
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "e4m3": lambda: portattn.attention(**given, causal=causal, backend=asked),
        "bf16": lambda: portattn.attention(*wide, causal=causal),
    }
    if device == "cuda":
        runs["e4m3, core"] = lambda: portattn.attention(**given, causal=causal, backend="triton")
        if has_vllm():
            runs["FlashAttention-3, e4m3"] = _fa3_fp8(narrow, causal)
    return runs


def _fa3_fp8(narrow: Any, causal: bool) -> Callable[[], torch.Tensor]:
    """Return a call of vllm's FlashAttention-3, in its own layout."""
    batch, heads, keys, width = narrow.k.shape
    given = neutral() | {f"{name}_descale": getattr(narrow, f"{name}_scale").expand(batch, heads) for name in "qkv"}
    given |= {name: getattr(narrow, name).transpose(1, 2).contiguous() for name in "qkv"}
    given |= {"seqused_k": torch.full((batch,), keys, dtype=torch.int32, device=narrow.k.device)}
    given |= {"softmax_scale": width**-0.5, "is_causal": causal}
    return lambda: torch.ops._vllm_fa3_C.fwd(**given)[0].transpose(1, 2)


def relative_rms(out: torch.Tensor, wide: list[torch.Tensor], causal: bool) -> float:
    """Return the error of one head's last rows, which align with the end of the keys."""
    q, k, v = (t[0, 0][:, None] for t in wide)
    rows = min(CHECKED, q.shape[0])
    exact = attend(q[-rows:], k, v, torch.float64, causal)[:, 0]
    return float(((out[0, 0, -rows:].double() - exact).pow(2).mean() / exact.pow(2).mean()).sqrt())


HEADS, WIDTH, PAGE, ANGLES = 8, 128, 16, 16384
WRITES, WRITES_TINY = {"decode": 64, "prompt": 8192}, {"decode": 4, "prompt": 40}  # tokens
E4M3 = torch.float8_e4m3fn
# Name -> (dtype of the cache, what a scale belongs to, whether keys are rotated).
KINDS: dict[str, tuple[torch.dtype, str, bool]] = {
    "bf16": (torch.bfloat16, "", False), "bf16, rotated": (torch.bfloat16, "", True),
    "e4m3, a scale for each head": (E4M3, "head", False), "e4m3, a scale for each token": (E4M3, "token", False),
    "e4m3, a scale for each token, rotated": (E4M3, "token", True),
}  # fmt: skip


def cache_write(measure: Measure) -> Iterator[Row]:
    """write_pages beside a device-to-device copy of as many bytes: a decode step and a prompt.

    Eight heads of 128 bfloat16 columns go into pages of 16 tokens, as they are or as e4m3, with a scale for each head
    or for each token and head, and with the keys rotated. The stored bits are compared with the reference path's. GB/s
    are of the bytes that are read and written; `of_peer` is the share of the rate of torch's copy_ of as many bytes."""
    for name, tokens in (WRITES_TINY if measure.tiny else WRITES).items():
        for kind in KINDS:
            if measure.wanted(f"{name}, {kind}"):
                yield from _write(measure, f"{name}, {kind}", tokens, kind)


def _write(measure: Measure, name: str, tokens: int, kind: str) -> Iterator[Row]:
    given = write_arguments(tokens, kind, measure.device)
    count = written_bytes(given)
    source = torch.zeros(count // 2, dtype=torch.uint8, device=measure.device)
    target = torch.empty_like(source)

    def judge() -> Row:
        ours, theirs = (write_arguments(tokens, kind, measure.device) for _ in range(2))
        portattn.write_pages(**ours)
        path = portattn.last_plan().path
        portattn.write_pages(**theirs, backend="reference")
        right = all(torch.equal(one, other) for one, other in zip(_stored(ours), _stored(theirs), strict=True))
        return {"right": right, "path": path, "note": "" if right else "other bits than the reference's"}

    runs = {OURS: lambda: portattn.write_pages(**given), "copy": lambda: target.copy_(source)}
    for row in measure.rows(name, runs, {OURS: judge}, cold=True, peer="copy"):
        row["bytes"] = count
        if "ms" in row:
            row["gb_s"] = count / row["ms"] / 1e6
            row["extra_bytes"] = measure.clock.peak_extra_bytes(runs[row["contender"]])
        yield row


def write_arguments(tokens: int, kind: str, device: str) -> dict[str, Any]:
    dtype, scales, rotated = KINDS[kind]
    torch.manual_seed(0)
    pages = -(-4 * tokens // PAGE)
    given: dict[str, Any] = {name: torch.randn(tokens, HEADS, WIDTH, device=device).bfloat16() for name in "kv"}
    for name in ("k", "v"):
        given[f"{name}_pages"] = torch.zeros(pages, PAGE, HEADS, WIDTH, device=device, dtype=torch.float32).to(dtype)
        if scales:
            shape = (HEADS,) if scales == "head" else (pages, PAGE, HEADS)
            given[f"{name}_scale"] = torch.full(shape, 0.01, device=device)
    given["slot_mapping"] = torch.randperm(pages * PAGE, device=device)[:tokens]
    if rotated:
        angles = torch.arange(ANGLES, device=device)[:, None] * 1e4 ** -torch.linspace(0, 1, WIDTH // 2, device=device)
        given |= {"cos": angles.cos(), "sin": angles.sin()}
        given["positions"] = torch.randint(0, ANGLES, (tokens,), device=device)
    return given


def written_bytes(given: dict[str, Any]) -> int:
    """Return the bytes read and written: tokens, stored tokens, computed scales, and angles."""
    tokens = given["k"].shape[0]
    found = 2 * given["k"].numel() * (given["k"].itemsize + given["k_pages"].itemsize) + 8 * tokens
    if given.get("k_scale") is not None and given["k_scale"].ndim == 3:
        found += 2 * tokens * HEADS * 4
    return found + (tokens * (WIDTH * 4 + 8) if "cos" in given else 0)


def _stored(given: dict[str, Any]) -> list[torch.Tensor]:
    names = [name for name in ("k_pages", "v_pages", "k_scale", "v_scale") if name in given]
    return [given[name].view(torch.uint8) for name in names]


CHOSEN, RANK, ROPE, SLOTS = 2048, 512, 64, 65536
INDEX_HEADS, INDEX_WIDTH = 64, 128
# Of each operation (rows, keys), (rows, logits), (queries, heads), and the tiny ones.
SPARSE = {
    "indexer bf16": [(1024, 32768)], "indexer e4m3": [(1024, 32768)], "topk": [(1, SLOTS), (64, SLOTS), (1024, SLOTS)],
    "lists": [(1, 16), (16, 16), (1, 128), (64, 128), (4096, 128)],
}  # fmt: skip
SPARSE_TINY = {"indexer bf16": [(5, 70)], "indexer e4m3": [(5, 70)], "topk": [(3, 70)], "lists": [(3, 2)]}


def sparse_latent(measure: Measure) -> Iterator[Row]:
    """DeepSeek Sparse Attention's three operations, each alone: indexer: rows x keys, topk: rows x logits, lists:
    queries x heads.

    The indexer has 64 heads of 128 columns; 2,048 of a row's logits are chosen, beside torch.topk and vllm's
    `persistent_topk`; attention is over 2,048 slots of a cache of 65,536 in bfloat16, beside FlashMLA. The last row of
    each result is compared with float64, and all that is chosen with torch.topk."""
    for kind, sizes in (SPARSE_TINY if measure.tiny else SPARSE).items():
        for rows, count in sizes:
            if measure.wanted(name := f"{kind} {rows} x {count}"):
                torch.manual_seed(0)
                runs, judge, flops = SPARSE_RUNS[kind.split()[0]](measure, rows, count, kind.endswith("e4m3"))
                judges = {n: lambda run=run, judge=judge: judge(run()) for n, run in runs.items()}
                for row in measure.rows(name, runs, judges, peer=[*runs][-1]):
                    yield row | ({"tflops": flops / row["ms"] * 1e-9} if flops and "ms" in row else {})


SparseRuns = tuple[dict[str, Callable[[], torch.Tensor]], Callable[[torch.Tensor], Row], float]


def _indexer(measure: Measure, rows: int, keys: int, narrow: bool) -> SparseRuns:
    q, k = measure.normal(rows, INDEX_HEADS, INDEX_WIDTH), measure.normal(keys, INDEX_WIDTH)
    q, k = (x.to(E4M3) if narrow else x for x in (q, k))
    weights = torch.rand(rows, INDEX_HEADS, device=measure.device)
    exact, same = (
        (torch.einsum("hd,sd->hs", q[-1].to(t), k.to(t)).relu() * weights[-1, :, None]).sum(0).to(t)
        for t in (torch.float64, torch.bfloat16)
    )

    def judge(out: torch.Tensor) -> Row:
        return judge_result(out[-1], exact, same) | {"path": portattn.last_plan().path}

    flops = 2.0 * rows * keys * INDEX_HEADS * INDEX_WIDTH
    return {OURS: lambda: portattn.indexer_logits(q, k, weights)}, judge, flops


def _topk(measure: Measure, rows: int, keys: int, narrow: bool) -> SparseRuns:
    logits, k = torch.randn(rows, keys, device=measure.device), min(CHOSEN, keys)
    runs = {OURS: lambda: portattn.topk_indices(logits, k), "torch": lambda: logits.topk(k, sorted=False).indices}
    if has_op("_C", "persistent_topk"):
        ends, out = (torch.full(n, keys, dtype=torch.int32, device=measure.device) for n in ((rows,), (rows, k)))
        space = torch.zeros(1 << 20, dtype=torch.uint8, device=measure.device)
        runs = {"vllm": lambda: (torch.ops._C.persistent_topk(logits, ends, out, space, k, keys), out)[1]} | runs
    best = logits.topk(k).values

    def judge(out: torch.Tensor) -> Row:
        return {"right": torch.equal(logits.gather(1, out.long()).sort(descending=True).values, best)}

    return runs, judge, 0.0


def _lists(measure: Measure, rows: int, heads: int, narrow: bool) -> SparseRuns:
    q = measure.normal(rows, heads, RANK + ROPE)
    cache = measure.normal(128 if measure.tiny else SLOTS, 1, RANK + ROPE)
    slots = torch.randint(len(cache), (rows, CHOSEN), dtype=torch.int32, device=measure.device)
    scale, given = (RANK + ROPE) ** -0.5, (q[..., :RANK], q[..., RANK:], cache)
    runs = {OURS: lambda: portattn.mla_attention(*given, indices=slots, scale=scale)}
    if has_op("_flashmla_C", "sparse_prefill_fwd"):
        sparse = torch.ops._flashmla_C.sparse_prefill_fwd
        runs["FlashMLA"] = lambda: sparse(q, cache, slots[:, None], scale, RANK, None, None, None)[0]
    keys = cache[slots[-1].long()]

    def judge(out: torch.Tensor) -> Row:
        return judge_attention(out[-1:], q[-1:], keys, keys[..., :RANK], causal=False)

    return runs, judge, 2.0 * rows * heads * CHOSEN * (2 * RANK + ROPE)


SPARSE_RUNS = {"indexer": _indexer, "topk": _topk, "lists": _lists}
