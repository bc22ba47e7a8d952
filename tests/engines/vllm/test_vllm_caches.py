"""Quantised caches in vLLM's formats: what is stored, and attention over it against float64 of what is stored."""

import re

import pytest
import torch
from vllm.config import VllmConfig
from vllm.platforms.interface import DeviceCapability
from vllm.utils.torch_utils import nvfp4_split_data_scale
from vllm.v1.attention.ops.int4_per_token_head import single_rht
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm_batches import BLOCK, DECODE, DIM, KERNELS, KV_HEADS, MIXED, ON_GPU, Batch, Layer, check

import portattn
from portattn.errors import ArgumentError
from portattn.integrations.vllm import caches
from portattn.integrations.vllm.backend import PortattnBackend

works = pytest.mark.engine_feature
INT4 = "int4_per_token_head"
# cache dtype -> the numbers' dtype, and the least number of correct bits that a value keeps
FORMATS = {
    "fp8": (torch.float8_e4m3fn, 4), "fp8_e4m3": (torch.float8_e4m3fn, 4), "fp8_e5m2": (torch.float8_e5m2, 3),
    "fp8_per_token_head": (torch.float8_e4m3fn, 4), "int8_per_token_head": (torch.int8, None),
    INT4: (torch.uint8, None),
}  # fmt: skip


def read_back(layer: Layer, batch: Batch) -> None:
    """Put the values that the cache holds in the place of the batch's own, by the format's description alone. Content
    of a token and head: D numbers, then with scales for each token a float32; keys before values. A byte of int4 holds
    two numbers of rows that vLLM's function has rotated, the first in the low bits; the scale's low bits are 0's."""
    dtype, bits = FORMATS[layer.cache_dtype]
    inline, int4 = layer.cache_dtype.endswith("per_token_head"), layer.cache_dtype == INT4
    width = DIM // 2 if int4 else DIM
    unit = torch.eye(DIM, dtype=torch.float64)
    turn = single_rht(unit) if int4 else unit
    content = layer.layer.kv_cache.contiguous().view(torch.uint8)
    half = content.shape[-1] // 2
    assert half == width + 4 * inline
    for values, start, scale in ((batch.k, 0, layer.layer._k_scale), (batch.v, half, layer.layer._v_scale)):
        for b, (_, keys) in enumerate(batch.requests):
            slots = batch.slots_of(b, 0, keys)
            rows = content[slots // BLOCK, :, slots % BLOCK, start : start + half].contiguous()
            numbers = rows[..., :width].contiguous().view(dtype).double()
            factor = rows[..., width:].contiguous().view(torch.float32).double() if inline else scale.double()
            asked = values[b].double() @ turn
            # Half a unit in the last place of each number, or of the row's largest where the format is of fixed point.
            largest = asked.abs().amax(-1, keepdim=True)
            step = largest / 127 if bits is None else asked.abs() * 2.0 ** (1 - bits)
            if int4:
                word = rows[..., width:].contiguous().view(torch.int32)
                numbers = torch.stack([numbers % 16, numbers // 16], -1).flatten(-2) - (word & 15)
                factor = step = (word & ~15).view(torch.float32).double()
            stored = numbers * factor
            # Rotated rows are rounded to the batch's dtype, sum by sum; on a GPU inside vLLM's function too.
            rounded = largest * 2.0 ** (-6 if ON_GPU else -8) if int4 else 2e-2
            assert ((stored - asked).abs() <= step / 2 * 1.01 + rounded).all()
            values[b] = stored @ turn.inverse()


@works("quantised caches: fp8 e4m3 and e5m2, a scale for each layer")
@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_scale_of_the_layer(cache_dtype: str) -> None:
    batch, layer = Batch(MIXED), Layer(cache_dtype=cache_dtype)
    layer.layer._k_scale.fill_(0.25)
    layer.layer._v_scale.fill_(0.5)
    out = layer.run(batch)
    read_back(layer, batch)
    check(out, batch)
    assert portattn.last_plan().problem.kv_format.startswith("e")


@works("quantised caches: int8, fp8 and int4 with a scale for each token and head")
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BHLNC"])
@pytest.mark.parametrize("cache_dtype", ["int8_per_token_head", "fp8_per_token_head", INT4])
def test_scales_of_tokens(cache_dtype: str, layout: str) -> None:
    batch, layer = Batch(MIXED), Layer(cache_dtype=cache_dtype, layout=layout)
    out = layer.run(batch)
    read_back(layer, batch)
    check(out, batch)
    assert portattn.last_plan().problem.kv_scales == "token"


@works("kernels, interpreted")
@pytest.mark.parametrize("cache_dtype", ["fp8", "int8_per_token_head", "nvfp4", INT4])
def test_kernels_over_quantised_caches(cache_dtype: str) -> None:
    batch, layer = Batch([(1, 20), (3, 18)]), Layer(cache_dtype=cache_dtype)
    with portattn.settings(backend=KERNELS):
        out = layer.run(batch)
    (read_blocks_back if cache_dtype == "nvfp4" else read_back)(layer, batch)
    check(out, batch)


def test_views_are_views() -> None:
    """Numbers and scales are the cache's own bytes, in every physical order."""
    for layout in KVCacheLayout:
        layer = Layer(cache_dtype="int8_per_token_head", layout=layout.name)
        of, cache = layer.layer.impl.views(layer.layer.kv_cache), layer.layer.kv_cache
        assert of is layer.layer.impl.views(cache)
        begin = cache.data_ptr()
        places = [one.data_ptr() - begin for one in (of.k, of.k_scale, of.v, of.v_scale)]
        assert (places, of.k.shape) == ([0, DIM, DIM + 4, 2 * DIM + 4], (layer.blocks, KV_HEADS, BLOCK, DIM))
        assert of.k_scale.shape == (layer.blocks, KV_HEADS, BLOCK)
        layer.layer.kv_cache = layer.empty_cache()
        assert layer.layer.impl.views(layer.layer.kv_cache).k.data_ptr() == layer.layer.kv_cache.data_ptr()


def read_blocks_back(layer: Layer, batch: Batch) -> None:
    """As read_back, of nvfp4: by what vLLM's own function says of a block's bytes, and by e2m1 as OCP has it."""
    cache = layer.layer.kv_cache
    k, v = cache.split(KV_HEADS, dim=1)
    if cache.stride(1) < cache.stride(2):  # by tokens: the sides are halves of a block nevertheless
        whole = cache.as_strided((layer.blocks, 2, BLOCK, KV_HEADS, k.shape[-1]), (cache.stride(0), k.stride(2) // 2 *
                                 BLOCK, k.stride(2) // 2, k.shape[-1], 1))  # fmt: skip
        k, v = (whole[:, side].transpose(1, 2) for side in range(2))
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    levels = torch.cat([levels, -levels])
    for values, side, scale in ((batch.k, k, layer.layer._k_scale), (batch.v, v, layer.layer._v_scale)):
        numbers, factors = nvfp4_split_data_scale(side)
        for b, (_, keys) in enumerate(batch.requests):
            slots = batch.slots_of(b, 0, keys)
            bytes_ = numbers[slots // BLOCK, :, slots % BLOCK].int()
            codes = torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(-2)
            of_blocks = factors[slots // BLOCK, :, slots % BLOCK].double().repeat_interleave(16, -1) * scale.double()
            stored, asked = levels[codes] * of_blocks, values[b].double()
            assert ((stored - asked).abs() <= of_blocks * 1.1 + 1e-3).all()  # a step of the largest numbers is 2
            values[b] = stored


@works("quantised caches: nvfp4, a scale for each 16 numbers")
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_scales_of_blocks(layout: str) -> None:
    batch, layer = Batch(MIXED), Layer(cache_dtype="nvfp4", layout=layout)
    layer.layer._k_scale.fill_(0.25)
    layer.layer._v_scale.fill_(0.5)
    out = layer.run(batch)
    read_blocks_back(layer, batch)
    check(out, batch)
    assert portattn.last_plan().problem.kv_format == "nvfp4"
    of, cache = layer.layer.impl.views(layer.layer.kv_cache), layer.layer.kv_cache
    begin, half = cache.data_ptr(), KV_HEADS * BLOCK * (DIM // 2 + DIM // 16)
    places = [one.data_ptr() - begin for one in (of.k, of.k_block_scale, of.v, of.v_block_scale)]
    assert places == [0, KV_HEADS * BLOCK * DIM // 2, half, half + KV_HEADS * BLOCK * DIM // 2]


LAYOUTS = r"a layout that keeps a block's heads together \(VLLM_KV_CACHE_LAYOUT: LBHNC, LBNHC, BLHNC, BLNHC\)"


class LaidOut(Layer):
    """A layer whose cache's layout vLLM has decided, as it does before builders are made."""

    def configured(self, config: VllmConfig) -> VllmConfig:
        config.cache_config.kv_cache_layout = self.layout
        return config


@pytest.mark.parametrize("layout", [one.name for one in KVCacheLayout])
def test_a_layout_is_refused_before_the_cache_is_made(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that the caller named when vLLM builds the layer; any other, as a connector's, with the builder."""
    refused = layout in ("LHBNC", "BHLNC")
    if refused:
        named = rf"cache_config.kv_cache_layout is '{layout}', but must be {LAYOUTS}, for nvfp4"
        with pytest.raises(ArgumentError, match=named):
            LaidOut(cache_dtype="nvfp4", layout=layout)
    else:
        LaidOut(cache_dtype="nvfp4", layout=layout)
    LaidOut(cache_dtype="fp8", layout=layout)
    asked = {"head_size": DIM, "dtype": torch.bfloat16, "block_size": BLOCK}
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    for cache_dtype in ("nvfp4", "fp8", "auto"):
        selector = AttentionSelectorConfig(**asked, kv_cache_dtype=cache_dtype)
        reasons = PortattnBackend.validate_configuration(device_capability=DeviceCapability(9, 0), **selector._asdict())
        assert len(reasons) == (refused and cache_dtype == "nvfp4")
        assert all(re.fullmatch(f"a nvfp4 cache needs {LAYOUTS}, not {layout}", one) for one in reasons), reasons
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")  # vLLM's older name of LBHNC
    assert caches.wrong_layout("nvfp4", caches.layout_asked_for()) is None


def test_caches_in_blocks_of_another_shape_are_refused() -> None:
    for layout in ("LHBNC", "BHLNC"):  # heads apart: a block's bytes are not one piece
        layer = Layer(cache_dtype="nvfp4", layout=layout)
        with pytest.raises(ArgumentError, match=r"kv_cache.stride\(\) is .* blocks without gaps, .* for nvfp4"):
            layer.layer.impl.views(layer.layer.kv_cache)
    cache = torch.zeros(4, 3, 16, 18, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match=r"kv_cache.shape is \(4, 3, 16, 18\), but must be \(blocks, 2 \* heads"):
        caches.views(cache, "nvfp4", 32)


def test_a_cache_of_another_shape_is_refused() -> None:
    cache = torch.zeros(4, 2, 16, 32, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"kv_cache.shape is \(4, 2, 16, 32\), but must be .* keys \(32\)"):
        caches.views(cache, "auto", 32)
    with pytest.raises(ArgumentError, match=r"kv_cache.dtype is torch.bfloat16, but must have one byte for fp8"):
        caches.views(cache, "fp8", 16)


@pytest.mark.parametrize("cache_dtype", ["fp8", INT4])
def test_decode_of_a_quantised_cache(cache_dtype: str) -> None:
    dtype = torch.bfloat16 if ON_GPU and cache_dtype == INT4 else torch.float16  # vLLM's rotation is of bfloat16 there
    batch, layer = Batch(DECODE, dtype), Layer(dtype=dtype, cache_dtype=cache_dtype)
    out = layer.run(batch)
    read_back(layer, batch)
    check(out, batch)
