"""A sequence that several processes share: each computes with its own rows, and attends the rows of all.

Run it as it is, and it starts four processes on the CPU; or with torchrun --nproc-per-node 4, on GPUs with NCCL.
"""

import functools
import os
import tempfile

import torch
import torch.distributed as dist

import portattn
from portattn.distributed import context_parallel

HEADS, KV_HEADS, HEAD_DIM, ROWS = 4, 2, 32, 256
CU_SEQLENS = torch.tensor([0, 30, 190, 256], dtype=torch.int32)  # documents that the ranks cut


def layer(x, weight, attention):
    """Packed rows (T, width) -> (T, Hq, D). Everything but attention is row by row."""
    q, k, v = (x @ weight).unflatten(1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
    return attention(q, k, v).tanh()


def close(ours, right):
    return torch.allclose(ours, right, atol=1e-3, rtol=1e-3)


def train(rank, device):
    torch.manual_seed(0)  # the same numbers on every rank
    x = torch.randn(ROWS, 48, device=device)
    weight = 0.1 * torch.randn(48, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=device)
    weight.requires_grad_()

    # The whole of it on one device.
    cu = CU_SEQLENS.to(device)
    whole = layer(x, weight, lambda q, k, v: portattn.varlen_attention(q, k, v, cu, cu, ROWS, ROWS, causal=True))
    (right,) = torch.autograd.grad(whole.square().sum(), weight)

    for method in ("ring", "ulysses"):
        shared = context_parallel(method=method)
        documents = shared.documents(CU_SEQLENS)
        attention = functools.partial(shared.varlen_attention, cu_seqlens=documents, causal=True)
        mine = layer(shared.shard(x, dim=0), weight, attention)
        (gradient,) = torch.autograd.grad(mine.square().sum(), weight)
        dist.all_reduce(gradient)  # each rank has the share of its own rows, as in data parallel
        out = shared.unshard(mine.detach(), dim=0)
        if rank == 0:
            rows = shared.positions(ROWS)
            print(f"{method}: rank 0 has rows {rows[0]} to {rows[-1]}, {len(rows)} of {ROWS}")
            print(f"{method}: out {close(out, whole)}, gradient {close(gradient, right)}")


def main(rank, ranks, store=None):
    gpus = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    dist.init_process_group("nccl" if gpus else "gloo", store=store, rank=rank, world_size=ranks)
    try:
        train(rank, device)
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
            arguments = (4, os.path.join(folder, "store"))
            torch.multiprocessing.start_processes(child, arguments, nprocs=4, start_method=how)
