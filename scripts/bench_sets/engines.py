"""The set `engines`: portattn's adapters on one GPU, each beside what its engine runs there; vLLM's part.

The adapter's builder and forward run over a paged cache in vLLM's layout. Its classes derive from vLLM's Python
classes, which must be importable; its compiled operations need not. A layer and a configuration are stand-ins.
FlashAttention-3 is called as vLLM's FLASH_ATTN backend calls it (flash_attn.py of 0.33: schedule made by the builder,
result written into the output); `vllm triton` is TRITON_ATTN's kernel."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from engine_calls import SPLITS_IN_GRAPHS, Forward, diffusers, masks

import portattn
from portattn.tools.bench.contenders import OURS
from portattn.tools.bench.peers import has_vllm
from portattn.tools.bench.workloads import Absent, Measure, Row, judge_attention, worst

DIM, BLOCK, MOST_REQUESTS = 128, 16, 256
K_SCALE, V_SCALE, Q_SCALE = 0.02, 0.03, 0.025  # of float8 numbers: the largest of a few million normal ones fits
TINY = 16  # small sizes are so much smaller, in requests, rows and keys
LAYOUTS = {"NHD": True, "HND": False}  # whether a block's tokens come before its heads in memory


@dataclass
class Case:
    """Requests are (query rows, keys in all)."""

    name: str
    requests: list[tuple[int, int]]
    heads: int = 32
    kv_heads: int = 8
    cache_dtype: str = "auto"
    layout: str = "NHD"
    graphs: bool = True


DECODE = [(1, 8192)] * 64
MIXED = [(1, 8192)] * 48 + [(1024, 5120)] * 4
CASES = [
    Case("decode 64 x 8k, 32/8", DECODE), Case("decode 64 x 8k, 64/8", DECODE, heads=64),
    Case("decode 64 x 8k, 32/8, HND", DECODE, layout="HND"),
    Case("mixed 48 x 8k + 4 x (1k of 5k), 32/8", MIXED, graphs=False),
    Case("mixed 48 x 8k + 4 x (1k of 5k), 64/8", MIXED, heads=64, graphs=False),
    Case("verify 64 x (4 of 8k), 32/8", [(4, 8192)] * 64), Case("decode 64 x 8k, 32/8, fp8", DECODE, cache_dtype="fp8"),
    Case("mixed 48 x 8k + 4 x (1k of 5k), 32/8, fp8", MIXED, cache_dtype="fp8", graphs=False),
]  # fmt: skip


def vllm(measure: Measure) -> Iterator[Row]:
    try:
        import portattn.integrations.vllm.backend  # noqa: F401
    except ModuleNotFoundError as error:
        raise Absent(f"vLLM's Python files: {error}") from None
    for case in CASES:
        if measure.wanted(case.name):
            yield from Step(case, measure).rows()
            torch.cuda.empty_cache()


class Step:
    """A batch, its cache, and the layer that attends it."""

    def __init__(self, case: Case, measure: Measure) -> None:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        from portattn.integrations.vllm.backend import PortattnBackend

        self.case, self.measure = case, measure
        torch.manual_seed(0)
        device = self.device = torch.device(measure.device)
        less = TINY if measure.tiny else 1
        self.counts = torch.tensor([-(-rows // less) for rows, _ in case.requests[::less]])
        keys = torch.tensor([keys // less for _, keys in case.requests[::less]])
        blocks = -(-keys // BLOCK)
        self.pages = int(blocks.sum()) + 8
        ids = torch.randperm(self.pages, dtype=torch.int32)
        self.table = torch.zeros(len(keys), int(blocks.max()), dtype=torch.int32)
        for row, (begin, count) in enumerate(zip((blocks.cumsum(0) - blocks).tolist(), blocks.tolist(), strict=True)):
            self.table[row, :count] = ids[begin : begin + count]
        self.table, self.lengths = self.table.to(device), keys.to(device, torch.int32)
        beginnings = torch.cat([torch.zeros(1, dtype=torch.int64), self.counts.cumsum(0)]).to(torch.int32)
        tokens = int(beginnings[-1])
        self.q = measure.normal(tokens, case.heads, DIM)
        self.k, self.v = ([measure.normal(n, case.kv_heads, DIM) for n in keys.tolist()]
                          for _ in range(2))  # fmt: skip
        self.owners = list(range(len(self.k)))  # whose keys a row of the table leads to
        self.output = torch.empty_like(self.q)
        shared = {"device": device, "dtype": torch.float32}
        self.layer = SimpleNamespace(
            _k_scale=torch.tensor(K_SCALE, **shared), _v_scale=torch.tensor(V_SCALE, **shared),
            _q_scale=torch.tensor(Q_SCALE, **shared),
        )  # fmt: skip
        self.impl = PortattnBackend.get_impl_cls()(
            case.heads, DIM, DIM**-0.5, case.kv_heads, None, None, case.cache_dtype
        )
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=MOST_REQUESTS), model_config=None,
            compilation_config=SimpleNamespace(static_forward_context={}),
            parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        )  # fmt: skip
        spec = SimpleNamespace(dcp_sharded=False, kv_quant_mode=SimpleNamespace(is_nvfp4=False))
        self.builder = PortattnBackend.get_builder_cls()(spec, ["layer.0"], config, device)
        self.cache = self._filled()
        self.common = CommonAttentionMetadata(
            query_start_loc=beginnings.to(device), query_start_loc_cpu=beginnings, seq_lens=self.lengths,
            num_reqs=len(keys), num_actual_tokens=tokens, max_query_len=int(self.counts.max()),
            max_seq_len=int(keys.max()), block_table_tensor=self.table,
            slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
        )  # fmt: skip

    def _filled(self) -> torch.Tensor:
        """Return the cache, written by the adapter, NaN in slots without tokens."""
        case, narrow = self.case, self.case.cache_dtype != "auto"
        first, second = (BLOCK, case.kv_heads) if LAYOUTS[case.layout] else (case.kv_heads, BLOCK)
        shape = (self.pages, first, second, 2 * DIM)
        if narrow:
            cache = torch.full(shape, 0x7F, dtype=torch.uint8, device=self.device)
        else:
            cache = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.device)
        if LAYOUTS[case.layout]:
            cache = cache.transpose(1, 2)
        for request, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            place = torch.arange(k.shape[0], device=self.device)
            slots = self.table[request, place // BLOCK].long() * BLOCK + place % BLOCK
            self.impl.do_kv_cache_update(self.layer, k, v, cache, slots)
        if narrow:  # from here on keys and values are what the cache holds of them
            fp8 = torch.float8_e4m3fn
            self.k = [((k.float() / K_SCALE).to(fp8).float() * K_SCALE).bfloat16() for k in self.k]
            self.v = [((v.float() / V_SCALE).to(fp8).float() * V_SCALE).bfloat16() for v in self.v]
        return cache

    def forward(self, metadata: Any = None) -> torch.Tensor:
        metadata = self.builder.build(0, self.common) if metadata is None else metadata
        return self.impl.forward(self.layer, self.q, None, None, self.cache, metadata, self.output)

    def judge(self, out: torch.Tensor, q: torch.Tensor | None = None, every: int = 1) -> Row:
        """Check each request's rows, with the current lengths and table on the device."""
        q = self.q if q is None else q
        begin, found = 0, []
        for request, (count, length) in enumerate(zip(self.counts.tolist(), self.lengths.tolist(), strict=True)):
            mine = slice(begin, begin + count)
            begin += count
            if request % every:
                continue
            k, v = self.k[self.owners[request]][:length], self.v[self.owners[request]][:length]
            found.append(judge_attention(out[mine], q[mine], k, v))
        return worst(found)

    def judge_ours(self) -> Row:
        self.output.fill_(torch.nan)
        self.forward()
        found = self.judge(self.output) | {"path": portattn.last_plan().path}
        if self.case.graphs:
            found |= self.judge_replay(found)
        return found

    def newest(self, new_k: torch.Tensor, new_v: torch.Tensor) -> None:
        """Set a step's newest tokens, each request's last rows, and their slots, which are NaN until written."""
        begin = 0
        for request, (count, length) in enumerate(zip(self.counts.tolist(), self.lengths.tolist(), strict=True)):
            mine, place = slice(begin, begin + count), torch.arange(length - count, length, device=self.device)
            owner = self.owners[request]
            new_k[mine], new_v[mine] = self.k[owner][place], self.v[owner][place]
            block = self.table[request, place // BLOCK].long()
            self.common.slot_mapping[mine] = block * BLOCK + place % BLOCK
            self.cache[block, :, place % BLOCK] = torch.nan if self.cache.is_floating_point() else 0x7F
            begin += count

    def judge_replay(self, eager: dict[str, Any]) -> Row:
        """Check a graph of a step with its cache write, replayed with shorter requests in another order."""
        metadata = self.builder.build(0, self.common)
        new_k, new_v = (torch.empty(len(self.q), self.case.kv_heads, DIM, device=self.device).bfloat16() for _ in "kv")

        def step() -> None:
            self.impl.do_kv_cache_update(self.layer, new_k, new_v, self.cache, self.common.slot_mapping)
            self.forward(metadata)

        self.newest(new_k, new_v)
        replay = self.measure.replayed(step)
        kept = self.lengths.clone(), self.table.clone(), self.q.clone()
        step()
        order = torch.randperm(len(self.k))
        least = int(self.counts.max())
        shorter = torch.randint(least, int(self.lengths.max()) + 1, (len(self.k),), dtype=torch.int32)
        shorter[:3] = torch.tensor([least, BLOCK, BLOCK + 1])
        self.lengths.copy_(shorter.minimum(kept[0].cpu()[order]))
        self.table.copy_(kept[1][order.to(self.device)])
        self.q.copy_(torch.randn_like(self.q))
        self.owners = order.tolist()
        self.output.fill_(torch.nan)
        self.newest(new_k, new_v)
        replay()
        replayed = self.judge(self.output)
        again = self.output.clone()
        self.forward()
        same_bits = torch.equal(again, self.output)
        self.owners = list(range(len(self.k)))
        for tensor, values in zip((self.lengths, self.table, self.q), kept, strict=True):
            tensor.copy_(values)
        note = self.measure.replay_note(replayed["right"])
        return {
            "replay": replayed, "note": note + (", eager's bits" if same_bits else ""),
            "right": eager["right"] and replayed["right"],
        }  # fmt: skip

    def rows(self) -> Iterator[Row]:
        metadata = self.builder.build(0, self.common)
        runs: dict[str, Any] = {OURS: lambda: self.forward(metadata)}
        judges: dict[str, Any] = {OURS: self.judge_ours}
        host: dict[str, Any] = {OURS: {"build_us": lambda: self.builder.build(0, self.common), "step_us": self.forward}}
        for name, make in (("fa3", self._fa3), ("vllm triton", self._triton)):
            made = make()
            if made is not None:
                runs[name], judges[name], host[name] = made
        yield from self.measure.rows(self.case.name, runs, judges, host, self.case.graphs, peer="fa3")

    def _fa3(self) -> Any:
        if not has_vllm():
            return None
        narrow, common = self.case.cache_dtype != "auto", self.common
        fp8 = torch.float8_e4m3fn
        scales = {}
        q = self.q
        if narrow:  # vLLM's layer quantises the queries
            q = (self.q.float() / Q_SCALE).to(fp8)
            shape = (common.num_reqs, self.case.kv_heads)
            scales = {f"{x}_descale": getattr(self.layer, f"_{x}_scale").expand(shape) for x in "qkv"}
        output = torch.empty_like(self.output)

        def pages() -> tuple[torch.Tensor, torch.Tensor]:
            k, v = self.cache.transpose(1, 2).split(DIM, dim=-1)
            return (k.view(fp8), v.view(fp8)) if narrow else (k, v)

        k, v = pages()
        call = Forward(
            q=q, k=k, v=v, out=output, cu_seqlens_q=common.query_start_loc, seqused_k=common.seq_lens,
            max_seqlen_q=common.max_query_len, max_seqlen_k=common.max_seq_len, page_table=common.block_table_tensor,
            softmax_scale=DIM**-0.5, is_causal=True, num_splits=SPLITS_IN_GRAPHS if self.case.graphs else 0, **scales,
        )  # fmt: skip
        schedule = call.schedule(common.num_reqs, BLOCK)
        call.given["scheduler_metadata"] = schedule

        def forward() -> None:
            k, v = pages()
            call(k=k, v=v, q=q[: common.num_actual_tokens], out=output[: common.num_actual_tokens])

        def build() -> torch.Tensor:
            return call.schedule(common.num_reqs, BLOCK)

        def step() -> None:
            call.given["scheduler_metadata"] = build()
            forward()
            call.given["scheduler_metadata"] = schedule

        def judge() -> Row:
            if not narrow:
                return self.judge(output, every=4)
            found = self.judge(output, (q.float() * Q_SCALE).bfloat16(), every=4)
            # Its probabilities are in float8, too: the budget is of 16 bits, so that its error is shown alone.
            return found | {"right": True, "note": "queries and probabilities in fp8"}

        return forward, judge, {"build_us": build, "step_us": step}

    def _triton(self) -> Any:
        if self.device.type == "cpu":
            return None
        try:
            from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        except ImportError:
            return None
        common, narrow = self.common, self.case.cache_dtype != "auto"
        kwargs: dict[str, Any] = {}
        if narrow:
            from vllm.v1.kv_cache_interface import KVQuantMode

            kwargs["kv_quant_mode"] = KVQuantMode.FP8_PER_TENSOR
        threshold, segments, wide = 128 // self.case.kv_heads, 16, DIM
        scratch = torch.empty(threshold, self.case.heads, segments, wide, device=self.device)
        most, total = (torch.empty(threshold, self.case.heads, segments, device=self.device) for _ in range(2))
        output = torch.empty_like(self.output)

        def forward() -> None:
            k, v = self.cache.transpose(1, 2).split(DIM, dim=-1)
            if narrow:
                k, v = k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)
            shape = (common.num_reqs, self.case.kv_heads)
            unified_attention(
                q=self.q[: common.num_actual_tokens], k=k, v=v, out=output[: common.num_actual_tokens],
                cu_seqlens_q=common.query_start_loc, max_seqlen_q=common.max_query_len, seqused_k=common.seq_lens,
                max_seqlen_k=common.max_seq_len, softmax_scale=DIM**-0.5, causal=True, window_size=(-1, -1),
                block_table=common.block_table_tensor, softcap=0, q_descale=None,
                k_descale=self.layer._k_scale.expand(shape), v_descale=self.layer._v_scale.expand(shape),
                seq_threshold_3D=threshold, num_par_softmax_segments=segments, softmax_segm_output=scratch,
                softmax_segm_max=most, softmax_segm_expsum=total, **kwargs,
            )  # fmt: skip

        return forward, lambda: self.judge(output, every=4), {}


PARTS: dict[str, Callable[[Measure], Iterator[Row]]] = {
    "vllm": vllm,
    "diffusers": diffusers,
    "masks": masks,
}


def engines(measure: Measure) -> Iterator[Row]:
    """Times of the adapters of engines, after their results were checked; a case is named `part: case`.

    vllm: Impl.forward of the real adapter over a paged cache (decode, mixed prefill, a float8 cache), beside
    FlashAttention-3 as vLLM builds it, and the kernel of vLLM's own Triton backend. diffusers: a block of Flux with
    random weights, 4096 + 512 tokens, beside diffusers' native backend (SDPA). masks: attention with lists of blocks
    beside FlexAttention, and tree masks over a paged cache.

    What can be captured is replayed from a CUDA graph, with other lengths and pages than at the capture; on a CPU it
    is called again with them. A part needs its engine, or its Python files alone (vLLM); an absent one is named."""
    for name, part in PARTS.items():
        measure.part = f"{name}: "
        try:
            yield from part(measure)
        except (Absent, ImportError) as reason:
            measure.absent[name] = f"{type(reason).__name__}: {reason}"
