"""A serving loop over a paged cache in bf16, e4m3, int8 and int4: how many generated tokens does the format change?

    python examples/serve_quantised.py                    # 64 tokens for each of 8 prompts, with each cache
    python examples/serve_quantised.py --tokens 16 --json

The model is a small Llama of random weights, so that tokens have close rivals. Each cache has the same weights and
prompts. After the first token that differs a sequence goes its own way, and most of its later tokens differ too.

Results go to stdout: a table, or with --json one document. The exit status is 2 for bad arguments, 130 after Ctrl-C.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
from torch.nn import functional

import portattn

# The others are held against the first.
FORMATS = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
VOCABULARY, LAYERS, HEADS, KV_HEADS, WIDTH, INNER = 256, 4, 8, 2, 32, 512
PAGE = 16  # tokens
PROMPTS = (3, 9, 16, 17, 24, 33, 40, 57)  # their lengths
ROPE = 10000.0


class Cache:
    """Keys and values of all layers in pages.

    numbers  (2, layers, pages, PAGE, KV_HEADS, WIDTH): keys, then values; of int4 WIDTH / 2 bytes
    scales   where the numbers are narrower than bf16, a float32 for each token and head: the same shape without WIDTH
    table    (sequences, pages of each) int32: every page has one owner
    """

    def __init__(self, dtype: torch.dtype, sequences: int, room: int, device: str) -> None:
        each = -(-room // PAGE)
        width = WIDTH // 2 if dtype is torch.uint8 else WIDTH
        shape = (2, LAYERS, sequences * each, PAGE, KV_HEADS, width)
        self.numbers = torch.zeros(shape, dtype=dtype, device=device)
        self.scales = None if dtype is torch.bfloat16 else torch.zeros(shape[:-1], device=device)
        self.table = torch.randperm(sequences * each).int().reshape(sequences, each).to(device)

    @property
    def bytes_per_token(self) -> int:
        """Of all layers' keys, values and scales."""
        tensors = [self.numbers] if self.scales is None else [self.numbers, self.scales]
        return sum(t.numel() * t.element_size() for t in tensors) // (self.table.numel() * PAGE)

    def write(self, layer: int, values: torch.Tensor, sequences: torch.Tensor, positions: torch.Tensor) -> None:
        """Store keys and values (2, tokens, KV_HEADS, WIDTH), and their scales, at each token's place."""
        slots = self.table[sequences, positions // PAGE].long() * PAGE + positions % PAGE
        pages, scales = self.numbers[:, layer], None if self.scales is None else self.scales[:, layer]
        given: dict[str, Any] = {} if scales is None else {"k_scale": scales[0], "v_scale": scales[1]}
        portattn.write_pages(values[0], values[1], pages[0], pages[1], slots, **given)

    def arguments(self, layer: int, lengths: torch.Tensor) -> dict[str, Any]:
        """What paged_attention is called with besides the queries."""
        k, v = self.numbers[:, layer]
        found: dict[str, Any] = {"k_pages": k, "v_pages": v, "page_table": self.table, "seqlens_k": lengths}
        if self.scales is not None:
            found["k_scale"], found["v_scale"] = self.scales[:, layer]
        return found


class Model:
    """A Llama's layers with random weights."""

    def __init__(self, device: str) -> None:
        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape) * shape[-1] ** -0.5).to(device, torch.bfloat16)

        hidden = HEADS * WIDTH
        self.embedding = random(VOCABULARY, hidden) * hidden**0.5
        self.head = random(VOCABULARY, hidden)
        self.layers = [
            {
                "qkv": random(hidden + 2 * KV_HEADS * WIDTH, hidden), "o": random(hidden, hidden),
                "up": random(2 * INNER, hidden), "down": random(hidden, INNER),
            }
            for _ in range(LAYERS)
        ]  # fmt: skip

    def logits(self, tokens: torch.Tensor, sequences: torch.Tensor, positions: torch.Tensor, cache: Cache,
               lengths: torch.Tensor, packed: dict[str, Any]) -> torch.Tensor:  # fmt: skip
        """(tokens, VOCABULARY). Keys and values of the tokens are written first; each sees its sequence up to itself.

        lengths  of the sequences, these tokens included
        packed   cu_seqlens_q and max_seqlen_q; empty where each sequence has one token
        """
        x = self.embedding[tokens]
        for layer, weights in enumerate(self.layers):
            q, kv = functional.linear(norm(x), weights["qkv"]).split((HEADS * WIDTH, 2 * KV_HEADS * WIDTH), -1)
            q = rotated(q.unflatten(-1, (HEADS, WIDTH)), positions)
            k, v = kv.unflatten(-1, (2, KV_HEADS, WIDTH)).unbind(1)
            cache.write(layer, torch.stack((rotated(k, positions), v)), sequences, positions)
            rows = q if packed else q[:, :, None]  # (tokens, HEADS, WIDTH), or (sequences, HEADS, 1, WIDTH)
            out = portattn.paged_attention(rows, **cache.arguments(layer, lengths), causal=True, **packed)
            x = x + functional.linear(out.reshape(len(tokens), -1), weights["o"])
            gate, up = functional.linear(norm(x), weights["up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, weights["down"])
        return functional.linear(norm(x), self.head)


def norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (tokens, heads, WIDTH)."""
    rates = ROPE ** (-torch.arange(0, WIDTH, 2, device=x.device) / WIDTH)
    angles = (positions[:, None] * rates)[:, None]
    one, other = x.float().chunk(2, -1)
    turned = one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()
    return torch.cat(turned, -1).to(x.dtype)


@torch.no_grad()
def generated(model: Model, cache: Cache, prompts: list[torch.Tensor], count: int) -> torch.Tensor:
    """(prompts, count): the likeliest token, again and again. One ragged call a layer reads the prompts."""
    device = cache.table.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32, device=device)
    each = torch.arange(len(prompts), device=device)
    positions = torch.cat([torch.arange(len(prompt), device=device) for prompt in prompts])
    ends = lengths.cumsum(0, dtype=torch.int32)
    packed = {"cu_seqlens_q": functional.pad(ends, (1, 0)), "max_seqlen_q": max(map(len, prompts))}
    sequences = each.repeat_interleave(lengths.long())
    logits = model.logits(torch.cat(prompts), sequences, positions, cache, lengths, packed)[ends.long() - 1]
    found = [logits.argmax(-1)]
    while len(found) < count:
        logits = model.logits(found[-1], each, lengths.long(), cache, lengths + 1, {})
        lengths = lengths + 1
        found.append(logits.argmax(-1))
    return torch.stack(found, -1)


def compared(tokens: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """How many tokens differ, and of each prompt the first position that does, or None."""
    differ = tokens != expected
    firsts = [int(row.int().argmax()) if bool(row.any()) else None for row in differ]
    there = [place for place in firsts if place is not None]
    return {"differ": int(differ.sum()), "first": min(there, default=None), "first_of_each": firsts}


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each cache."""
    torch.manual_seed(options.seed)
    model = Model(options.device)
    prompts = [torch.randint(VOCABULARY, (length,)).to(options.device) for length in PROMPTS]
    rows, expected = [], None
    for name, dtype in FORMATS.items():
        begun = time.monotonic()
        cache = Cache(dtype, len(prompts), max(PROMPTS) + options.tokens, options.device)
        tokens = generated(model, cache, prompts, options.tokens)
        expected = tokens if expected is None else expected
        plan = portattn.last_plan()
        rows.append(
            {
                "cache": name, "bytes_per_token": cache.bytes_per_token, "tokens": tokens.numel(),
                **compared(tokens, expected), "path": plan.path if plan else "", "seconds": time.monotonic() - begun,
            }
        )  # fmt: skip
        print(f"{name}: {rows[-1]['seconds']:.1f} s", file=sys.stderr)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=64, help="for each prompt [64]")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts [0]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    options = parser.parse_args()
    if not 1 <= options.tokens <= 4096:
        parser.error(f"--tokens is {options.tokens}, but must be in 1..4096")
    try:
        rows = measured(options)
    except KeyboardInterrupt:
        return 130
    if options.json:
        print(json.dumps({"prompts": PROMPTS, "seed": options.seed, "caches": rows}))
        return 0
    print("cache  bytes/token  tokens that differ  first of each prompt that differs  path")
    for row in rows:
        firsts = " ".join("-" if place is None else str(place) for place in row["first_of_each"])
        differ = f"{row['differ']} of {row['tokens']}"
        print(f"{row['cache']:<5}  {row['bytes_per_token']:>11}  {differ:>18}  {firsts:<34}  {row['path']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
