"""Extend, decode and mixed batches through SGLang's RadixAttention and its own pools, against float64."""

import pytest
import torch
from served import Served, forward
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_exec

import portattn

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
PAGES = (1, 16, 64)


@pytest.mark.engine_feature("extend without a prefix")
@pytest.mark.parametrize("page", PAGES)
def test_extend_of_new_requests(page: int) -> None:
    Served([21, 1, 40], page=page).run(EXTEND, [0, 0, 0], [21, 1, 40])


@pytest.mark.engine_feature("extend after a prefix (radix cache, chunked prefill)")
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extend_after_a_prefix(page: int, dtype: torch.dtype) -> None:
    Served([37, 65, 20], page=page, dtype=dtype).run(EXTEND, [17, 64, 0], [20, 1, 20])


@pytest.mark.engine_feature("decode")
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode(page: int, dtype: torch.dtype) -> None:
    Served([37, 65, 1, 16], page=page, dtype=dtype).run(DECODE, [36, 64, 0, 15], [1, 1, 1, 1])


@pytest.mark.engine_feature("deterministic inference")
def test_deterministic_inference_keeps_the_order_of_keys() -> None:
    with get_exec().deterministic.override(enable_deterministic_inference=True):
        Served([37, 65], page=16).run(EXTEND, [17, 64], [20, 1])
    assert portattn.last_plan().problem.invariant


@pytest.mark.engine_feature("mixed batches (chunked prefill with decoding)")
@pytest.mark.parametrize("page", [1, 16])
def test_mixed(page: int) -> None:
    Served([37, 65, 20, 33], page=page).run(MIXED, [17, 64, 0, 32], [20, 1, 20, 1])


@pytest.mark.engine_feature("grouped and single key heads, other value heads")
@pytest.mark.parametrize(("heads", "heads_k", "dim", "dim_v"), [(8, 1, 48, 48), (6, 6, 40, 24), (8, 2, 80, 128)])
def test_heads(heads: int, heads_k: int, dim: int, dim_v: int) -> None:
    served = Served([37, 9], page=16, heads=heads, heads_k=heads_k, dim=dim, dim_v=dim_v)
    served.run(EXTEND, [17, 0], [20, 9])
    served.run(DECODE, [36, 8], [1, 1])


@pytest.mark.engine_feature("sliding windows, layer by layer")
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("window", [0, 5, 200])
def test_window_layers(page: int, window: int) -> None:
    served = Served([37, 65, 20], page=page)
    layer = served.layer(sliding_window_size=window or -1)
    served.run(EXTEND, [17, 64, 0], [20, 1, 20], layer=layer)
    served.run(DECODE, [36, 64, 19], [1, 1, 1], layer=layer)


@pytest.mark.engine_feature("sliding windows in a pool of their own (SWAKVPool)")
@pytest.mark.parametrize("page", [1, 16])
def test_window_pool(page: int) -> None:
    """Layer 0 reads and writes the pool of windows by its own slots; layer 1 the other."""
    served = Served([37, 65, 20], page=page, windowed=True)
    for number, window in ((0, 8), (1, -1)):
        layer = served.layer(number, sliding_window_size=window)
        served.run(EXTEND, [17, 64, 0], [20, 1, 20], layer=layer)
        served.run(DECODE, [36, 64, 19], [1, 1, 1], layer=layer)
    own, other = served.pool.get_key_buffer(0), served.pool.get_key_buffer(1)
    assert not torch.equal(own.nan_to_num(), other.nan_to_num())


@pytest.mark.engine_feature("sliding windows in a pool of their own (SWAKVPool)")
def test_pages_dropped_from_the_window_pool_are_not_read() -> None:
    served = Served([40], page=4, windowed=True)
    layer = served.layer(0, sliding_window_size=8)
    served.store(layer, 1, 0, 39)
    dropped = served.slots(1, 0, 28)  # what decoding position 39 sees begins at 31
    served.pool.swa_kv_pool.k_buffer[0][served.pool.full_to_swa_index_mapping[dropped]] = torch.nan
    served.pool.full_to_swa_index_mapping[dropped] = 0  # as the allocator does
    served.run(DECODE, [39], [1], layer=layer, stored=True)


@pytest.mark.engine_feature("capped scores")
def test_softcap() -> None:
    served = Served([37, 20], page=16)
    layer = served.layer(logit_cap=2.0)
    served.run(EXTEND, [17, 0], [20, 20], layer=layer)
    served.run(DECODE, [36, 19], [1, 1], layer=layer)


@pytest.mark.engine_feature("sinks")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_sinks(kind: torch.dtype) -> None:
    served = Served([37, 20], dtype=torch.float16)
    sinks = torch.tensor([1.0, -2.0, 0.5, 3.0]).to(kind)
    served.run(EXTEND, [17, 0], [20, 20], sinks=sinks)
    served.run(DECODE, [36, 19], [1, 1], layer=served.layer(sliding_window_size=7), sinks=sinks)


@pytest.mark.engine_feature("HND pools")
@pytest.mark.parametrize("page", [1, 16])
def test_hnd_pool(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    served = Served([37, 65, 20], page=page)
    assert served.pool.get_key_buffer(0).shape[1:] == (2, page, 32)
    served.run(EXTEND, [17, 64, 0], [20, 1, 20])
    served.run(DECODE, [36, 64, 19], [1, 1, 1])


@pytest.mark.engine_feature("float8 caches, with and without scales")
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_float8_cache(kind: torch.dtype, scale: float | None) -> None:
    served = Served([37, 20], page=16, dtype=torch.bfloat16, kv_dtype=kind, scale=scale)
    _, _, (_, k, _), _ = served.run(EXTEND, [17, 0], [20, 20])
    kept = torch.cat([served.keys[0][17:37], served.keys[1]]).flatten(1)
    assert torch.equal(k, kept)  # the pool divides what it is given in place: the model's own stays
    served.run(DECODE, [36, 19], [1, 1])


@pytest.mark.engine_feature("encoder-only layers")
@pytest.mark.parametrize("window", [-1, 6])
@pytest.mark.parametrize("save", [True, False])
def test_encoder_only(window: int, save: bool) -> None:
    served = Served([37, 20])
    layer = served.layer(attn_type=AttentionType.ENCODER_ONLY, sliding_window_size=window)
    served.run(EXTEND, [0, 0], [37, 20], layer=layer, save_kv_cache=save)
    assert torch.isnan(served.pool.get_key_buffer(0)[served.slots(1, 0, 37)]).all() == (not save)


@pytest.mark.engine_feature("cross-attention (encoder-decoder models)")
def test_cross_attention() -> None:
    """A request's row holds its encoder's tokens first: one layer attends those, another the decoder's."""
    served = Served([12 + 20, 12 + 9], encoder=12)
    served.run(EXTEND, [8, 0], [12, 9])
    served.run(DECODE, [19, 8], [1, 1])
    cross = served.layer(is_cross_attention=True)
    batch = served.batch(DECODE, [1, 2], [19, 8], [1, 1])
    batch.encoder_out_cache_loc = torch.cat([served.slots(1, 0, 12), served.slots(2, 0, 12)])
    q = served.numbers(2, served.heads * served.dim)
    k, v = (torch.cat([t[0][:12], t[1][:12]]).flatten(1) for t in (served.keys, served.values))
    backend = served.backend
    backend.init_forward_metadata(batch)
    served.check(forward(backend, cross, (q, k, v), batch), q, batch, [19, 8], [1, 1], cross)


@pytest.mark.engine_feature("decode")
@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize("page", [1, 16])
def test_unwritten_slots_are_not_read(page: int, poison: str) -> None:
    served = Served([37, 65, 20], page=page, poison=poison)
    served.run(EXTEND, [17, 64, 0], [20, 1, 20])
    served.run(DECODE, [36, 64, 19], [1, 1, 1])


@pytest.mark.engine_feature("batches without a request, requests without a new token")
def test_nothing_to_do() -> None:
    served = Served([37, 20])
    served.run(EXTEND, [], [])
    served.run(DECODE, [], [])
    served.run(EXTEND, [17, 20], [20, 0])
    batch = served.batch(ForwardMode.IDLE, [], [], [])
    backend, layer = served.backend, served.layer()
    backend.init_forward_metadata(batch)
    q = torch.empty(0, served.heads * served.dim)
    assert forward(backend, layer, (q, None, None), batch).shape == (0, served.heads * served.dim)


@pytest.mark.engine_feature("keys that were stored before (save_kv_cache=False, k=None)")
def test_keys_stored_before() -> None:
    served = Served([37, 20], page=16)
    batch, layer, backend = served.batch(DECODE, [1, 2], [36, 19], [1, 1]), served.layer(), served.backend
    for row, length in ((1, 37), (2, 20)):
        served.store(layer, row, 0, length)
    q, k, v = served.new_tokens(batch, [36, 19], [1, 1])
    backend.init_forward_metadata(batch)
    shared = forward(backend, layer, (q, None, None), batch)
    served.check(shared, q, batch, [36, 19], [1, 1], layer)
    fused = forward(backend, layer, (q, k * torch.nan, v * torch.nan), batch, save_kv_cache=False)
    assert torch.equal(shared, fused)


@pytest.mark.engine_feature("lengths that the host does not know")
def test_lengths_only_on_the_device() -> None:
    served = Served([37, 20], page=16)
    assert served.backend.needs_cpu_seq_lens is False
    unknown = dict.fromkeys(("seq_lens_cpu", "extend_seq_lens_cpu", "extend_prefix_lens_cpu"))
    for mode, before, new in ((EXTEND, [17, 0], [20, 20]), (DECODE, [36, 19], [1, 1])):
        served.run(mode, before, new, changed=unknown)


@pytest.mark.engine_feature("equal to SGLang's torch_native backend")
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("window", [-1, 6])
def test_equal_to_torch_native(page: int, window: int) -> None:
    for mode, before, new in ((EXTEND, [17, 64, 0], [20, 1, 20]), (DECODE, [36, 64, 19], [1, 1, 1])):
        served = Served([37, 65, 20], page=page)
        out, batch, qkv, layer = served.run(mode, before, new, layer=served.layer(sliding_window_size=window))
        native = TorchNativeAttnBackend(served.runner)
        native.init_forward_metadata(batch)
        torch.testing.assert_close(out, forward(native, layer, qkv, batch), atol=1e-5, rtol=1e-5)
