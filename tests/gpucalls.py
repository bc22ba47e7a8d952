"""Shared by the tests that need an accelerator: calls of every operation, with data that a seed draws."""

from collections.abc import Callable
from typing import Any

import torch

import portattn

WHERE = "cuda"
# Query heads, heads of keys, width; latent rank and positions; tokens a page, pages of a sequence.
HQ, HK, D, RANK, ROPE, PAGE, COLUMNS = 8, 2, 64, 128, 64, 16, 20
S = PAGE * COLUMNS
Pieces = tuple[torch.Tensor, ...]


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(WHERE, dtype)


def integers(seed: int, low: int, high: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int32).to(WHERE)


def beginnings(seed: int, batch: int, total: int) -> torch.Tensor:
    """cu_seqlens (B + 1,) of sequences that have `total` rows together, some of them none."""
    cuts = integers(seed, 0, total, batch - 1).sort().values
    ends = torch.tensor([0, total], dtype=torch.int32, device=WHERE)
    return torch.cat([ends[:1], cuts.int(), ends[1:]])


def table(seed: int, batch: int) -> torch.Tensor:
    order = torch.randperm(batch * COLUMNS, generator=torch.Generator().manual_seed(seed))
    return order.view(batch, COLUMNS).int().to(WHERE)


def chosen(seed: int, batch: int, places: int = 100) -> dict[str, torch.Tensor]:
    return {
        "indices": integers(seed, -1, S - 1, batch, HQ, places), "counts": integers(seed + 1, 0, places, batch, HQ),
        "log_weights": normal(seed + 2, batch, HQ, places, dtype=torch.float32),
    }  # fmt: skip


def data(name: str, seed: int, batch: int = 4, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """Arguments of an operation by name; another seed changes all data, and no shape."""

    def draw(place: int, *shape: int) -> torch.Tensor:
        return normal(100 * seed + place, *shape, dtype=dtype)

    lengths = {"seqlens_k": integers(seed, 0, S, batch)}
    cache = {"k_cache": draw(1, batch, HK, S, D), "v_cache": draw(2, batch, HK, S, D)}
    pages = {"k_pages": draw(1, batch * COLUMNS, PAGE, HK, D), "v_pages": draw(2, batch * COLUMNS, PAGE, HK, D)}
    paged = lengths | {"page_table": table(seed, batch)}
    latent = {"kv_pages": draw(3, batch * COLUMNS, PAGE, RANK + ROPE), "scale": 0.1}
    total, ragged = 37 * batch, {"cu_seqlens_q": beginnings(seed, batch, 37 * batch), "causal": True}
    return {
        "attention": lambda: {
            "q": draw(0, batch, HQ, 130, D), "k": draw(1, batch, HK, S, D), "v": draw(2, batch, HK, S, D),
            "seqlens_q": integers(seed + 50, 0, 130, batch), **lengths, "causal": True, "sinks": draw(4, HQ),
        },
        "varlen_attention": lambda: {
            "q": draw(0, total, HQ, D), "k": draw(1, 2 * total, HK, D), "v": draw(2, 2 * total, HK, D), **ragged,
            "cu_seqlens_k": beginnings(seed + 60, batch, 2 * total), "max_seqlen_q": total, "max_seqlen_k": 2 * total,
        },
        "varlen by the core": lambda: data("varlen_attention", seed, batch, dtype) | {"backend": "triton"},
        "decode_attention": lambda: {"q": draw(0, batch, HQ, 1, D), **cache, **lengths},
        "paged_attention": lambda: {"q": draw(0, batch, HQ, 2, D), **pages, **paged, "causal": True},
        "ragged": lambda: {"q": draw(0, total, HQ, D), **pages, **paged, **ragged},
        "sparse_attention": lambda: {"q": draw(0, batch, HQ, 1, D), **cache, **lengths, **chosen(seed, batch)},
        "sparse over pages": lambda: {
            "q": draw(0, batch, HQ, 1, D), "k_cache": pages["k_pages"], "v_cache": pages["v_pages"], **paged,
            **chosen(seed, batch), "magicpig": (8, 60),
        },
        "mla_attention": lambda: {
            "q_nope": draw(0, batch, HQ, 1, RANK), "q_rope": draw(5, batch, HQ, 1, ROPE), **latent, **paged,
        },
        "ragged mla": lambda: {
            "q_nope": draw(0, total, HQ, RANK), "q_rope": draw(5, total, HQ, ROPE), **latent, **paged, **ragged,
        },
    }[name]() | {"return_lse": True}  # fmt: skip


NAMES = (
    "attention", "varlen_attention", "varlen by the core", "decode_attention", "paged_attention", "ragged",
    "sparse_attention", "sparse over pages", "mla_attention", "ragged mla",
)  # fmt: skip
SPLIT = NAMES[3:]
OPS = {
    "varlen by the core": "varlen_attention", "ragged": "paged_attention", "sparse over pages": "sparse_attention",
    "ragged mla": "mla_attention",
}  # fmt: skip


def operation(name: str) -> str:
    return OPS.get(name, name)


def perform(name: str, arguments: dict[str, Any], **changes: Any) -> Pieces:
    return getattr(portattn, operation(name))(**(arguments | changes))


def prepared(name: str, arguments: dict[str, Any], **changes: Any) -> Callable[[], Pieces]:
    arguments = arguments | changes
    handle = portattn.prepare(operation(name), **arguments)
    out, lse = (torch.full_like(t, float("nan")) for t in perform(name, arguments))
    return lambda: handle.run(**arguments, out=out, lse=lse)


def a_kernel_ran(arguments: dict[str, Any]) -> None:
    """One of portattn's own: the core's where that is asked for, else what the plan for this chip takes."""
    made = portattn.last_plan()
    assert made.key, f"{made.path} has no kernel of portattn's"
    assert made.path == arguments.get("backend", made.path)


def same(found: Pieces, expected: Pieces) -> None:
    for one, other in zip(found, expected, strict=True):
        assert not one.isnan().any()
        assert torch.equal(one, other)
