"""vLLM's Attention layer, custom ops, builders and cache layouts drive portattn; results against float64."""

import importlib
import math
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm_batches import BLOCK, DECODE, DEVICE, DIM, HEADS, KERNELS, KV_HEADS, MIXED, Batch, Layer, attend, check

import portattn
from portattn.errors import ArgumentError
from portattn.integrations.vllm.backend import PortattnBackend

works = pytest.mark.engine_feature
SPECULATIVE = [(5, 30), (5, 5), (5, 64)]
SLOPES = [0.5, 0.25, 0.125, 0.0625]


@works("decode")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_decode(dtype: torch.dtype) -> None:
    batch = Batch(DECODE, dtype)
    check(Layer(dtype=dtype).run(batch), batch)


@works("prefill, chunked prefill and decode in one batch")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_mixed(heads: tuple[int, int]) -> None:
    shape = {"heads": heads[0], "kv_heads": heads[1]}
    batch = Batch(MIXED, **shape)
    check(Layer(**shape).run(batch), batch)


@works("cache layouts, all that vLLM has")
@pytest.mark.parametrize("layout", [layout.name for layout in KVCacheLayout])
def test_layouts(layout: str) -> None:
    batch = Batch(MIXED, dim=40)
    check(Layer(layout=layout, dim=40).run(batch), batch)


@works("speculative verification, 2 to 8 rows a request")
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_speculative(rows: int) -> None:
    batch = Batch([(rows, 30), (rows, rows), (rows, 64)])
    check(Layer().run(batch), batch)


@works("sliding window of each layer")
@pytest.mark.parametrize("window", [1, 7, 17])
def test_window(window: int) -> None:
    for requests in (MIXED, DECODE):
        batch = Batch(requests)
        check(Layer(window=window).run(batch), batch, window=(window - 1, 0))


@works("softcap")
def test_softcap() -> None:
    batch = Batch(MIXED)
    check(Layer(arguments={"logits_soft_cap": 2.0}).run(batch), batch, softcap=2.0)


@works("sinks")
@pytest.mark.parametrize("requests", [MIXED, DECODE])
def test_sinks(requests: list[tuple[int, int]]) -> None:
    batch, sinks = Batch(requests), torch.tensor([3.0, -1.0, 0.5, 2.0], dtype=torch.bfloat16)
    check(Layer(arguments={"sinks": sinks}).run(batch), batch, sinks=sinks)


@works("ALiBi")
@pytest.mark.parametrize("requests", [MIXED, DECODE])
def test_alibi(requests: list[tuple[int, int]]) -> None:
    batch = Batch(requests)
    check(Layer(arguments={"alibi_slopes": SLOPES}).run(batch), batch, slopes=SLOPES)


@works("attention in both directions over the cache")
def test_not_causal() -> None:
    batch = Batch(MIXED)
    check(Layer().run(batch, causal=False), batch, causal=False)
    # Without a mask to the future a window reaches as far to both sides, as in vLLM's own backends.
    check(Layer(window=7).run(batch, causal=False), batch, causal=False, window=(6, 6))


@works("causality of each request")
def test_causal_of_each_request() -> None:
    batch, each = Batch(MIXED), [True, False, True, False, True]
    tensor = torch.tensor(each, dtype=torch.int32)
    sinks = torch.tensor([3.0, -1.0, 0.5, 2.0], dtype=torch.bfloat16)
    check(Layer(arguments={"sinks": sinks}).run(batch, causal=tensor), batch, causal=each, sinks=sinks)
    layer = Layer(window=7)
    metadata = layer.builder.build(0, batch.common(tensor))
    metadata.seq_lens.add_(0)
    layer.builder.update_draft_decode_metadata(metadata)
    out, begin = layer.run(batch, metadata=metadata), 0
    for b, (rows, _) in enumerate(batch.requests):
        one = Batch([batch.requests[b]])
        one.q, one.k, one.v = [batch.q[b]], [batch.k[b]], [batch.v[b]]
        check(out[begin : begin + rows], one, causal=each[b], window=(6, 0 if each[b] else 6))
        begin += rows


@works("encoders without a cache")
@pytest.mark.parametrize("window", [None, 6])
def test_encoder_only(window: int | None) -> None:
    backend = create_encoder_only_attention_backend(PortattnBackend)
    batch = Batch([(20, 20), (1, 1), (33, 33)])
    layer = Layer(backend, window=window, arguments={"attn_type": AttentionType.ENCODER_ONLY})
    features = {} if window is None else {"window": (window - 1, window - 1)}
    check(layer.run(batch), batch, causal=False, **features)


@works("cross attention")
def test_cross_attention() -> None:
    """vLLM's own builder and impl for cross attention, made of portattn's: encoder rows are written by forward."""
    backend = create_cross_attention_backend(PortattnBackend)
    encoder, decoder = [18, 40], [4, 9]
    batch, new = Batch([(n, n) for n in encoder]), Batch([(n, n) for n in decoder], seed=1)
    layer = Layer()  # for a configuration, a specification and a cache
    impl = backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, "auto", None, "encoder_decoder")
    builder = backend.get_builder_cls()(layer.spec, [layer.name], layer.config, DEVICE)
    common = new.common().replace(
        block_table_tensor=batch.table, encoder_seq_lens=torch.tensor(encoder, dtype=torch.int32),
        encoder_seq_lens_cpu=torch.tensor(encoder, dtype=torch.int32, device="cpu").numpy(),
        seq_lens_cpu_upper_bound=torch.tensor(decoder, dtype=torch.int32, device="cpu"),
    )  # fmt: skip
    q, k, v = torch.cat(new.q), torch.cat(batch.k), torch.cat(batch.v)
    out = impl.forward(layer.layer, q, k, v, layer.layer.kv_cache, builder.build(0, common), torch.empty_like(q))
    new.k, new.v = batch.k, batch.v
    check(out, new, causal=False)


@works("profiling run")
def test_profiling_run() -> None:
    """Without metadata the output is 0, and neither the cache nor the queries are read."""
    layer, batch = Layer(), Batch(MIXED)
    out = torch.full((3, HEADS, DIM), math.nan)
    impl = layer.layer.impl
    assert impl.forward(layer.layer, batch.q[1], None, None, torch.tensor([]), None, out) is out
    assert torch.equal(out, torch.zeros_like(out))
    impl.do_kv_cache_update(layer.layer, batch.k[1], batch.v[1], torch.tensor([]), torch.arange(3))


@works("padding: slots of -1, rows and requests behind the batch")
def test_padding() -> None:
    layer, batch = Layer(), Batch(DECODE)
    first = layer.run(batch).clone()
    before = layer.layer.kv_cache.clone()
    none = torch.full((3,), -1)
    layer.layer.impl.do_kv_cache_update(layer.layer, batch.k[3], batch.v[3], layer.layer.kv_cache, none)
    assert torch.equal(before.nan_to_num(7.0), layer.layer.kv_cache.nan_to_num(7.0))
    # A graph of six requests replays a batch of four: the others have no rows of their own, and no keys.
    common = batch.common()
    rows = torch.tensor([0, 1, 2, 3, 4, 4, 4], dtype=torch.int32)
    padded = common.replace(
        query_start_loc=rows, query_start_loc_cpu=rows.cpu(),
        seq_lens=torch.cat([common.seq_lens, torch.zeros(2, dtype=torch.int32)]),
        block_table_tensor=torch.cat([common.block_table_tensor, torch.zeros(2, 4, dtype=torch.int32)]), num_reqs=6,
        num_actual_tokens=6,
    )  # fmt: skip
    q = torch.cat([*batch.q, torch.full((2, HEADS, DIM), math.nan, dtype=torch.bfloat16)])
    metadata = layer.builder.build(0, padded)
    out = torch.full((8, HEADS, DIM), 5.0, dtype=torch.bfloat16)
    layer.layer.impl.forward(layer.layer, q, None, None, layer.layer.kv_cache, metadata, out)
    assert torch.equal(out[:4], first)
    assert torch.equal(out[6:], torch.full_like(out[6:], 5.0))


@works("metadata that a graph can replay")
@pytest.mark.parametrize("requests", [DECODE, SPECULATIVE])
def test_replay(requests: list[tuple[int, int]]) -> None:
    """What was built once serves later steps: the runner fills the same tensors anew."""
    layer, batch = Layer(), Batch([(rows, keys + rows) for rows, keys in requests])
    check(layer.run(batch), batch)
    common = Batch(requests).common()
    metadata = layer.builder.build_for_cudagraph_capture(common)
    own = [metadata.seq_lens, metadata.query_start_loc, metadata.block_table, metadata.slot_mapping]
    given = [common.seq_lens, common.query_start_loc, common.block_table_tensor, common.slot_mapping]
    assert [one.data_ptr() for one in own] == [one.data_ptr() for one in given]
    after = batch.common()
    width = common.block_table_tensor.shape[1]
    wide = torch.zeros(len(requests), max(width, batch.table.shape[1]), dtype=torch.int32)
    metadata.block_table = wide
    metadata.seq_lens.copy_(after.seq_lens)
    wide[:, : batch.table.shape[1]].copy_(batch.table)
    check(layer.run(batch, write=False, metadata=metadata), batch)


@works("another group's blocks in built metadata")
def test_update_block_table() -> None:
    layer, batch = Layer(), Batch(MIXED)
    metadata = layer.builder.build(0, Batch(MIXED, seed=3).common())
    metadata = layer.builder.update_block_table(metadata, batch.table, batch.common().slot_mapping)
    check(layer.run(batch, metadata=metadata), batch)


def test_builder_reads_nothing_back() -> None:
    """On meta tensors every value that the host would read is an error."""
    layer, batch = Layer(), Batch(MIXED)
    common = batch.common(torch.tensor([1, 0, 1, 0, 1], dtype=torch.int32))
    meta = {name: getattr(common, name).to("meta") for name in (
        "query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping", "causal")}  # fmt: skip
    layer.builder._split = layer.builder._split.to("meta")
    metadata = layer.builder.build(0, common.replace(**meta))
    layer.builder.update_draft_decode_metadata(metadata)
    assert metadata.causal_lens.device.type == "meta"
    with pytest.raises(RuntimeError):
        metadata.causal_lens.tolist()


@works("batch invariance")
def test_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is the same, bit for bit, alone, among others, in chunks, and after a cached prefix, in kernels."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer, alone = Layer(), Batch([(1, 50)])
    with portattn.settings(backend=KERNELS):
        expected = layer.run(alone)
        assert portattn.last_plan().problem.invariant
        for others in ([(1, 20), (1, 64)], [(20, 30)], [(1, 3)] * 6):
            batch = Batch([*others, (1, 50)], seed=2)
            batch.q[-1], batch.k[-1], batch.v[-1] = alone.q[0], alone.k[0], alone.v[0]
            assert torch.equal(Layer().run(batch)[-1], expected[0]), others
        prompt = Batch([(50, 50)], seed=7)
        whole = Layer().run(prompt)
        for begin, end in ((0, 21), (21, 50), (32, 33)):
            batch = Batch([(1, 9), (end - begin, end)], seed=2)
            batch.q[-1], batch.k[-1], batch.v[-1] = prompt.q[0][begin:end], prompt.k[0][:end], prompt.v[0][:end]
            assert torch.equal(Layer().run(batch)[1:], whole[begin:end]), (begin, end)


@works("kernels, interpreted")
@pytest.mark.parametrize("requests", [[(1, 20), (9, 30)], [(1, 33), (1, 5)]])
def test_kernels(requests: list[tuple[int, int]]) -> None:
    """The calls as they are made reach the Triton kernels, not only what a CPU runs by itself."""
    batch, layer = Batch(requests), Layer(layout="BHLNC", window=12)
    with portattn.settings(backend=KERNELS):
        out = layer.run(batch)
        assert portattn.last_plan().path == KERNELS
    check(out, batch, window=(11, 0))


def test_quantised_output_and_wrong_sinks_are_refused() -> None:
    layer, batch = Layer(), Batch(DECODE)
    metadata, q = layer.builder.build(0, batch.common()), torch.cat(batch.q)
    with pytest.raises(ArgumentError, match="output_scale is 'given', but must be None"):
        layer.layer.impl.forward(
            layer.layer, q, None, None, layer.layer.kv_cache, metadata, torch.empty_like(q), torch.ones(1)
        )
    with pytest.raises(ArgumentError, match=r"sinks.shape is \(3,\), but must be \(4,\)"):
        Layer(arguments={"sinks": torch.zeros(3)})


def test_keys_of_another_layer() -> None:
    """A layer that shares the cache of another writes nothing: its own keys are not attended."""
    layer, batch = Layer(), Batch(MIXED)
    layer.run(batch)
    layer.layer.kv_sharing_target_layer_name = "another"
    before = layer.layer.kv_cache.clone()
    other = Batch(MIXED, seed=5)
    other.table = batch.table
    out = layer.run(other, write=False)
    assert torch.equal(before.nan_to_num(7.0), layer.layer.kv_cache.nan_to_num(7.0))
    other.k, other.v = batch.k, batch.v
    check(out, other)
    assert layer.spec.block_size == BLOCK


def test_the_check_notices() -> None:
    """What is compared with is exact to the features: one key more, or a window of one less, is noticed."""
    batch = Batch([(5, 20)])
    out = attend(batch.q[0], batch.k[0], batch.v[0], torch.float64, window=(7, 0)).to(batch.dtype)
    check(out, batch, window=(7, 0))
    with pytest.raises(AssertionError):
        check(out, batch, window=(6, 0))


# forward writes into vLLM's output: what kernels would allocate themselves, and any other memory.
INTO = importlib.import_module("portattn.api.out_argument")
BEHIND = 3  # rows of output behind the batch's
ENCODER = {"attn_type": AttentionType.ENCODER_ONLY}
EACH = torch.tensor([1, 0, 1, 0, 1], dtype=torch.int32)


def made(kind: str) -> tuple[Layer, Batch, Any]:
    """A layer with a batch's keys in its cache, the batch, and its causality."""
    if kind == "encoder":
        requests = [(9, 9), (1, 1), (5, 5)]
        return Layer(create_encoder_only_attention_backend(PortattnBackend), arguments=ENCODER), Batch(requests), False
    layer, batch = Layer(window=7), Batch(DECODE if kind == "decode" else MIXED)
    return layer, batch, EACH if kind == "each" else True


def expected(kind: str) -> dict[str, Any]:
    if kind == "encoder":
        return {"causal": False}
    return {"window": (6, 6 if kind == "each" else 0), "causal": EACH.bool().tolist() if kind == "each" else True}


@pytest.mark.parametrize("kind", ["decode", "mixed", "each", "encoder"])
def test_what_is_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the batch alone; and the place that each call gets is as its kernel would allocate it."""
    places: list[tuple[int, bool]] = []
    real = INTO._as_allocated

    def seen(place: torch.Tensor, *others: Any) -> bool:
        places.append((place.untyped_storage().data_ptr(), real(place, *others)))
        return places[-1][1]

    layer, batch, causal = made(kind)
    right = layer.run(batch, causal)  # by vLLM's custom ops, and with the keys written
    check(right, batch, **expected(kind))
    rows = right.shape[0]
    nothing = torch.full((BEHIND, HEADS, DIM), math.nan, dtype=right.dtype)
    q, k, v = (torch.cat([*x, nothing[:, : x[0].shape[1]]]) for x in (batch.q, batch.k, batch.v))
    metadata = layer.builder.build(0, batch.common(causal))
    monkeypatch.setattr(INTO, "_as_allocated", seen)

    def run(output: torch.Tensor) -> torch.Tensor:
        given = layer.layer.impl.forward(layer.layer, q, k, v, layer.layer.kv_cache, metadata, output)
        assert given is output
        assert torch.equal(output[:rows], right)
        assert torch.equal(output[rows:], torch.full_like(output[rows:], 5.0))
        return output

    with torch.inference_mode():
        plain = run(torch.full((rows + BEHIND, HEADS, DIM), 5.0, dtype=right.dtype))
        assert places == ([] if kind == "each" else [(plain.untyped_storage().data_ptr(), True)])
        places.clear()
        # One that no kernel takes: memory behind each row is left as it is, too.
        wide = torch.full((rows + BEHIND, HEADS, 2 * DIM), 5.0, dtype=right.dtype)
        run(wide[..., 1 : DIM + 1])
        assert places == ([] if kind == "each" else [(wide.untyped_storage().data_ptr(), False)])
        assert wide[..., 0].eq(5.0).all()
        assert wide[..., DIM + 1 :].eq(5.0).all()


@pytest.mark.interpreter
def test_kernels_results_are_copied() -> None:
    """Interpreted, on a CPU: from there the result is copied, of the first call as of one like it."""
    layer, batch = Layer(), Batch([(1, 20), (1, 3)])
    layer.run(batch)
    metadata = layer.builder.build(0, batch.common())
    with portattn.settings(backend="interpreter"), torch.inference_mode():
        for _ in range(2):
            output = torch.full((4, HEADS, DIM), math.nan, dtype=torch.bfloat16)
            layer.layer.impl.forward(
                layer.layer, torch.cat(batch.q), None, None, layer.layer.kv_cache, metadata, output
            )
            assert portattn.last_plan().path == "interpreter"
            check(output[:2], batch)
            assert output[2:].isnan().all()
