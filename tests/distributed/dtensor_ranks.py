"""What the two ranks of test_dtensor.py run."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import portattn
from portattn.integrations import sdpa

Tensors = dict[str, torch.Tensor]
REFERENCE = {"backend": "reference"}  # of operations that no other path differentiates


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def drop_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool) -> Any:
    """torch's scaled_dot_product_attention by portattn, which returns no LSE."""
    out = sdpa.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert sdpa.last_route().path == "portattn"
    return out, out


def calls() -> dict[str, tuple[Callable[..., Any], Tensors, dict[str, Any], int]]:
    """name -> (operation, tensors, other arguments, the axis of q's heads). q, k, v are placed, others are whole."""
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 8, 10, 16), torch.randn(4, 2, 12, 16), torch.randn(4, 2, 12, 16)
    more = {"sinks": torch.randn(8), "bias": torch.randn(8, 10, 12), "seqlens_k": ints(3, 12, 7, 0)}
    pages, table = torch.randn(9, 8, 2, 16), torch.randperm(8).int().view(4, 2)
    swapped = {
        "q": q.transpose(1, 2).contiguous(), "k": k.transpose(1, 2).contiguous(), "v": v.transpose(1, 2).contiguous(),
    }  # fmt: skip
    packed = {"q": q[0].transpose(0, 1).contiguous(), "k": swapped["k"][0], "v": swapped["v"][0]}
    ends = {"cu_seqlens_q": ints(0, 4, 10), "cu_seqlens_k": ints(0, 9, 12)}
    one = q[:, :, :1].contiguous()
    lens = {"seqlens_k": ints(3, 16, 0, 9)}
    latent = torch.randn(9, 8, 24)
    return {
        "attention": (portattn.attention, {"q": q, "k": k, "v": v, **more}, {"causal": True}, 1),
        "attention, bshd": (portattn.attention, {**swapped, **more}, {"layout": "bshd"}, 2),
        "attention, one key head": (portattn.attention,
                                    {"q": q, "k": k[:, :1].contiguous(), "v": v[:, :1].contiguous()}, {"causal": True},
                                    1),
        "drop-in": (drop_in, {"q": q, "k": k, "v": v}, {}, 1),
        "varlen": (portattn.varlen_attention, {**packed, **ends}, {"max_seqlen_q": 6, "max_seqlen_k": 9}, 1),
        "decode": (
            portattn.decode_attention,
            {"q": one, "k_cache": k, "v_cache": v, "seqlens_k": ints(3, 12, 7, 0), "alibi_slopes": torch.rand(4, 8)},
            REFERENCE, 1,
        ),
        "paged": (portattn.paged_attention,
                  {"q": one, "k_pages": pages, "v_pages": pages.flip(0), "page_table": table, **lens}, REFERENCE, 1),
        "mla": (
            portattn.mla_attention,
            {
                "q_nope": torch.randn(4, 8, 1, 16), "q_rope": torch.randn(4, 8, 1, 8), "kv_pages": latent,
                "page_table": table, **lens,
            },
            {"scale": 0.2, **REFERENCE}, 1,
        ),
    }  # fmt: skip


PLACED = ("q", "k", "v", "k_cache", "v_cache", "q_nope", "q_rope")


def placement(way: str, name: str, tensor: torch.Tensor, heads: int) -> Any:
    """How a tensor is given; the rules find what the call needs where these do not go together."""
    if name not in PLACED or way == "whole" or (way == "mixed" and name != "q"):
        return Replicate()
    if way == "batch":
        return Shard(0) if tensor.ndim == 4 else Replicate()
    return Shard(heads) if tensor.shape[heads] > 1 else Replicate()


def loss(found: tuple[Any, Any]) -> Any:
    out, lse = found
    return out.sin().sum() + lse.nan_to_num(0.0, 0.0, 0.0).sum()


def judged(call: str, way: str) -> str:
    """Return what is not as one process has it, or "right"."""
    mesh = init_device_mesh("cpu", (2,))
    function, tensors, values, heads = calls()[call]
    plain = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    expected = function(**plain, **values, return_lse=True)
    loss(expected).backward()
    given = {n: distribute_tensor(t, mesh, [placement(way, n, t, heads)]) for n, t in tensors.items()}
    for t in given.values():
        t.requires_grad_(t.is_floating_point())
    found = function(**given, **values, return_lse=True)
    loss(found).backward()
    pairs = [(f"result {i}", f, e) for i, (f, e) in enumerate(zip(found, expected, strict=True))]
    pairs += [(n, given[n].grad, t.grad) for n, t in plain.items() if t.requires_grad]
    wrong = []
    for name, f, e in pairs:
        whole = f.full_tensor() if isinstance(f, DTensor) else f
        if whole is None or not torch.allclose(whole, e, atol=1e-5, rtol=1e-4, equal_nan=True):
            wrong.append(name)
    if way == "heads" and found[0].placements != (Shard(heads),):
        wrong.append(f"out is {found[0].placements}")
    if way == "batch" and given[next(iter(given))].placements == (Shard(0),) and found[0].placements != (Shard(0),):
        wrong.append(f"out is {found[0].placements}")
    return ", ".join(wrong) or "right"
