"""Run by test_hot_path.py, with fakedriver's library: calls that fill a cache, on CPU tensors that count as an
H100's. Prints as JSON what a repeated call launches, by native.c and by Python, with other numbers of tokens, prepared.
"""

# ruff: noqa: E402 - the driver comes before Triton

import json
from typing import Any

import fakedriver
import torch

fake = fakedriver.install()
from fakechip import Chip

import portattn
from portattn.launch import cache

chip = Chip(fake)
OPTIONS: dict[str, Any] = {"backend": "triton", "validate": False}  # CPU tensors would be read back


def arguments(op: str, tokens: int) -> dict[str, Any]:
    """A step of `tokens` tokens, or sequences with one new row each."""
    dtype, heads, width = torch.float8_e4m3fn, 8, 128
    cos, sin = torch.zeros(4096, 64), torch.zeros(4096, 64)
    if op == "append_kv":
        new = {name: torch.zeros(tokens, heads, 1, width, dtype=torch.bfloat16) for name in "kv"}
        caches = {name: torch.zeros(tokens, heads, 64, width, dtype=dtype) for name in ("k_cache", "v_cache")}
        scales = {name: torch.ones(heads) for name in ("k_scale", "v_scale")}
        return new | caches | scales | {"seqlens_k": torch.zeros(tokens, dtype=torch.int32), "cos": cos, "sin": sin}
    new = {name: torch.zeros(tokens, heads, width, dtype=torch.bfloat16) for name in "kv"}
    pages = {name: torch.zeros(16, 16, heads, width, dtype=dtype) for name in ("k_pages", "v_pages")}
    scales = {name: torch.zeros(16, 16, heads) for name in ("k_scale", "v_scale")}
    whole = {name: torch.zeros(tokens, dtype=torch.int64) for name in ("slot_mapping", "positions")}
    return new | pages | scales | whole | {"cos": cos, "sin": sin}


def launched(call: Any) -> tuple[list[Any], int]:
    fake.library.fake_clear()
    chip.allocated.clear()
    call()
    seen = [[*one[:5], bytes(one.parameters).hex()] for one in fake.launches()]
    return seen, sum(t.untyped_storage().nbytes() for t in chip.allocated)


def compare(op: str) -> dict[str, Any]:
    given, function = arguments(op, 64), getattr(portattn, op)
    cache.forget()
    with portattn.settings(isolate="never", canary="never"):
        first, _ = launched(lambda: function(**given, **OPTIONS))
        planned = len(chip.compiled_calls)
        kind = [kind for kind in cache.every_kind() if kind.op == op][-1]
        by_c, allocated = launched(lambda: function(**given, **OPTIONS))
        hit, kind.hit = kind.hit, None
        by_python, _ = launched(lambda: function(**given, **OPTIONS))
        kind.hit = hit
        other = arguments(op, 56)  # tiles of as many rows
        launched(lambda: function(**other, **OPTIONS))
        handle = portattn.prepare(op, **given, **OPTIONS)
        prepared, memory = launched(lambda: handle.run(**given, **OPTIONS))
        return {
            "path": kind.classes[0].plan.path, "why fixed": kind.classes[0].why_fixed, "hit": hit is not None,
            "way": kind.classes[0].direct.way, "launches": len(first), "same": first == by_c == by_python == prepared,
            "allocated": allocated + memory, "planned": len(chip.compiled_calls) - planned,
            "addresses": [name for name, t in given.items() if t.data_ptr().to_bytes(8, "little").hex() in by_c[0][-1]],
        }  # fmt: skip


print(json.dumps({op: compare(op) for op in ("append_kv", "write_pages")}))
