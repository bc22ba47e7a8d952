"""A small Llama of random weights whose sequences two processes share: the losses are those of one process.

Run it as it is, and it starts two processes on the CPU; or with torchrun --nproc-per-node 2, on GPUs with NCCL. It
needs transformers.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from portattn.distributed import context_parallel
from portattn.integrations.transformers_context_parallel import register_parallel, shard_batch

STEPS, LENGTH, VOCABULARY = 4, 64, 50


def model_of(attention, device):
    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device)


def train(model, batch_of, ranks):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
        loss = model(**batch_of(ids.to(model.device))).loss
        loss.backward()
        total = loss.detach().clone()
        if ranks > 1:  # each rank has the share of its own rows
            dist.all_reduce(total)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def main(rank, ranks, store=None):
    gpus = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", store=store, rank=rank, world_size=ranks)
    try:
        shared = context_parallel()
        register_parallel(shared, "portattn_parallel")
        model = model_of("portattn_parallel", device)
        losses = train(model, lambda ids: shard_batch(shared, ids, ids), ranks)
        if rank == 0:
            whole = train(model_of("eager", device), lambda ids: {"input_ids": ids, "labels": ids}, 1)
            rows = shared.positions(LENGTH).tolist()
            print(f"rank 0 of {ranks} has rows {rows[0]} to {rows[-1]}, {len(rows)} of {LENGTH}")
            print("losses of one process:", " ".join(f"{loss:.4f}" for loss in whole))
            print(f"losses of {ranks} ranks:   ", " ".join(f"{loss:.4f}" for loss in losses))
            alike = max(abs(a - b) for a, b in zip(losses, whole, strict=True)) < 1e-3
            print(f"alike: {alike}, falling: {losses[-1] < losses[0]}")
    finally:
        dist.destroy_process_group()


def child(rank, ranks, file):
    torch.set_num_threads(1)
    main(rank, ranks, dist.FileStore(file, ranks))


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun, of one host
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            how = "spawn" if torch.cuda.is_available() else "fork"
            arguments = (2, os.path.join(folder, "store"))
            torch.multiprocessing.start_processes(child, arguments, nprocs=2, start_method=how)
