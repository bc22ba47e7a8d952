"""After an engine's start no batch compiles a kernel: random layers and batches, with the plans of an H100."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzz.recorded import assert_no_batch_compiles
from vllm_batches import DECODE, Batch, Layer, check

from portattn.integrations.vllm import metadata


@pytest.mark.engine_feature("kernels compiled at the start")
@pytest.mark.parametrize("seeds", ["0,1,2,3", "4,6,7,11"])  # every third is of latent attention
def test_no_batch_compiles_a_kernel(tmp_path: Path, seeds: str) -> None:
    assert_no_batch_compiles("engines/vllm/warmup_child.py", tmp_path, seeds, 40)


def test_all_groups_are_warmed_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first call whose caches are bound: an older vLLM tells layers of no cache."""
    calls: list[list[dict[str, Any]]] = []
    monkeypatch.setattr(metadata, "needs_warmup", lambda device: True)
    monkeypatch.setattr(metadata, "compile_calls", lambda specs, *rest: calls.append(specs()))
    shared: list[Any] = []
    monkeypatch.setattr(Layer, "configured", lambda self, config: shared.append(config) or shared[0])
    layers, batch = [Layer(), Layer(window=7)], Batch(DECODE)
    check(layers[0].run(batch), batch)
    check(layers[1].run(batch), batch, window=(6, 0))
    (specs,) = calls
    assert {spec["window"] for spec in specs if spec["op"] == "paged_attention"} == {None, (6, 0)}
    assert {spec["op"] for spec in specs} == {"paged_attention", "write_pages"}


def test_an_encoder_is_warmed_up_before_its_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[dict[str, Any]]] = []
    monkeypatch.setattr(metadata, "needs_warmup", lambda device: True)
    monkeypatch.setattr(metadata, "compile_calls", lambda specs, *rest: calls.append(specs()))
    Layer(arguments={"attn_type": "encoder_only"})
    (specs,) = calls
    assert {spec["op"] for spec in specs} == {"varlen_attention"}


def test_tables_of_an_encoder_decoder_model() -> None:
    """In every group a row of a table has room for the encoder's tokens: it is as wide as the runner's."""
    layer = Layer()
    scheduler = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64, max_num_encoder_input_tokens=1500)
    model = SimpleNamespace(max_model_len=100, dtype=torch.bfloat16, is_encoder_decoder=True)
    graphs = SimpleNamespace(cudagraph_capture_sizes=None)
    config = SimpleNamespace(
        scheduler_config=scheduler, model_config=model, compilation_config=graphs,
        parallel_config=layer.config.parallel_config,
    )  # fmt: skip
    blocks = -(-1500 // layer.spec.block_size)
    assert min(metadata.engine_of(config, layer.spec, torch.device("cpu")).columns) == blocks
    model.is_encoder_decoder = False
    assert min(metadata.engine_of(config, layer.spec, torch.device("cpu")).columns) < blocks
