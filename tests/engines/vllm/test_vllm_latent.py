"""vLLM's MLA layer over the latent cache: its own prefill on the CPU, decoding by portattn, against float64."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
from vllm_batches import BLOCK, DEVICE, KERNELS, Batch, attend, default_dtype

import portattn
from portattn.errors import ArgumentError
from portattn.integrations.vllm.mla import PortattnMLABackend, PortattnMLAImpl
from portattn.testing.tolerance import budget, largest

works = pytest.mark.engine_feature
HEADS, RANK, ROPE, NOPE, VALUE = 2, 512, 64, 32, 32
BLOCKS = 40
_names = (f"latent.{number}" for number in itertools.count())


class Projection(torch.nn.Module):
    """kv_b_proj: latent rows to each head's keys and values."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()
        self.input_size_per_partition, self.output_size_per_partition = weight.shape[1], weight.shape[0]

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(rows, self.weight), None


class Latent:
    """One layer with its cache and builder, as vLLM makes them."""

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, cache_dtype: str = "auto", speculative: int = 0,
        backend: Any = PortattnMLABackend, topk: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.name, self.dtype = next(_names), dtype
        cache = CacheConfig(cache_dtype=cache_dtype, block_size=BLOCK)
        self.config = VllmConfig(cache_config=cache)
        self.config.model_config = SimpleNamespace(
            dtype=dtype, max_model_len=256, get_head_size=lambda: RANK + ROPE, is_deepseek_mla=True,
            get_num_attention_heads=lambda _: HEADS, hf_text_config=SimpleNamespace(
                q_lora_rank=None, kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE,
                index_topk=0 if topk is None else topk.shape[1],
            ), model_arch_config=SimpleNamespace(total_num_attention_heads=HEADS),
        )  # fmt: skip
        generator = torch.Generator(DEVICE).manual_seed(7)
        weight = torch.randn(HEADS * (NOPE + VALUE), RANK, generator=generator) / RANK**0.5
        self.projection = Projection(weight.to(dtype))
        self.scale = (NOPE + ROPE) ** -0.5
        with set_current_vllm_config(self.config), default_dtype(dtype):
            self.layer = MLAAttention(
                HEADS, self.scale, NOPE, ROPE, VALUE, None, RANK, self.projection, cache_config=cache,
                prefix=self.name, attn_backend=backend, prefill_backend_cls=CPUSDPAMLAPrefillBackend,
                use_sparse=topk is not None, topk_indices_buffer=topk,
            )  # fmt: skip
            self.layer.process_weights_after_loading(dtype)
            spec = backend.customize_spec(self.layer.get_kv_cache_spec(self.config))
            if speculative:
                self.config.speculative_config = SimpleNamespace(
                    num_speculative_tokens=speculative, parallel_drafting=False, method="ngram"
                )
            make = backend.get_builder_cls()
            self.builder = make(spec, [self.name], self.config, DEVICE)
        dtype_of = torch.uint8 if cache_dtype.startswith("fp8") else dtype
        cache_tensor = torch.zeros(BLOCKS, 1, BLOCK, RANK + ROPE, dtype=dtype_of)
        self.layer.bind_kv_cache(cache_tensor.fill_(math.nan if dtype_of is dtype else 0x7F))

    def run(self, batch: Batch, q: torch.Tensor, latent: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """The layer's output (tokens, H, V), and the batch's metadata. Rows of the past are written first."""
        common = batch.common()
        common = common.replace(seq_lens_cpu_upper_bound=common.seq_lens.clone().cpu())
        rows = [(b, keys - new, keys) for b, (new, keys) in enumerate(batch.requests)]
        past = torch.cat([latent[b][:begin] for b, begin, _ in rows])
        slots = torch.cat([batch.slots_of(b, 0, begin) for b, begin, _ in rows])
        self.layer.impl.do_kv_cache_update(
            past[:, :RANK], past[:, None, RANK:], self.layer.kv_cache, slots, self.layer.kv_cache_dtype,
            self.layer._k_scale,
        )  # fmt: skip
        new = torch.cat([latent[b][begin:] for b, begin, _ in rows])
        with torch.device("cpu"):  # as in vLLM, whose pinned tensors name no device
            metadata = self.builder.build(0, common)
        context = set_forward_context({self.name: metadata}, self.config, slot_mapping={self.name: common.slot_mapping})
        with torch.inference_mode(), context:
            shape = torch.Size((q.shape[0], HEADS * VALUE))
            out = self.layer(q, new[:, :RANK].contiguous(), new[:, None, RANK:].contiguous(), output_shape=shape)
        return out.unflatten(-1, (HEADS, VALUE)), metadata

    def expected(self, q: torch.Tensor, latent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """By definition, with full heads: keys and values projected from the latent rows."""
        full = (latent[:, :RANK].to(dtype) @ self.projection.weight.to(dtype).T).unflatten(-1, (HEADS, NOPE + VALUE))
        rope = latent[:, None, RANK:].to(dtype).expand(-1, HEADS, -1)
        return attend(q, torch.cat((full[..., :NOPE], rope), -1), full[..., NOPE:], dtype)


def inputs(batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator(DEVICE).manual_seed(3)
    rows = sum(new for new, _ in batch.requests)
    q = torch.randn(rows, HEADS, NOPE + ROPE, generator=generator).to(dtype)
    return q, [torch.randn(keys, RANK + ROPE, generator=generator).to(dtype) for _, keys in batch.requests]


def check(layer: Latent, batch: Batch, out: torch.Tensor, q: torch.Tensor, latent: list[torch.Tensor]) -> None:
    """Twice the budget: absorption rounds queries and results once more each."""
    begin = 0
    for b, (new, _) in enumerate(batch.requests):
        rows, ours, begin = q[begin : begin + new], out[begin : begin + new].double(), begin + new
        exact = layer.expected(rows, latent[b], torch.float64)
        same = layer.expected(rows, latent[b], layer.dtype)
        assert largest(ours - exact) <= 2 * budget(layer.dtype, exact, same), (b, largest(ours - exact))


@works("latent attention (MLA), decoding")
@pytest.mark.parametrize("requests", [[(1, 20), (1, 33), (1, 1)], [(1, 20), (1, 33), (7, 7), (9, 30)]])
def test_decode_and_mixed(requests: list[tuple[int, int]]) -> None:
    layer, batch = Latent(), Batch(requests)
    q, latent = inputs(batch, torch.bfloat16)
    out, metadata = layer.run(batch, q, latent)
    assert metadata.num_decodes == sum(new == 1 for new, _ in requests)
    check(layer, batch, out, q, latent)


@works("latent attention (MLA), speculative verification")
@pytest.mark.parametrize("requests", [[(4, 20), (1, 33), (3, 3)], [(4, 20), (4, 33), (4, 5)]])
def test_rows_of_several_requests(requests: list[tuple[int, int]]) -> None:
    layer, batch = Latent(speculative=3), Batch(requests)
    q, latent = inputs(batch, torch.bfloat16)
    out, metadata = layer.run(batch, q, latent)
    assert (metadata.num_decodes, metadata.decode.max_query_len) == (3, 4)
    check(layer, batch, out, q, latent)


def test_blocks_are_whole_tiles_of_the_hopper_kernel() -> None:
    assert [PortattnMLABackend.get_preferred_block_size(size) for size in (16, 48, 64, 128)] == [64, 64, 64, 128]


@works("latent attention (MLA), fp8 cache")
def test_fp8_cache() -> None:
    layer, batch = Latent(cache_dtype="fp8"), Batch([(1, 20), (1, 33)])
    layer.layer._k_scale.fill_(0.5)
    layer.layer._k_scale_float = 0.5  # by which vLLM decides whether there is a scale
    q, latent = inputs(batch, torch.bfloat16)
    out, _ = layer.run(batch, q, latent)
    cache = layer.layer.kv_cache.view(torch.float8_e4m3fn)
    for b, (_, keys) in enumerate(batch.requests):
        slots = batch.slots_of(b, 0, keys)
        stored = cache.flatten(0, 1).view(torch.uint8)[slots].view(torch.float8_e4m3fn).double() * 0.5
        exact = latent[b].double()
        # Half a unit of three bits behind the point, and of the smallest numbers.
        assert ((stored - exact).abs() <= exact.abs() / 16 + 2**-10).all()
        latent[b] = stored
    check(layer, batch, out, q, latent)


@works("latent attention (MLA), LSE in natural logarithms for decode context parallelism")
@pytest.mark.parametrize("requests", [[(1, 20), (1, 33)], [(3, 20), (1, 33)], [(3, 20), (3, 33)]])
def test_lse_of_parts_merges(requests: list[tuple[int, int]]) -> None:
    """What two ranks' caches give, merged by natural logarithms, is what one cache gives."""
    assert PortattnMLAImpl.lse_base_on_e
    assert PortattnMLAImpl.can_return_lse_for_decode
    layer, batch = Latent(torch.float16, speculative=3), Batch(requests)
    q, latent = inputs(batch, torch.float16)
    rows = q.shape[0]
    _, metadata = layer.run(batch, q, latent)
    nope = torch.randn(rows, HEADS, RANK, generator=torch.Generator(DEVICE).manual_seed(1)).half()
    rope, impl, cache = q[..., NOPE:].contiguous(), layer.layer.impl, layer.layer.kv_cache
    metadata.causal = False  # parts of the keys have no diagonal
    whole, lse = impl.forward_mqa((nope, rope), cache, metadata, layer.layer)
    assert (whole.shape, lse.shape, lse.dtype) == ((rows, HEADS, RANK), (rows, HEADS), torch.float32)
    together, _ = impl.forward_mqa(torch.cat((nope, rope), -1), cache, metadata, layer.layer)
    assert torch.equal(together, whole)
    lengths, parts = metadata.decode.seq_lens, []
    table = metadata.decode.block_table
    metadata.decode.seq_lens = torch.full_like(lengths, BLOCK)
    parts.append(impl.forward_mqa((nope, rope), cache, metadata, layer.layer))
    metadata.decode.seq_lens, metadata.decode.block_table = lengths - BLOCK, table[:, 1:].contiguous()
    parts.append(impl.forward_mqa((nope, rope), cache, metadata, layer.layer))
    lses = torch.stack([part[1] for part in parts])
    assert torch.allclose(lses.logsumexp(0), lse, atol=1e-5, rtol=1e-5)
    merged = sum(part[0].float() * (part[1] - lse).exp()[..., None] for part in parts)
    assert largest(merged.double() - whole.double()) <= 4 * torch.finfo(torch.float16).eps * largest(whole.double())


@works("kernels, interpreted")
def test_kernels() -> None:
    layer, batch = Latent(), Batch([(1, 20), (1, 3)])
    q, latent = inputs(batch, torch.bfloat16)
    with portattn.settings(backend=KERNELS):
        out, _ = layer.run(batch, q, latent)
    assert portattn.last_plan().path == KERNELS
    check(layer, batch, out, q, latent)


def test_what_latent_attention_does_not_have() -> None:
    more = {"q_lora_rank": None, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
            "qk_head_dim": NOPE + ROPE, "v_head_dim": VALUE, "kv_b_proj": None}  # fmt: skip
    for place, name, value in ((4, "alibi_slopes", [1.0]), (5, "sliding_window", 8), (7, "logits_soft_cap", 3.0)):
        given: list[Any] = [HEADS, RANK + ROPE, 1.0, 1, None, None, "auto", None, "decoder", None]
        given[place] = value
        with set_current_vllm_config(VllmConfig()), pytest.raises(ArgumentError, match=f"{name} is .*not supported"):
            PortattnMLAImpl(*given, **more)
