"""Run by test_direct.py: public calls that Triton's interpreter carries out, of the Triton that comes
first on the path. Prints as JSON that Triton's version, and the largest distance of each result from float64's, in
parts of the largest number where that is above 1."""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import oracle64
import torch
import triton

import portattn

LENGTHS_Q, LENGTHS_K = (5, 0, 9), (7, 4, 20)
HEADS, HEADS_K, DIM, PAGE = 4, 2, 16, 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
found: dict[str, float] = {}


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def bounds(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    rows, keys = q.shape[1], k.shape[1]
    seen = oracle64.visible_keys(rows, keys, "bottom_right")
    k, v = (x.repeat_interleave(HEADS // HEADS_K, 0) for x in (k, v))
    distance = (torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)).abs()
    scores = q @ k.transpose(-1, -2) / DIM**0.5 - slopes.double()[:, None, None] * distance
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def compare(name: str, ours: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert ours is not None, name
    assert expected is not None, name
    assert ours.shape == expected.shape, name
    largest = max(1.0, float(expected.detach().abs().amax()))
    found[name] = float((ours.detach().double() - expected.detach()).abs().amax()) / largest


def packed() -> None:
    """Results and gradients of packed sequences, one of which has no rows; rows after the last one are padding."""
    given = numbers(20, HEADS, DIM), numbers(40, HEADS_K, DIM), numbers(40, HEADS_K, DIM), SLOPES
    grad = numbers(20, HEADS, DIM)
    ours, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    at_q, at_k = bounds(LENGTHS_Q), bounds(LENGTHS_K)
    out = portattn.varlen_attention(
        *ours[:3], at_q, at_k, max(LENGTHS_Q), max(LENGTHS_K), causal=True, alibi_slopes=ours[3], backend="interpreter",
    )  # fmt: skip
    out.backward(grad)
    q, k, v, slopes = theirs
    parts = [
        exact(q[at_q[b] : at_q[b + 1]], k[at_k[b] : at_k[b + 1]], v[at_k[b] : at_k[b + 1]], slopes)
        for b in range(len(LENGTHS_Q))
    ]
    expected = torch.cat([*parts, torch.zeros(20 - sum(LENGTHS_Q), HEADS, DIM, dtype=torch.float64)])
    expected.backward(grad.double())
    compare("packed", out, expected)
    for name, mine, other in zip(("q", "k", "v", "slopes"), ours, theirs, strict=True):
        compare(f"packed, gradient of {name}", mine.grad, other.grad)


def dense() -> None:
    q, k, v, grad = numbers(2, HEADS, 9, DIM), *(numbers(2, HEADS_K, 20, DIM) for _ in "kv"), numbers(2, HEADS, 9, DIM)
    ours, theirs = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    out = portattn.attention(*ours, causal=True, alibi_slopes=SLOPES, backend="interpreter")
    out.backward(grad)
    by_rows = [[x[b].transpose(0, 1) for x in theirs] for b in range(2)]
    expected = torch.stack([exact(*tensors, SLOPES).transpose(0, 1) for tensors in by_rows])
    expected.backward(grad.double())
    compare("dense", out, expected)
    for name, mine, other in zip("qkv", ours, theirs, strict=True):
        compare(f"dense, gradient of {name}", mine.grad, other.grad)


def caches() -> None:
    """One query a sequence, contiguous and paged, and packed queries over pages."""
    batch, capacity = len(LENGTHS_K), 24
    k, v = (numbers(batch, HEADS_K, capacity, DIM) for _ in "kv")
    lengths = torch.tensor(LENGTHS_K, dtype=torch.int32)
    table = torch.randperm(batch * capacity // PAGE, generator=generator).to(torch.int32).view(batch, -1)
    pages_k, pages_v = (torch.zeros(table.numel(), PAGE, HEADS_K, DIM) for _ in "kv")
    for cache, pages in ((k, pages_k), (v, pages_v)):
        pages[table.long().flatten()] = cache.transpose(1, 2).reshape(-1, PAGE, HEADS_K, DIM)

    def of_cache(q: torch.Tensor, b: int) -> torch.Tensor:
        seen = LENGTHS_K[b]
        return exact(q, k[b, :, :seen].transpose(0, 1), v[b, :, :seen].transpose(0, 1), SLOPES)

    options = {"causal": True, "alibi_slopes": SLOPES, "backend": "interpreter"}
    q = numbers(batch, HEADS, 1, DIM)
    expected = torch.stack([of_cache(q[b].transpose(0, 1), b).transpose(0, 1) for b in range(batch)])
    compare("decode", portattn.decode_attention(q, k, v, lengths, **options), expected)
    compare("paged", portattn.paged_attention(q, pages_k, pages_v, table, lengths, **options), expected)
    at, rows = bounds((3, 1, 2)), numbers(6, HEADS, DIM)
    expected = torch.cat([of_cache(rows[at[b] : at[b + 1]], b) for b in range(batch)])
    ours = portattn.paged_attention(rows, pages_k, pages_v, table, lengths, cu_seqlens_q=at, max_seqlen_q=3, **options)
    compare("paged, packed", ours, expected)


generator = torch.Generator().manual_seed(0)
torch.set_num_threads(1)
packed()
dense()
caches()
print(json.dumps({"triton": triton.__version__, "distances": found}))
