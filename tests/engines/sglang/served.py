"""A model runner's pools with random weights behind them, batches of SGLang's own ForwardBatch, and their oracle.
Requests have all their keys and values from the start. A batch's prefixes lie in the pool before the layer runs, its
new tokens go through the layer. Every slot that nothing was written to holds NaN."""

import types
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from portattn.testing.tolerance import budget, count_misplaced, largest

RANK, ROPE = 32, 16  # of latent attention here


class Served:
    """One model runner. Its requests have rows 1, 2, … of req_to_token; row 0 pads CUDA graphs."""

    def __init__(
        self, lengths: Sequence[int], *, page: int = 1, heads: int = 4, heads_k: int = 2, dim: int = 32,
        dim_v: int | None = None, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None,
        latent: bool = False, windowed: bool = False, encoder: int = 0, poison: str = "kv", context: int = 128,
        scale: float | None = None, seed: int = 0, rope: int = ROPE,
    ) -> None:  # fmt: skip
        self.random = torch.Generator().manual_seed(seed)
        self.lengths, self.page, self.dtype, self.heads, self.latent = list(lengths), page, dtype, heads, latent
        self.encoder, self.kv_scale = encoder, scale
        self.heads_k, self.dim = (1, RANK + rope) if latent else (heads_k, dim)
        self.dim_v = RANK if latent else dim_v or dim
        stored = kv_dtype or dtype
        count = len(self.lengths)
        size = (sum(-(-n // page) for n in self.lengths) + 3) * page
        requests = ReqToTokenPool(count + 2, context, "cpu", False)
        if latent:
            pool: Any = MLATokenToKVPool(size, page, stored, RANK, rope, 1, "cpu", False)
        elif windowed:
            # Layer 0 has a window, layer 1 has none.
            pool = SWAKVPool(size, size, page, stored, heads_k, dim, [0], [1], "cpu", v_head_dim=self.dim_v)
        else:
            pool = MHATokenToKVPool(size, page, stored, heads_k, dim, 1, "cpu", False, v_head_dim=self.dim_v)
        self.pool = pool
        self._allocate(requests.req_to_token, size)
        if windowed:
            order = torch.randperm(size // page, generator=self.random) + 1
            pages = torch.cat((torch.zeros(1, dtype=torch.int64), order))
            pool.register_mapping((pages[:, None] * page + torch.arange(page)).flatten())
        self._poison(poison)
        config = types.SimpleNamespace(context_len=context, is_encoder_decoder=encoder > 0, attention_chunk_size=None)
        self.runner = types.SimpleNamespace(
            device="cpu", dtype=dtype, page_size=page, req_to_token_pool=requests, token_to_kv_pool=pool,
            model_config=config, sliding_window_size=8 if windowed else None, is_draft_worker=False, model=None,
            use_mla_backend=latent, kv_index_translator=KVIndexTranslator(
                req_to_token=requests.req_to_token, token_to_kv_pool_allocator=None, token_to_kv_pool=pool,
                page_size=page, device="cpu",
            ),
        )  # fmt: skip
        self.keys = [self.numbers(n, self.heads_k, self.dim) for n in self.lengths]
        values = [self.numbers(n, self.heads_k, self.dim_v) for n in self.lengths]
        self.values = [k[..., :RANK] for k in self.keys] if latent else values

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def _allocate(self, rows: torch.Tensor, size: int) -> None:
        """Whole pages in a random order; page 0 is nobody's. Behind a request's last token lies a slot with NaN."""
        order = (torch.randperm(size // self.page, generator=self.random) + 1).tolist()
        rows[1:] = order[-1] * self.page
        for row, length in enumerate(self.lengths, 1):
            own = [order.pop(0) for _ in range(-(-length // self.page))]
            slots = (torch.tensor(own, dtype=torch.int32)[:, None] * self.page + torch.arange(self.page)).flatten()
            rows[row, : len(slots)] = slots

    def _poison(self, which: str) -> None:
        pools = [self.pool.full_kv_pool, self.pool.swa_kv_pool] if isinstance(self.pool, SWAKVPool) else [self.pool]
        for pool in pools:
            buffers = [*pool.kv_buffer] if self.latent else []
            if not self.latent:
                buffers += pool.k_buffer if "k" in which else []
                buffers += pool.v_buffer if "v" in which else []
            for buffer in buffers:
                buffer.fill_(0x7F if buffer.dtype is torch.uint8 else torch.nan)

    @property
    def backend(self) -> Any:
        """What SGLang's registry makes for this runner."""
        return ATTENTION_BACKENDS["portattn"](self.runner)

    def layer(self, number: int = 0, **options: Any) -> RadixAttention:
        made = RadixAttention(
            self.heads, self.dim, self.dim**-0.5, self.heads_k, number, v_head_dim=self.dim_v, **options
        )  # fmt: skip
        if self.kv_scale is not None:
            made.k_scale = torch.tensor(self.kv_scale)
            made.v_scale = torch.tensor(self.kv_scale / 2)
        return made

    # ------------------------------------------------------------------------------------------------ batches

    def slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        return self.runner.req_to_token_pool.req_to_token[row, start:stop].long()

    def store(self, layer: RadixAttention, row: int, start: int, stop: int) -> None:
        """Put keys and values into the pool by its own writer, as an earlier forward did."""
        loc = self.slots(row, start, stop)
        swa = self.pool.translate_loc_from_full_to_swa(loc) if isinstance(self.pool, SWAKVPool) else None
        k, v = self.keys[row - 1][start:stop].clone(), self.values[row - 1][start:stop].clone()
        scales = [] if layer.k_scale is None else [layer.k_scale, layer.v_scale]
        self.pool.set_kv_buffer(layer, KVWriteLoc(loc, swa), k, v, *([] if self.latent else scales))

    def batch(
        self, mode: ForwardMode, rows: Sequence[int], before: Sequence[int], new: Sequence[int], **more: Any
    ) -> ForwardBatch:
        total = torch.tensor([a + b for a, b in zip(before, new, strict=True)], dtype=torch.int64)
        verify = mode.is_target_verify()
        lengths = torch.tensor(before, dtype=torch.int64) if verify else total
        skip = self.encoder
        parts = [self.slots(r, skip + a, skip + a + b) for r, a, b in zip(rows, before, new, strict=True)]
        loc = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
        made = ForwardBatch(
            forward_mode=mode, batch_size=len(rows), input_ids=torch.zeros(len(loc), dtype=torch.int64),
            req_pool_indices=torch.tensor(rows, dtype=torch.int64), seq_lens=lengths, out_cache_loc=loc,
            seq_lens_sum=int(lengths.sum()), seq_lens_cpu=lengths.clone(), **more,
        )  # fmt: skip
        if mode.is_extend(include_draft_extend_v2=True) and not verify:
            made.extend_seq_lens = torch.tensor(new, dtype=torch.int32)
            made.extend_prefix_lens = torch.tensor(before, dtype=torch.int32)
            made.extend_seq_lens_cpu, made.extend_prefix_lens_cpu = list(new), list(before)
        if skip:
            made.encoder_lens = torch.full((len(rows),), skip, dtype=torch.int64)
            made.encoder_lens_cpu = [skip] * len(rows)
        return made

    def new_tokens(self, batch: ForwardBatch, before: Sequence[int], new: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """q, k, v of a batch's new tokens, (T, H·D) each, as a model makes them."""
        rows = batch.req_pool_indices.tolist()
        skip = self.encoder
        spans = [(r - 1, skip + a, skip + a + b) for r, a, b in zip(rows, before, new, strict=True)]
        k, v = (torch.cat([t[0][:0], *(t[r][a:b] for r, a, b in spans)]) for t in (self.keys, self.values))
        return self.numbers(sum(new), self.heads * self.dim), k.flatten(1), v.flatten(1)

    # ------------------------------------------------------------------------------------------------ oracle

    def expected(
        self, q: torch.Tensor, batch: ForwardBatch, before: Sequence[int], new: Sequence[int], layer: RadixAttention,
        dtype: torch.dtype, tree: Sequence[torch.Tensor] | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """(T, Hq·Dv) by definition, in this dtype."""
        outs, first = [], 0
        for place, row in enumerate(batch.req_pool_indices.tolist()):
            a, n, skip = before[place], new[place], self.encoder
            span = slice(0, skip) if layer.is_cross_attention else slice(skip, skip + a + n)
            k, v = (self._as_stored(t, layer, which).to(dtype) for which, t in self._master(row, span))
            seen = self._seen(a, n, k.shape[0], layer)
            if tree is not None:
                seen[:, a:] &= tree[place]
            part = q[first : first + n].view(n, self.heads, self.dim)
            outs.append(_attention(part.to(dtype), k, v, layer, seen, sinks))
            first += n
        return torch.cat(outs).flatten(1) if outs else q.new_zeros(0, self.heads * self.dim_v).to(dtype)

    def _master(self, row: int, span: slice) -> list[tuple[str, torch.Tensor]]:
        return [("k", self.keys[row - 1][span]), ("v", self.values[row - 1][span])]

    def _as_stored(self, numbers: torch.Tensor, layer: RadixAttention, which: str) -> torch.Tensor:
        if self.pool.dtype is self.dtype:
            return numbers
        scale = getattr(layer, "k_scale" if which == "k" or self.latent else "v_scale")
        scale = torch.ones(()) if scale is None else scale
        return (numbers / scale.to(numbers.dtype)).to(self.pool.dtype).float() * scale

    def _seen(self, before: int, new: int, keys: int, layer: RadixAttention) -> torch.Tensor:
        if layer.is_cross_attention:
            return torch.ones(new, keys, dtype=torch.bool)
        query, key = torch.arange(before, before + new)[:, None], torch.arange(keys)
        causal = layer.attn_type is AttentionType.DECODER
        seen = key <= query if causal else torch.ones(new, keys, dtype=torch.bool)
        if layer.sliding_window_size > -1:
            near = query - key <= layer.sliding_window_size
            seen = seen & (near if causal else near & (key - query <= layer.sliding_window_size))
        return seen

    # ------------------------------------------------------------------------------------------------ whole runs

    def run(
        self, mode: ForwardMode, before: Sequence[int], new: Sequence[int], rows: Sequence[int] | None = None,
        layer: RadixAttention | None = None, tree: Sequence[torch.Tensor] | None = None, backend: Any = None,
        full: bool = True, spec_info: Any = None, stored: bool = False, changed: dict[str, Any] | None = None,
        **named: Any,
    ) -> tuple[torch.Tensor, ForwardBatch, tuple[torch.Tensor, ...], RadixAttention]:  # fmt: skip
        """One eager forward through the layer, compared with float64. stored: earlier tokens are in the pool already;
        changed: fields of the batch; named: further arguments of the layer."""
        rows = list(range(1, len(before) + 1)) if rows is None else rows
        layer = self.layer() if layer is None else layer
        if spec_info is None and tree is not None:
            spec_info = verify_input(before, new[0], tree, full)
        batch = self.batch(mode, rows, before, new, spec_info=spec_info)
        vars(batch).update(changed or {})
        for row, a in zip(rows, before, strict=True):
            self.store(layer, row, 0, 0 if stored else self.encoder + a)
        qkv = self.new_tokens(batch, before, new)
        backend = self.backend if backend is None else backend
        backend.init_forward_metadata(batch)
        out = forward(backend, layer, qkv, batch, **named)
        self.check(out, qkv[0], batch, before, new, layer, tree, named.get("sinks"))
        return out, batch, qkv, layer

    def check(
        self, out: torch.Tensor, q: torch.Tensor, batch: ForwardBatch, before: Sequence[int], new: Sequence[int],
        layer: RadixAttention, tree: Sequence[torch.Tensor] | None = None, sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        exact = self.expected(q, batch, before, new, layer, torch.float64, tree, sinks)
        same = self.expected(q, batch, before, new, layer, self.dtype, tree, sinks)
        assert (out.shape, out.dtype) == (exact.shape, self.dtype)
        assert count_misplaced(out, exact) == 0
        assert largest(out.double() - exact) <= budget(self.dtype, exact, same)


def forward(backend: Any, layer: RadixAttention, qkv: Sequence[torch.Tensor], batch: ForwardBatch, **more: Any) -> Any:
    with forward_context(ForwardContext(attn_backend=backend)):
        return layer(*qkv, batch, **more)


def verify_input(before: Sequence[int], drafted: int, tree: Sequence[torch.Tensor] | None, full: bool) -> Any:
    """SGLang's input of a verification. full: the mask has the columns of earlier keys, as on a GPU."""
    mask = None
    if tree is not None:
        ones = [torch.ones(drafted, a if full else 0, dtype=torch.bool) for a in before]
        parts = [torch.cat(pair, dim=1).flatten() for pair in zip(ones, tree, strict=True)]
        mask = torch.cat([torch.empty(0, dtype=torch.bool), *parts])
    return EagleVerifyInput(
        draft_token=None, custom_mask=mask, positions=None, retrieve_index=None, retrieve_next_token=None,
        retrieve_next_sibling=None, retrieve_cum_len=None, spec_steps=2, topk=2, draft_token_num=drafted,
        capture_hidden_mode=None, seq_lens_sum=None, seq_lens_cpu=None,
    )  # fmt: skip


def random_tree(drafted: int, generator: torch.Generator) -> torch.Tensor:
    """(n, n) bool: each token attends itself and its ancestors; the first is everybody's."""
    seen = torch.eye(drafted, dtype=torch.bool)
    for token in range(1, drafted):
        parent = int(torch.randint(token, (), generator=generator))
        seen[token] |= seen[parent]
    return seen


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, seen: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """(n, Hq, D), (Sk, Hk, D), (Sk, Hk, Dv) → (n, Hq, Dv), in q's dtype; 0 where a query attends nothing."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scaling
    if layer.logit_cap:
        scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v)
