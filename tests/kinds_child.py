"""Run by test_kinds.py, with fakedriver's library: calls of one kind and many sizes, on CPU tensors that count as an
H100's.

Each call is made twice: by what was kept of calls with other sizes, and in a process that has forgotten everything.
Prints as JSON whether the launches are the same, and how many classes of sizes there were.

    kinds_child.py [seed] [names of cases]"""

# ruff: noqa: E402 - the driver comes before Triton

import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fakedriver
import torch

fake = fakedriver.install()
import triton
from fakechip import Chip, leave_bodies_out

import portattn
from portattn.launch import cache, triton_compat

chip = Chip(fake)
BF16, FP16 = torch.bfloat16, torch.float16


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention(b: int, sq: int, sk: int, d: int = 64, layout: str = "bhsd", sliced: bool = False, **more: Any) -> Any:
    def tensor(heads: int, seq: int) -> torch.Tensor:
        shape = (b, heads, seq, d) if layout == "bhsd" else (b, seq, heads, d)
        room = (b, heads, seq + 40, d) if layout == "bhsd" else (b, seq + 40, heads, d)
        if not sliced:
            return torch.zeros(shape, dtype=BF16)
        whole = torch.zeros(room, dtype=BF16)
        return whole[:, :, :seq] if layout == "bhsd" else whole[:, :seq]

    given = {"q": tensor(4, sq), "k": tensor(2, sk), "v": tensor(2, sk), "layout": layout, "return_lse": True}
    return "attention", given | {n: v(b, sq, sk) if callable(v) else v for n, v in more.items()}


def varlen(rows: int, keys: int, count: int, most: int, d: int = 64, **more: Any) -> Any:
    q, k = torch.zeros(rows, 4, d, dtype=BF16), torch.zeros(keys, 2, d, dtype=BF16)
    cu = torch.zeros(count + 1, dtype=torch.int32)
    given = {"q": q, "k": k, "v": k.clone(), "cu_seqlens_q": cu, "cu_seqlens_k": cu.clone(), "max_seqlen_q": most}
    return "varlen_attention", given | {"max_seqlen_k": most + 3, "causal": True} | more


def decode(b: int, sk: int, sq: int = 1, d: int = 64, **more: Any) -> Any:
    k = torch.zeros(b, 2, sk, d, dtype=FP16)
    given = {"q": torch.zeros(b, 8, sq, d, dtype=FP16), "k_cache": k, "v_cache": k.clone()}
    return "decode_attention", given | {"seqlens_k": torch.zeros(b, dtype=torch.int32)} | more


def paged(b: int, pages: int, total: int, page: int = 16, d: int = 64, rows: int = 0, **more: Any) -> Any:
    k = torch.zeros(total, page, 2, d, dtype=FP16)
    given = {"k_pages": k, "v_pages": k.clone(), "page_table": torch.zeros(b, pages, dtype=torch.int32)}
    given |= {"seqlens_k": torch.zeros(b, dtype=torch.int32)}
    if rows:
        cu = torch.zeros(b + 1, dtype=torch.int32)
        return "paged_attention", given | {"q": torch.zeros(rows, 8, d, dtype=FP16), "cu_seqlens_q": cu} | more
    return "paged_attention", given | {"q": torch.zeros(b, 8, 1, d, dtype=FP16)} | more


def sparse(b: int, sk: int, places: int, d: int = 64) -> Any:
    k = torch.zeros(b, 2, sk, d, dtype=FP16)
    given = {"q": torch.zeros(b, 8, 1, d, dtype=FP16), "k_cache": k, "v_cache": k.clone(), "validate": False}
    indices = torch.zeros(b, 8, places, dtype=torch.int32)
    return "sparse_attention", given | {"indices": indices, "counts": torch.zeros(b, 8, dtype=torch.int32)}


def mla(b: int, pages: int, total: int, sq: int = 1, page: int = 64) -> Any:
    given = {"q_nope": torch.zeros(b, 16, sq, 512, dtype=BF16), "q_rope": torch.zeros(b, 16, sq, 64, dtype=BF16)}
    given |= {"kv_pages": torch.zeros(total, page, 576, dtype=BF16), "scale": 0.1, "causal": True}
    table = torch.zeros(b, pages, dtype=torch.int32)
    return "mla_attention", given | {"page_table": table, "seqlens_k": torch.zeros(b, dtype=torch.int32)}


def grown(make: Callable[..., Any], *sizes: tuple[Any, ...], **more: Any) -> Iterator[Any]:
    for one in sizes:
        yield make(*one, **more)


def bias(b: int, sq: int, sk: int) -> torch.Tensor:
    return torch.zeros(1, 1, sq, sk, dtype=BF16)


lengths = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 500, 1000, 1023)
rng = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)


def squares(count: int) -> list[tuple[int, int, int]]:
    return [(rng.choice((1, 2, 3, 8)), rng.choice(lengths), rng.choice(lengths)) for _ in range(count)]


def cases() -> dict[str, Iterator[Any]]:
    found = {
        "growing cache": grown(decode, *[(4, n) for n in range(900, 960)]),
        "decode": grown(decode, *[(b, n) for b, _, n in squares(40)], *[(1, 2**n) for n in range(9, 17)]),
        "decode, odd width": grown(decode, *[(b, n) for b, _, n in squares(10)], d=72),
        "decode, several queries": grown(decode, *[(2, n, q) for _, q, n in squares(12) if q < 20], causal=True),
        "attention": grown(attention, *squares(40), backend="triton"),
        "attention bshd, causal": grown(attention, *squares(16), layout="bshd", causal=True, backend="triton"),
        "attention, slices": grown(attention, *squares(12), sliced=True, window=(100, 0), backend="triton"),
        "attention, bias": grown(attention, *squares(10), bias=bias, backend="triton"),
        "varlen": grown(varlen, *[(q * b, k * b, b, q) for b, q, k in squares(16)], backend="triton"),
        "paged": grown(paged, *[(b, n, 7 + q) for b, q, n in squares(24)]),
        "paged, packed": grown(
            paged, *[(b, n, 9, 16, 64, q) for b, q, n in squares(12)], causal=True, backend="triton"
        ),
        "sparse": grown(sparse, *[(b, n + 8, q) for b, q, n in squares(16)]),
    }
    if triton_compat.version() >= (3, 6):
        found |= {
            "attention gluon": grown(attention, *squares(30), d=128),
            "attention gluon, causal": grown(attention, *squares(20), d=128, causal=True),
            "varlen gluon": grown(varlen, *[(q * b, k * b, b, q) for b, q, k in squares(16)], d=128),
            "paged gluon": grown(
                paged,
                *[(b, n % 40 + 1, 90, 64, 128, b * (q + 300)) for b, q, n in squares(16)],
                backend="gluon_forward",
            ),
            "mla gluon": grown(mla, *[(b, n % 64 + 1, 70) for b, _, n in squares(16)]),
        }
    return found


def same_as_alone(op: str, arguments: dict[str, Any]) -> tuple[bool, str]:
    """Whether a call launches what it launches where nothing else was cached, and how it was found."""
    count = len(chip.compiled_calls)
    shared = chip.once(op, arguments)
    way = "planned" if len(chip.compiled_calls) > count else "kept"
    if way == "planned":  # its first call brings its own memory
        shared = chip.once(op, arguments)
    plan = portattn.last_plan()
    table, order = dict(cache._kinds), dict(cache._order)
    cache.forget()
    chip.once(op, arguments)
    alone = chip.once(op, arguments)
    own = portattn.last_plan()
    cache.forget()
    cache._kinds.update(table)
    cache._order.update(order)
    if plan != own:
        return False, f"{way}: last_plan is of {plan.problem} {plan.launch}, not {own.problem} {own.launch}"
    if shared != alone:
        return False, f"{way}: {_first_difference(shared, alone)}"
    return True, way


def _first_difference(one: Any, other: Any) -> str:
    if type(one) is type(other) and isinstance(one, (list, tuple)) and len(one) == len(other):
        place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        return f"[{place}]{_first_difference(one[place], other[place])}"
    if isinstance(one, str) and isinstance(other, str) and len(one) == len(other):
        place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b) // 8 * 8
        return f" byte {place // 2}: {one[place : place + 16]} instead of {other[place : place + 16]}"
    return f": {one} instead of {other}"


matched: list[str] = []
missed: list[str] = []  # calls that native.c left to Python
match = cache.CallKey.match
cache.CallKey.match = lambda self, *given: matched.append(self.op) or match(self, *given)  # type: ignore


def by_python(op: str, arguments: dict[str, Any]) -> bool:
    matched.clear()
    by_c = chip.once(op, arguments)
    missed.extend(matched)
    kinds = [kind for kind in cache.every_kind() if kind.op == op]
    hits = [kind.hit for kind in kinds]
    for kind in kinds:
        kind.hit = None
    slow = chip.once(op, arguments)
    for kind, hit in zip(kinds, hits, strict=True):
        kind.hit = hit
    return by_c == slow


found: dict[str, Any] = {"triton": triton.__version__}
wanted = sys.argv[2:]
leave_bodies_out()
with portattn.settings(isolate="never", canary="never", validate="never"):
    every = cases()
    for name in wanted or every:
        calls = every[name]
        cache.forget()
        wrong, planned, count, others = [], 0, 0, 0
        missed.clear()
        for op, arguments in calls:
            same, why = same_as_alone(op, arguments)
            count += 1
            planned += why == "planned"
            if not same:
                shapes = {n: list(t.shape) for n, t in arguments.items() if isinstance(t, torch.Tensor)}
                wrong.append(f"{shapes}: {why}"[:3000])
            elif not by_python(op, arguments):
                others += 1
        kinds = cache.every_kind()
        found[name] = {
            "calls": count, "planned": planned, "wrong": wrong[:3], "wrong calls": len(wrong), "by python": others,
            "missed": len(missed), "kinds": len(kinds), "classes": [len(kind.classes) for kind in kinds],
            "fixed": sorted({cached.why_fixed for kind in kinds for cached in kind.classes}),
            "hit": all(kind.hit is not None for kind in kinds),
            "paths": sorted({cached.plan.path for kind in kinds for cached in kind.classes}),
            "steps": max(len(cached.program.code) for kind in kinds for cached in kind.classes),
        }  # fmt: skip
print(json.dumps(found))
