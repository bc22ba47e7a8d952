"""What the ranks of the tests of models run: a small Llama of random weights over shards, and the whole one."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from portattn.distributed import context_parallel
from portattn.errors import ArgumentError
from portattn.integrations.transformers import register
from portattn.integrations.transformers_context_parallel import register_parallel, shard_batch

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9))
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def batch_of(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    return ids, labels


def trained(kind: str, options: dict[str, Any], length: int, checkpointing: bool) -> dict[str, float]:
    """Errors of loss and gradients against one process in float64, and those of one process in float32."""
    ids, labels = batch_of(length)
    whole = {}
    for dtype in (torch.float64, torch.float32):
        model = model_of(kind).to(dtype)
        model.set_attn_implementation("eager")
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        whole[dtype] = loss.detach(), [p.grad for p in model.parameters()]
    shared = context_parallel(**options)
    registered = register_parallel(shared)
    try:
        model = model_of(kind)
        model.set_attn_implementation("portattn_parallel")
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        loss = model(**shard_batch(shared, ids, labels)).loss
        loss.backward()
    finally:
        registered.remove()
    total = loss.detach().clone()
    dist.all_reduce(total)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    exact, same = whole[torch.float64], whole[torch.float32]
    ours = [p.grad for p in model.parameters()]
    return {
        "loss": abs(float(total) - float(exact[0])), "loss of one": abs(float(same[0]) - float(exact[0])),
        "gradients": max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, exact[1], strict=True)),
        "of one": max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(same[1], exact[1], strict=True)),
    }  # fmt: skip


def replicated(model: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrapped(wrap: Callable[[Any], Any], attention: str) -> list[float]:
    """Return the losses of three steps on batches of the rank's own, and the sum of the weights after them."""
    config = LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=None, initializer_range=0.3)
    torch.manual_seed(0)
    registered = register()
    try:
        whole = LlamaForCausalLM(config).train()
        whole.set_attn_implementation(attention)
        model, losses = wrap(whole), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # which takes notice of a gradient's scale
        for step in range(3):
            ids = torch.randint(1, 64, (3, 12), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            mask = torch.ones_like(ids)
            mask[0, 8:], mask[1, :5] = 0, 0  # padded on the right, on the left
            labels = ids.masked_fill(~(mask.bool() & mask.roll(1, dims=1).bool()), -100)
            optimizer.zero_grad()
            loss = model(input_ids=ids * mask, attention_mask=mask, labels=labels, use_cache=False).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    finally:
        registered.remove()
    weights = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [*losses, sum(p.detach().abs().sum().item() for p in weights)]


def refused(change: str) -> str:
    ids, labels = batch_of(16)
    shared = context_parallel(layout="contiguous" if change == "no positions" else "zigzag")
    registered = register_parallel(shared)
    try:
        model = model_of("llama")
        model.set_attn_implementation("portattn_parallel")
        given = shard_batch(shared, ids, labels)
        if change in ("no positions", "no positions, zigzag"):
            del given["position_ids"]
            if change == "no positions" and dist.get_rank() == 0:  # whose rows are the first
                return "nothing"
            if change == "no positions":
                del given["labels"]
        elif change == "packed":
            given["position_ids"] = torch.arange(8).remainder(5).expand(2, -1)
        elif change == "padding of one" and dist.get_rank() == 1:
            given["attention_mask"] = torch.ones(2, 8, dtype=torch.int64)
            given["attention_mask"][0, 0] = 0
        elif change == "positions of one" and dist.get_rank() == 1:
            given["position_ids"] = given["position_ids"] + 1
        elif change == "padding":
            given["attention_mask"] = torch.ones(2, 8, dtype=torch.int64)
            given["attention_mask"][0, 0] = 0
        elif change == "dropout":
            model.config.attention_dropout = 0.1
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.1
            model.train()
        elif change == "length":
            shard_batch(shared, ids[:, :15])
        elif change == "cache":
            from transformers import DynamicCache

            cache = DynamicCache(config=model.config)
            for layer in range(2):
                cache.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), layer)
            given |= {"past_key_values": cache, "use_cache": True}
        model(**given)
    except ArgumentError as error:
        return str(error)
    finally:
        registered.remove()
    return "nothing"
