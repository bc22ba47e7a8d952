"""CUDA graphs as SGLang drives them: metadata at capture, then the same tensors filled before each replay. A graph
cannot be captured on a CPU. What a replay reads is shown instead: after a replay's metadata is made, the layer runs
with the metadata object of the capture, whose tensors must be the same memory and hold the new batch."""

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from served import Served, forward, random_tree, verify_input
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

DECODE, VERIFY, DRAFT = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2


def blank(served: Served, mode: ForwardMode, count: int, each: int, backend: Any, **more: Any) -> ForwardBatch:
    """What a graph runner captures with: row 0, slot 0, lengths of the fill value."""
    fill = backend.get_cuda_graph_seq_len_fill_value()
    lengths = torch.full((count,), fill, dtype=torch.int64)
    zeros = {"dtype": torch.int64}
    made = ForwardBatch(
        forward_mode=mode, batch_size=count, input_ids=torch.zeros(count * each, **zeros),
        req_pool_indices=torch.zeros(count, **zeros), seq_lens=lengths,
        out_cache_loc=torch.zeros(count * each, **zeros), seq_lens_sum=None, seq_lens_cpu=None, **more,
    )  # fmt: skip
    return made


def addresses(metadata: Any) -> dict[str, tuple[int, tuple[int, ...]]]:
    tensors = ((f.name, getattr(metadata, f.name)) for f in dataclasses.fields(metadata))
    return {name: (t.data_ptr(), tuple(t.shape)) for name, t in tensors if isinstance(t, torch.Tensor)}


def padded(batch: ForwardBatch, count: int, each: int, fill: int) -> tuple[Any, ForwardBatch]:
    """Return the runner's view of a batch that replays a larger graph, and the batch whose buffers the graph reads."""
    lacks = count - batch.batch_size
    rows = torch.zeros(count * each, dtype=torch.int64)
    more = {"seq_lens": (lacks, fill), "req_pool_indices": (lacks, 0), "out_cache_loc": (lacks * each, 0)}
    buffers = {k: torch.cat([getattr(batch, k), torch.full((n,), v)]) for k, (n, v) in more.items()}
    view = build_replay_fb_view(
        batch, types.SimpleNamespace(  # type: ignore[arg-type]
            **buffers, input_ids=rows, positions=rows, seq_lens_cpu=buffers["seq_lens"], mamba_track_indices=None
        ), bs=count, raw_bs=batch.batch_size, num_tokens=count * each, global_num_tokens_cpu=None,
        seq_len_fill_value=fill, capture_forward_mode=batch.forward_mode, is_encoder_decoder=False,
    )  # fmt: skip
    return view, dataclasses.replace(batch, batch_size=count, seq_lens_cpu=None, **buffers)


def replay(
    served: Served, backend: Any, captured: Any, layer: Any, mode: ForwardMode, before: Sequence[int], each: int,
    count: int, tree: Sequence[torch.Tensor] | None = None, rows: Sequence[int] | None = None,
) -> None:  # fmt: skip
    rows = list(range(1, len(before) + 1)) if rows is None else rows
    new = [each] * len(before)
    more = {"spec_info": verify_input(before, each, tree, True)} if mode is VERIFY else {}
    batch = served.batch(mode, rows, before, new, **more)
    for row, a in zip(rows, before, strict=True):
        served.store(layer, row, 0, a)
    q, k, v = served.new_tokens(batch, before, new)
    view, wide = padded(batch, count, each, backend.get_cuda_graph_seq_len_fill_value())
    known = addresses(captured)
    backend.init_forward_metadata_out_graph(view)
    assert addresses(captured) == known
    if captured.window_slots is not None:
        assert not captured.window_slots[sum(new) :].any(), "rows that pad write where another batch wrote"
    backend.forward_metadata = captured  # what the graph's kernels read
    backend.init_forward_metadata_in_graph(view)
    lacks = (count - len(before)) * each
    q, k, v = (torch.cat([t, torch.zeros(lacks, t.shape[1], dtype=t.dtype)]) for t in (q, k, v))
    out = forward(backend, layer, (q, k, v), wide)
    live = sum(new)
    assert out.shape[0] == count * each
    served.check(out[:live], q[:live], batch, before, new, layer, tree)


@pytest.mark.engine_feature("CUDA graphs: what decode and speculation read keeps its addresses")
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("latent", [False, True])
def test_decode(page: int, latent: bool) -> None:
    served = Served([37, 65, 20], page=page, latent=latent)
    backend, layer = served.backend, served.layer()
    backend.init_cuda_graph_state(8, 8)
    backend.init_forward_metadata_out_graph(blank(served, DECODE, 4, 1, backend), in_capture=True)
    captured = backend.forward_metadata
    replay(served, backend, captured, layer, DECODE, [30, 60, 2], 1, 4)
    replay(served, backend, captured, layer, DECODE, [36, 64, 19], 1, 4)
    replay(served, backend, captured, layer, DECODE, [5], 1, 4, rows=[2])


@pytest.mark.engine_feature("CUDA graphs: what decode and speculation read keeps its addresses")
def test_graphs_of_several_sizes_share_the_buffers() -> None:
    served = Served([37, 65, 20], page=16)
    backend, layer = served.backend, served.layer()
    backend.init_cuda_graph_state(8, 8)
    captured = {}
    for size in (8, 4, 2):
        backend.init_forward_metadata_out_graph(blank(served, DECODE, size, 1, backend), in_capture=True)
        captured[size] = backend.forward_metadata
    assert len({made.table.data_ptr() for made in captured.values()}) == 1
    replay(served, backend, captured[4], layer, DECODE, [30, 60, 2], 1, 4)
    replay(served, backend, captured[2], layer, DECODE, [36, 64], 1, 2)
    replay(served, backend, captured[8], layer, DECODE, [20, 3, 19], 1, 8)


@pytest.mark.engine_feature("CUDA graphs: what decode and speculation read keeps its addresses")
@pytest.mark.parametrize("page", [1, 4])
def test_window_pool(page: int) -> None:
    served = Served([37, 65, 20], page=page, windowed=True)
    backend = served.backend
    backend.init_cuda_graph_state(4, 4)
    backend.init_forward_metadata_out_graph(blank(served, DECODE, 4, 1, backend), in_capture=True)
    captured = backend.forward_metadata
    for number, window in ((0, 8), (1, -1)):
        layer = served.layer(number, sliding_window_size=window)
        replay(served, backend, captured, layer, DECODE, [30, 60, 2], 1, 4)
        replay(served, backend, captured, layer, DECODE, [36, 64, 19], 1, 4)
        replay(served, backend, captured, layer, DECODE, [5], 1, 4, rows=[2])


@pytest.mark.engine_feature("CUDA graphs: what decode and speculation read keeps its addresses")
@pytest.mark.parametrize("latent", [False, True])
def test_trees(latent: bool) -> None:
    """The tree of a replay is another one than the capture's; without one, the drafted tokens are a chain."""
    served = Served([37, 65, 20], page=16, latent=latent)
    generator = torch.Generator().manual_seed(1)
    with get_spec().override(speculative_num_draft_tokens=5):
        backend = served.backend
    layer = served.layer()
    backend.init_cuda_graph_state(4, 20)
    ones = [torch.ones(5, 5, dtype=torch.bool)] * 4
    info = verify_input([1] * 4, 5, ones, True)
    batch = blank(served, VERIFY, 4, 5, backend, spec_info=info)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    captured = backend.forward_metadata
    for before in ([17, 60, 1], [32, 11]):
        made = [random_tree(5, generator) for _ in before]
        replay(served, backend, captured, layer, VERIFY, before, 5, 4, tree=made)
    replay(served, backend, captured, layer, VERIFY, [17, 60, 1], 5, 4)


@pytest.mark.engine_feature("trees for graphs that were captured without one", refused=True)
def test_a_tree_where_the_capture_had_none(refusal) -> None:  # type: ignore[no-untyped-def]
    served = Served([37])
    with get_spec().override(speculative_num_draft_tokens=5):
        backend = served.backend
    backend.init_cuda_graph_state(2, 10)
    first = blank(served, VERIFY, 1, 5, backend, spec_info=verify_input([1], 5, None, True))
    backend.init_forward_metadata_out_graph(first, in_capture=True)
    tree = [torch.eye(5, dtype=torch.bool)]
    batch = served.batch(VERIFY, [1], [30], [5], spec_info=verify_input([30], 5, tree, True))
    with refusal(ValueError, match="custom_mask is .*, but must be None"):
        backend.init_forward_metadata_out_graph(batch)


@pytest.mark.engine_feature("CUDA graphs: what decode and speculation read keeps its addresses")
def test_draft_extend() -> None:
    served = Served([37, 65, 20], page=16)
    with get_spec().override(speculative_num_draft_tokens=4):
        backend = served.backend
    backend.init_cuda_graph_state(4, 16)
    backend.init_forward_metadata_out_graph(blank(served, DRAFT, 4, 4, backend), in_capture=True)
    captured = backend.forward_metadata
    replay(served, backend, captured, served.layer(), DRAFT, [17, 60, 1], 4, 4)
    replay(served, backend, captured, served.layer(), DRAFT, [33, 2], 4, 4)


def test_draft_extend_of_another_width() -> None:
    """A drafter's steps may have their own number of rows, which the batch says."""
    served = Served([37, 65])
    with get_spec().override(speculative_num_draft_tokens=4):
        backend = served.backend
    backend.init_cuda_graph_state(2, 8)
    for told, queries in ((3, 3), (-1, 4)):
        spec = EagleDraftExtendInput(hidden_states=None, num_tokens_per_req=told)
        backend.init_forward_metadata_out_graph(
            blank(served, DRAFT, 2, queries, backend, spec_info=spec), in_capture=True
        )
        assert backend.forward_metadata.queries == queries


@pytest.mark.engine_feature("CUDA graphs of whole prefills", refused=True)
def test_prefill_graphs_are_refused(refusal) -> None:  # type: ignore[no-untyped-def]
    served = Served([37])
    backend = served.backend
    backend.init_cuda_graph_state(2, 40)
    with refusal(ValueError, match="forward_mode is 'EXTEND'"):
        backend.init_forward_metadata_out_graph(served.batch(ForwardMode.EXTEND, [1], [0], [37]), in_capture=True)
