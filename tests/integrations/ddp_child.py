"""One of two processes of test_data_parallel.py. Arguments: its rank, a file where the processes meet. Prints, for each
wrapper and attention, the losses of a few steps and a sum of the weights after them, as JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from portattn.integrations.transformers import register

STEPS, BATCH, LENGTH, VOCABULARY = 3, 3, 12, 32


def a_model(attention: str) -> Any:
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, initializer_range=0.3, attn_implementation=attention)  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def replicated(model: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """One row padded on the right, one on the left."""
    ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, 8:], mask[1, :5] = 0, 0
    predicted = mask.bool() & mask.roll(1, dims=1).bool()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(~predicted, -100)}


def trained(wrapped: Callable[[Any], Any], attention: str, rank: int) -> list[float]:
    model = wrapped(a_model(attention))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # which takes notice of a gradient's scale
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(2 * step + rank), use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [*losses, sum(p.detach().abs().sum().item() for p in whole)]


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    register()
    found = {f"{wrapped.__name__}, {attention}": trained(wrapped, attention, rank) for wrapped in (replicated, sharded)
        for attention in ("eager", "portattn")}  # fmt: skip
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
