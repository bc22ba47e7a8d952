"""vLLM's backend of attention over full heads: its features, beside caches.py's, which both backends share."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.distributed import get_dcp_group
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from portattn.api import ops
from portattn.api.merge_states import merge_states
from portattn.api.out_argument import into
from portattn.api.request import Window
from portattn.errors import ArgumentError
from portattn.integrations.engine_warmup import Engine, RowLayout, contract, projection_layouts
from portattn.integrations.vllm import NAME, caches, metadata
from portattn.integrations.vllm.caches import Capabilities
from portattn.integrations.vllm.metadata import PortattnMetadata, PortattnMetadataBuilder, StartUp

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def _paged(place: torch.Tensor | None, *arguments: Any, **named: Any) -> Any:
    if place is None:
        return ops.paged_attention(*arguments, **named)
    return into(place, "paged_attention", *arguments, **named)


class PortattnImpl(AttentionImpl[PortattnMetadata]):
    """One layer. Fused quantization of the output is neither supported nor declared."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True  # new tokens are attended beside the cache

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.softcap = logits_soft_cap or None
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        # A window counts the query's own key; without a mask to the future it reaches as far there.
        side = self.back = None if sliding_window is None else sliding_window - 1
        self.window: Window | None = None if side is None else (side, 0)
        self.window_both: Window | None = None if side is None else (side, side)
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            raise ArgumentError(NAME, "sinks.shape", tuple(sinks.shape), f"must be ({num_heads},), one for each head")
        self.sinks = sinks
        self.invariant = envs.VLLM_BATCH_INVARIANT
        if self.dcp_world_size > 1 and attn_type not in ENCODERS:
            metadata.refuse_features(  # they need a key's position, or keys of another layer
                NAME, "decode context parallelism",
                attn_type=None if attn_type == AttentionType.DECODER else AttentionType(attn_type).value,
                alibi_slopes=alibi_slopes, sliding_window=sliding_window,
                kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            )  # fmt: skip
            if self.num_kv_heads != 1:
                limit = "must be 1: with decode context parallelism ranks have one key head each"
                raise ArgumentError(NAME, "num_kv_heads", self.num_kv_heads, limit)
        self.dcp_combine = metadata.combine() if self.dcp_world_size > 1 else None
        self._cache: torch.Tensor | None = None
        self._views: caches.Views | None = None
        self.start_up: StartUp | None = None

    @property
    def has_cache(self) -> bool:
        return self.attn_type not in ENCODERS

    def views(self, kv_cache: torch.Tensor) -> caches.Views:
        """Return the layer's cache as portattn takes it, cached while the cache is the same tensor."""
        if self._views is None or kv_cache is not self._cache:
            self._views = caches.views(kv_cache, self.kv_cache_dtype, self.head_size)
            self._cache = kv_cache
        return self._views

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys (tokens, Hk, D) and values (tokens, Hk, Dv) to their slots; encoders keep none."""
        if self.start_up is not None:
            self.start_up.compile()
        if self.attn_type not in ENCODERS and kv_cache.numel():
            with contract(self.invariant):  # settings are part of the key by which a call is found again
                caches.write(key, value, self.views(kv_cache), slot_mapping, layer)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: PortattnMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend a batch's rows (tokens, Hq, D) into output (tokens, Hq, Dv); 0 without metadata (profiling)."""
        if output_scale is not None or output_block_scale is not None:
            given = "output_scale" if output_scale is not None else "output_block_scale"
            limit = "must be None: the output is not quantised, as fused_output_quant_supported says"
            raise ArgumentError(NAME, given, "given", limit)
        if self.start_up is not None:
            self.start_up.compile()
        if attn_metadata is None:
            return output.fill_(0)
        with contract(self.invariant):
            self._forward(layer, query, key, value, kv_cache, attn_metadata, output)
        return output

    def _forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None,
        kv_cache: torch.Tensor, attn_metadata: PortattnMetadata, output: torch.Tensor,
    ) -> None:  # fmt: skip
        rows = attn_metadata.num_actual_tokens
        place = output[:rows]
        if self.attn_type in ENCODERS:
            assert key is not None
            assert value is not None
            self._encode(place, query[:rows], key[:rows], value[:rows], attn_metadata)
        elif attn_metadata.context_lens is not None:
            assert key is not None
            assert value is not None
            place.copy_(self._sharded(layer, query[:rows], key[:rows], value[:rows], kv_cache, attn_metadata))
        else:
            self._decode(place, layer, query[:rows], kv_cache, attn_metadata.mm_prefix_range or attn_metadata)

    def _decode(
        self, place: torch.Tensor, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, batch: PortattnMetadata
    ) -> None:
        if batch.causal is not None:
            window = self.window if batch.causal else self.window_both
            self._attend(place, layer, query, kv_cache, batch, batch.seq_lens, batch.causal, window)
            return
        # A request has keys in one of the two calls, and rows without keys give 0.
        assert batch.causal_lens is not None
        assert batch.other_lens is not None
        both = self._window_of_ranges(layer, batch.longest_range) if batch.longest_range else self.window_both
        causal = self._attend(None, layer, query, kv_cache, batch, batch.causal_lens, True, self.window)
        other = self._attend(None, layer, query, kv_cache, batch, batch.other_lens, False, both)
        torch.add(causal, other, out=place)

    def _window_of_ranges(self, layer: Any, longest: int) -> Window | None:
        """Return the window of a row in a range of multimodal tokens: to the range's end, and causally far back."""
        back = self.back
        if back is None:
            return None
        # The range's beginning is seen past the window where the layer does not clamp it. Builders refuse such layers.
        if longest > back + 1 and not getattr(layer, "mm_prefix_clamp_sliding_window", False):
            limit = f"must not be longer than the layer's window, {back + 1}, which does not clamp it"
            raise ArgumentError(NAME, "tokens of a range in mm_req_doc_ranges", longest, limit)
        return back, None

    def _attend(
        self, place: torch.Tensor | None, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor,
        batch: PortattnMetadata, lengths: torch.Tensor, causal: bool, window: Window | None, **other: Any,
    ) -> Any:  # fmt: skip
        """Attend over the cache into `place` if given; without it, return_lse adds the LSE (tokens, Hq)."""
        of = self.views(kv_cache)
        shared = self._shared(of, layer, query.device) | other
        if of.rotated:
            query = caches.rotate(query)
        found: Any
        if batch.single:
            # One row sees all keys: no mask, and the window's other side has nothing in it.
            found = _paged(
                None if place is None else place[:, None],
                query[:, None], of.k, of.v, batch.block_table, lengths, window=self.window, layout="bshd", **shared,
            )  # fmt: skip
            found = (found[0][:, 0], found[1][..., 0]) if isinstance(found, tuple) else found[:, 0]
        else:
            found = _paged(
                place, query, of.k, of.v, batch.block_table, lengths, cu_seqlens_q=batch.query_start_loc,
                max_seqlen_q=batch.max_query_len, causal=causal, window=window, **shared,
            )  # fmt: skip
            found = (found[0], found[1].transpose(0, 1)) if isinstance(found, tuple) else found
        if not of.rotated:
            return found
        if isinstance(found, tuple):
            return caches.rotate(found[0], inverse=True), found[1]
        out = caches.rotate(found, inverse=True)
        return out if place is None else place.copy_(out)

    def _shared(self, of: caches.Views, layer: Any, device: torch.device) -> dict[str, Any]:
        """Return the arguments that all calls over the layer's cache have."""
        k_scale, v_scale = caches.scales(of, layer)
        return {
            "k_scale": k_scale,
            "v_scale": v_scale,
            "k_block_scale": of.k_block_scale,
            "v_block_scale": of.v_block_scale,
            "scale": self.scale / caches.gain(self.head_size) if of.rotated else self.scale,
            "softcap": self.softcap,
            "alibi_slopes": self._slopes_on(device),
            "sinks": self.sinks,
            "page_layout": "hpd",
        }

    def specs(self, layer: Any, engine: Engine) -> list[dict[str, Any]]:
        """Return specs of `portattn.warmup` for every call that this layer can make."""
        if self.attn_type in ENCODERS:
            return self._encoder_specs(engine)
        of = self.views(layer.kv_cache)
        shared = self._shared(of, layer, engine.device) | {"op": "paged_attention", "k_pages": of.k, "v_pages": of.v}
        world = self.dcp_world_size
        if world > 1:
            shared |= {"sinks": None, "return_lse": True}
            masks: list[tuple[bool, Window | None]] = [(False, None)]
        elif self.attn_type == AttentionType.ENCODER_DECODER:
            masks = [(False, self.window_both)]
        else:
            masks = [(True, self.window), *[(False, self.window_both)] * (engine.non_causal or engine.ranges)]
            masks += [(False, (self.back, None))] * (engine.ranges and self.back is not None)
        projections = projection_layouts(self.num_heads, self.num_kv_heads, self.head_size, self.head_size)
        queries = (
            {rows[0] for rows in projections} if world == 1 else {RowLayout(self.num_heads * world, self.head_size)}
        )
        found = []
        for q in queries:
            found.append(shared | engine.uniform({"q": q}) | {"window": masks[0][1] if world > 1 else self.window})
            for causal, window in masks:
                mask = {"causal": causal, "window": window}
                found.append(shared | engine.packed({"q": q}, single=False) | mask)
                found += [shared | engine.packed({"q": q}, single=False, divided=True) | mask] * engine.ranges
        writes = {name: shared[name] for name in ("k_scale", "v_scale", "k_block_scale", "v_block_scale")}
        writes |= {"k_pages": of.k, "v_pages": of.v, "page_layout": "hpd"}
        found += [writes | engine.new_tokens(k, v) for _, k, v in projections]
        return found if world == 1 else [*found, *self._encoder_specs(engine)]

    def _encoder_specs(self, engine: Engine) -> list[dict[str, Any]]:
        """Return the specs of packed sequences that attend themselves: encoders, and new tokens beside shards."""
        named: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}
        each: list[dict[str, Any]] = [{"window": self.window_both, "alibi_slopes": self._slopes_on(engine.device)}]
        if self.attn_type not in ENCODERS:
            each = [{"causal": True, "return_lse": past} for past in (True, False)]
        projections = projection_layouts(self.num_heads, self.num_kv_heads, self.head_size, self.head_size)
        return [named | one | engine.self_attention(*rows) for one in each for rows in projections]

    def _sharded(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        batch: PortattnMetadata,
    ) -> torch.Tensor:  # fmt: skip
        """Attend over caches of several ranks, and over the new tokens, which every rank has."""
        lengths = batch.context_lens
        assert lengths is not None
        new: Any = ops.varlen_attention(
            query, key, value, batch.query_start_loc, batch.query_start_loc, batch.max_query_len, batch.max_query_len,
            scale=self.scale, causal=bool(batch.causal), softcap=self.softcap, sinks=self.sinks,
            return_lse=batch.has_past,
        )  # fmt: skip
        if not batch.has_past:
            return new
        assert self.dcp_combine is not None
        group = get_dcp_group()
        every = group.all_gather(query.contiguous(), dim=1)  # heads of all ranks, over this rank's keys
        past = self._attend(None, layer, every, kv_cache, batch, lengths, False, None, sinks=None, return_lse=True)
        out, lse = self.dcp_combine(*past, group, return_lse=True, is_lse_base_on_e=self.lse_base_on_e)
        merged, _ = merge_states(
            [out.transpose(0, 1), new[0].transpose(0, 1)], [lse.transpose(0, 1).contiguous(), new[1]]
        )
        return merged.transpose(0, 1)

    def _encode(
        self, place: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PortattnMetadata
    ) -> None:
        """Attend packed sequences to themselves, in both directions, into place."""
        into(
            place, "varlen_attention", query, key, value, batch.query_start_loc, batch.query_start_loc,
            batch.max_query_len, batch.max_query_len, scale=self.scale, window=self.window_both, softcap=self.softcap,
            alibi_slopes=self._slopes_on(query.device), sinks=self.sinks,
        )  # fmt: skip

    def _slopes_on(self, device: torch.device) -> torch.Tensor | None:
        if self.slopes is not None and self.slopes.device != device:
            self.slopes = self.slopes.to(device)
        return self.slopes


class PortattnBackend(Capabilities):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        *caches.PLAIN, *caches.FLOAT8, *caches.TOKEN_SCALES, *caches.BLOCK_SCALES,
    ]  # fmt: skip

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[PortattnImpl]:
        return PortattnImpl

    @staticmethod
    def get_builder_cls() -> type[PortattnMetadataBuilder]:
        return PortattnMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return caches.with_scales(spec)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, *arguments: Any, **named: Any) -> list[str]:
        return [*super().validate_configuration(*arguments, **named), *metadata.reasons(**named)]
