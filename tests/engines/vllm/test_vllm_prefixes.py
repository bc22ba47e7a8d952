"""Prefix-LM: ranges of multimodal tokens, as vLLM's metadata have them, against float64 and vLLM's own TRITON_ATTN."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.triton_utils
from test_vllm_reference_backend import Theirs, compare
from vllm.v1.attention.backend import AttentionCGSupport
from vllm_batches import BLOCK, DEVICE, KERNELS, Batch, Layer, check

import portattn
from portattn.errors import ArgumentError
from portattn.integrations.vllm import metadata as vllm_metadata
from portattn.integrations.vllm.backend import PortattnBackend
from portattn.integrations.vllm.metadata import PortattnMetadataBuilder

works = pytest.mark.engine_feature
Ranges = dict[int, list[tuple[int, int]]]

# Rows and keys of requests, and ranges of positions: a whole prompt with two, decoding after one, a prompt of which a
# chunk ends and another begins inside a range, one whose range is the whole chunk, ranges that touch.
REQUESTS = [(30, 30), (1, 25), (12, 20), (9, 40), (7, 7), (20, 33)]
RANGES: Ranges = {
    0: [(3, 9), (14, 28)], 1: [(2, 12)], 2: [(5, 11), (16, 31)], 3: [(20, 45)], 4: [], 5: [(4, 4), (10, 16), (17, 25)],
}  # fmt: skip


def metadata(layer: Layer, batch: Batch, ranges: Ranges | None = RANGES, causal: Any = True) -> Any:
    common = batch.common(causal)
    return layer.builder.build(
        0, common.replace(mm_req_doc_ranges=ranges, seq_lens_cpu_upper_bound=common.seq_lens.clone().cpu())
    )


@works("prefix-LM ranges")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_ranges(dtype: torch.dtype) -> None:
    batch, layer = Batch(REQUESTS, dtype, heads=4, kv_heads=2), Layer(dtype=dtype)
    built = metadata(layer, batch)
    check(layer.run(batch, metadata=built), batch, ranges=RANGES)
    # Gemma 4 clears the field for layers that have none of it.
    built.mm_prefix_range = None
    check(layer.run(batch, write=False, metadata=built), batch)


@works("prefix-LM ranges")
@pytest.mark.parametrize("clamped", [False, True])
def test_ranges_and_a_window(clamped: bool) -> None:
    window = 8 if clamped else 26  # the longest range has 26 tokens: a layer that clamps may have a shorter window
    layer, batch = Layer(window=window, arguments={"mm_prefix_clamp_sliding_window": clamped}), Batch(REQUESTS)
    out = layer.run(batch, metadata=metadata(layer, batch))
    check(out, batch, window=(window - 1, 0), ranges=RANGES, clamped=clamped)


@works("prefix-LM ranges")
@pytest.mark.parametrize("feature", ["softcap", "sinks", "slopes"])
def test_ranges_and_features(feature: str) -> None:
    sinks = torch.tensor([3.0, -1.0, 0.5, 2.0], dtype=torch.bfloat16)
    name, value = {
        "softcap": ("logits_soft_cap", 2.0), "sinks": ("sinks", sinks), "slopes": ("alibi_slopes", [0.5, 0.2, 0.1, 0]),
    }[feature]  # fmt: skip
    batch, layer = Batch(REQUESTS), Layer(arguments={name: value})
    check(layer.run(batch, metadata=metadata(layer, batch)), batch, ranges=RANGES, **{feature: value})


@works("prefix-LM ranges")
def test_chunks_of_one_prompt() -> None:
    """A prompt in chunks whose ends cut its ranges: a row sees of its range what there is."""
    whole, layer = Batch([(40, 40)]), Layer(kv_heads=2)
    ranges: Ranges = {0: [(4, 20), (25, 38)]}
    begin = 0
    for end in (7, 13, 14, 30, 40):
        part = Batch([(end - begin, end)])
        part.table[:] = whole.table[:, : part.table.shape[1]]
        part.q = [whole.q[0][begin:end]]
        part.k, part.v = [whole.k[0][:end]], [whole.v[0][:end]]
        check(layer.run(part, metadata=metadata(layer, part, ranges)), part, ranges=ranges)
        begin = end


@works("prefix-LM ranges")
@pytest.mark.skipif(not vllm.triton_utils.HAS_TRITON, reason="vLLM does not use Triton in this environment")
@pytest.mark.parametrize("features", [{}, {"window": 6, "arguments": {"mm_prefix_clamp_sliding_window": True}}])
def test_equal_to_triton_attn(features: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole ranges: of one that a chunk cuts their kernel also counts keys behind the last one."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    batch, ranges = Batch([(1, 20), (9, 20), (6, 6)], torch.float16), {1: [(8, 12), (14, 19)], 2: [(1, 4)]}
    outs = []
    for one in (PortattnBackend, Theirs):
        layer = Layer(one, torch.float16, **features)
        outs.append(layer.run(batch, metadata=metadata(layer, batch, ranges)))
    compare(*outs)


@works("prefix-LM ranges")
def test_kernels() -> None:
    batch, layer = Batch([(1, 20), (9, 30)]), Layer(window=12)
    ranges: Ranges = {1: [(22, 26)]}
    with portattn.settings(backend=KERNELS):
        out = layer.run(batch, metadata=metadata(layer, batch, ranges))
        assert portattn.last_plan().path == KERNELS
    check(out, batch, window=(11, 0), ranges=ranges)


@works("prefix-LM ranges")
def test_another_groups_blocks() -> None:
    layer, batch = Layer(), Batch(REQUESTS)
    built = metadata(layer, Batch(REQUESTS, seed=3))
    built = layer.builder.update_block_table(built, batch.table, batch.common().slot_mapping)
    check(layer.run(batch, metadata=built), batch, ranges=RANGES)


def test_rows_that_the_device_alone_knows() -> None:
    """The device may have other boundaries of decoding requests than the host, which knows their sum and the longest.
    Beside a prompt, whose ranges take the batch apart; and by themselves, where the longest is no longer than it
    says."""
    for requests, starts, bounds, ranges in (
        ([(4, 20), (2, 30), (9, 12)], [0, 3, 6, 15], [25, 33, 12], {2: [(5, 10)]}),
        ([(4, 20), (1, 30), (2, 12), (1, 1)], [0, 2, 4, 6, 8], [25, 33, 15, 2], {0: [(2, 9)], 1: [(3, 25)]}),
    ):
        batch, layer = Batch(requests), Layer()
        common = batch.common()
        assert common.max_query_len == max(rows for rows, _ in requests)
        host = [torch.tensor(numbers, dtype=torch.int32, device="cpu") for numbers in (starts, bounds)]
        built = layer.builder.build(0, common.replace(
            query_start_loc_cpu=host[0], seq_lens_cpu_upper_bound=host[1], mm_req_doc_ranges=ranges,
        ))  # fmt: skip
        assert (built.mm_prefix_range is None) == (2 not in ranges)
        check(layer.run(batch, metadata=built), batch, ranges=ranges)


def test_batches_without_a_row_in_a_range_are_as_ever() -> None:
    layer = Layer()
    for requests, ranges in (
        ([(1, 20), (1, 5)], {0: [(15, 25)]}),  # one row each: a row sees all keys up to itself as it is
        ([(4, 20), (3, 9)], {0: [(2, 15)], 1: [(9, 12)]}),
        ([(4, 20)], {0: [(18, 18)]}),
        ([(4, 20)], {0: []}),
        ([(4, 20)], {}),
        ([(4, 20)], None),
    ):
        built = metadata(layer, Batch(requests), ranges)
        assert built.mm_prefix_range is None
        assert built.causal is True


def test_how_batches_are_taken_apart() -> None:
    made, longest = vllm_metadata.cuts({0: [(6, 9), (3, 4)], 2: [(0, 99)]}, [0, 8, 8, 11], [10, 0, 7])
    assert [(cut.request, cut.first, cut.behind, cut.both) for cut in made] == [
        (0, 0, 7, False), (0, 1, 5, True), (0, 3, 4, False), (0, 4, 0, True), (1, 0, 0, False), (2, 0, 0, True),
    ]  # fmt: skip
    assert longest == 7


def test_padded_requests() -> None:
    """Requests behind the batch's own have no rows and no keys; their tables lead nowhere."""
    layer, batch, ranges = Layer(), Batch([(9, 20), (5, 5)]), {0: [(12, 18)]}
    common = batch.common()
    rows = torch.tensor([0, 9, 14, 14, 14], dtype=torch.int32)
    lengths = torch.cat([common.seq_lens, torch.zeros(2, dtype=torch.int32)])
    padded = common.replace(
        query_start_loc=rows, query_start_loc_cpu=rows.cpu(), seq_lens=lengths, num_reqs=4,
        seq_lens_cpu_upper_bound=lengths.cpu(), mm_req_doc_ranges=ranges,
        block_table_tensor=torch.cat([batch.table, torch.full((2, batch.table.shape[1]), 2**30, dtype=torch.int32)]),
    )  # fmt: skip
    check(layer.run(batch, metadata=layer.builder.build(0, padded)), batch, ranges=ranges)


def test_what_is_refused() -> None:
    layer, batch = Layer(), Batch([(9, 20)])
    with pytest.raises(ArgumentError, match=r"mm_req_doc_ranges is \(14, 18\), but must not overlap"):
        metadata(layer, batch, {0: [(14, 18), (12, 14)]})
    with pytest.raises(ArgumentError, match="causal is False, but must be True where rows are in a range"):
        metadata(layer, batch, {0: [(14, 18)]}, causal=False)
    with pytest.raises(ArgumentError, match="seq_lens_cpu_upper_bound is None, but must be given"):
        layer.builder.build(0, batch.common().replace(mm_req_doc_ranges={0: [(14, 18)]}))
    short = Layer(window=4)
    with pytest.raises(
        ArgumentError, match=r"range in mm_req_doc_ranges is 5, but must not be longer than .*window, 4"
    ):
        short.run(batch, metadata=metadata(short, batch, {0: [(14, 18)]}))


@pytest.mark.parametrize(
    ("windows", "clamps", "limit"),
    [
        ((8, 16), (False, False), "must be no shorter than the model's window, 16, or mm_prefix_clamp"),
        ((8, 8), (True, True), ""),
        ((None, 16), (False, False), ""),
        ((None, 16), (False, True), ""),
        # vLLM keeps ranges of any length where the model's class clamps, and its configuration says nothing of it.
        ((8, 16), (False, True), "must be no shorter than ranges of multimodal tokens of any length"),
    ],
)
def test_windows_that_may_be_too_short(windows: Any, clamps: Any, limit: str) -> None:
    """They are refused as the engine makes its builders, before there is a token."""
    layers = {
        f"layer.{number}": SimpleNamespace(sliding_window=window, mm_prefix_clamp_sliding_window=clamp)
        for number, (window, clamp) in enumerate(zip(windows, clamps, strict=True))
    }
    model = SimpleNamespace(is_mm_prefix_lm=True, hf_text_config=SimpleNamespace(), get_sliding_window=lambda: 16)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers), model_config=model,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
    )  # fmt: skip
    spec = Layer().spec
    assert spec.block_size == BLOCK

    def make() -> PortattnMetadataBuilder:
        return PortattnMetadataBuilder(spec, list(layers), config, DEVICE)

    if not limit:
        make()
        return
    with pytest.raises(ArgumentError, match=f"sliding_window of layer.0 is 8, but {limit}"):
        make()
    layers["layer.1"].mm_prefix_clamp_sliding_window = True  # of another builder's group, say
    with pytest.raises(ArgumentError, match="no shorter than ranges of multimodal tokens of any length"):
        PortattnMetadataBuilder(spec, ["layer.0"], config, DEVICE)
    layers["layer.1"].mm_prefix_clamp_sliding_window = False
    model.hf_text_config.mm_prefix_clamp_sliding_window = True  # ranges of any length come
    with pytest.raises(ArgumentError, match="no shorter than ranges of multimodal tokens of any length"):
        make()
    model.is_mm_prefix_lm = False
    make()


def test_graphs_hold_one_row_a_request() -> None:
    """A graph of several rows could be replayed for the rest of a prompt that has ranges."""
    model = SimpleNamespace(is_mm_prefix_lm=True)
    config = SimpleNamespace(model_config=model)
    of = PortattnMetadataBuilder.get_cudagraph_support
    assert of(config, None) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    model.is_mm_prefix_lm = False
    assert of(config, None) is AttentionCGSupport.UNIFORM_BATCH


def test_the_check_notices() -> None:
    batch, layer = Batch([(9, 20)]), Layer()
    out = layer.run(batch, metadata=metadata(layer, batch, {0: [(12, 17)]}))
    assert not math.isnan(out.sum())
    for other in ([(12, 16)], [(12, 18)]):  # rows see the range's first key without it too
        with pytest.raises(AssertionError):
            check(out, batch, ranges={0: other})
