"""What builders answer and make besides a batch's metadata: graphs, and metadata that vLLM derives classes of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend
from vllm_batches import Batch, Layer, check

from portattn.integrations.vllm.backend import PortattnBackend
from portattn.integrations.vllm.mla import PortattnMLAMetadataBuilder

works = pytest.mark.engine_feature


@pytest.mark.parametrize(
    ("world", "level"),
    [(1, AttentionCGSupport.UNIFORM_BATCH), (2, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE)],
)
def test_graphs_of_latent_attention(world: int, level: AttentionCGSupport) -> None:
    """With ranks that share keys vLLM's common builder counts requests of several rows as prefill."""
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=world))
    assert PortattnMLAMetadataBuilder.get_cudagraph_support(config, None) is level


@works("fast prefill of layers that share keys")
@pytest.mark.parametrize("fast", [True, False])
def test_fast_prefill(fast: bool) -> None:
    """The layers compute the rows that are sampled alone; their metadata are of a class that vLLM derives.

    It does so also where all rows are computed, and then there may be ranges.
    """
    backend = create_fast_prefill_custom_backend("FastPrefill_", PortattnBackend)
    layer, whole = Layer(backend), Batch([(5, 9), (3, 20)])
    ranges = {} if fast else {0: [(5, 7)]}
    rows = torch.tensor([3, 4, 5, 6, 7])  # the last two of the first request, and all of the second
    sampled = {"logits_indices_padded": rows, "num_logits_indices": 5, "max_logits_per_req": 3} if fast else {}
    common = whole.common()
    built = layer.builder.build(
        0,
        common.replace(seq_lens_cpu_upper_bound=common.seq_lens.clone(), mm_req_doc_ranges=ranges, **sampled),
    )
    assert built.num_actual_tokens == (5 if fast else 8)
    assert (built.mm_prefix_range is None) == fast
    elsewhere = Batch(whole.requests, seed=7).table  # another group's blocks
    again = layer.builder.update_block_table(built, elsewhere, common.slot_mapping)
    assert type(again) is type(built)
    assert again.logits_indices_padded is built.logits_indices_padded
    assert built.block_table is whole.table
    part = Batch([(2, 9), (3, 20)]) if fast else whole
    part.q, part.k, part.v = [whole.q[0][-part.requests[0][0] :], whole.q[1]], whole.k, whole.v
    for metadata, table in ((built, whole.table), (again, elsewhere)):
        layer.layer.kv_cache = layer.empty_cache()
        part.table = table
        check(layer.run(part, metadata=metadata), part, ranges=ranges)
