"""Public attention kernels for AMD chips, run in the model by their owners' own launchers. A program by itself:

    python public_kernels.py FOLDER OWNER ARCH [NAME]

prints one JSON line a case: name, error (of the largest value) or reason. FOLDER has `vllm`, `fla` or `aiter` as a
wheel has it; the packages' own __init__ modules, which want a GPU, are not run."""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.machinery
import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import portattn.backends.rocm.emulator

STEPS = 200_000_000
FNUZ = ("gfx90a", "gfx942")  # their float8 format, or the format that the owners name there
RDNA = ("gfx1100", "gfx1201")


def packages(folder: Path, *names: str) -> None:
    """Let modules of these packages be imported without the packages' own __init__."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = module


def stand_in(name: str, **members: Any) -> None:
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(members)
    parent, _, own = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], own, module)


def float8(arch: str) -> torch.dtype:
    return torch.float8_e4m3fnuz if arch in FNUZ else torch.float8_e4m3fn


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, window: int = 0,
    softcap: float = 0.0, sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out (S, H, D) and LSE (S, H) in float64 of one sequence; causal from the last row, as the owners have it.

    A row that attends nothing is 0, as theirs."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance  # plus a term of each row, which softmax drops
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window:
        hidden = hidden | (distance >= window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, q.shape[1], 1)], -1)
    weights = torch.softmax(scores, -1).nan_to_num()[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1), torch.logsumexp(scores, -1).transpose(0, 1)


Case = Callable[[], "list[tuple[torch.Tensor, torch.Tensor]]"]  # what was computed, and what is right


class Cache:
    """Three sequences with rows of queries and a paged cache (pages, tokens, heads, width), shuffled.

    The table has `columns` pages a sequence, as the longest has 3."""

    def __init__(
        self, dtype: torch.dtype, dim: int, stored: torch.dtype | None = None, decode: bool = False, columns: int = 4
    ) -> None:
        self.rows, self.lengths, self.page = ([1, 1, 1] if decode else [5, 1, 16]), [37, 20, 16], 16
        self.ends = [sum(self.rows[:n]) for n in range(4)]
        self.q = torch.randn(self.ends[-1], 4, dim).to(dtype)
        self.k, self.v = (torch.randn(12, self.page, 2, dim).to(stored or dtype) for _ in range(2))
        self.table = torch.randperm(12)[: 3 * columns].reshape(3, columns).int()
        for cache in (self.k, self.v) if stored is None else ():  # NaN in places beyond a sequence's length
            for pages, length in zip(self.table.long(), self.lengths, strict=True):
                rows = cache[pages].flatten(0, 1)
                rows[length:] = math.nan
                cache[pages] = rows.unflatten(0, (-1, self.page))

    @property
    def starts(self) -> torch.Tensor:
        return torch.tensor(self.ends, dtype=torch.int32)

    @property
    def used(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32)

    def right(self, sinks: torch.Tensor | None = None, **features: Any) -> torch.Tensor:
        found = []
        for n, length in enumerate(self.lengths):
            k, v = (x.float()[self.table[n].long()].flatten(0, 1)[:length] for x in (self.k, self.v))
            found.append(attention(self.q[self.ends[n] : self.ends[n + 1]], k, v, sinks=sinks, **features)[0])
        return torch.cat(found)


def unified(
    launch: Callable[..., Any], dtype: torch.dtype = torch.bfloat16, dim: int = 64, *,
    stored: torch.dtype | None = None, decode: bool = False, columns: int = 4, sinks: bool = False, window: int = 0,
    softcap: float = 0.0, slopes: bool = False, **more: Any,
) -> list[tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """The interface that vLLM's and aiter's unified_attention share."""
    cache, one = Cache(dtype, dim, stored, decode, columns), torch.ones(1)
    sink, slope = torch.randn(4) if sinks else None, torch.tensor([0.5, 0.25, 0.125, 0.0625]) if slopes else None
    out, scale = torch.full_like(cache.q, math.nan), one if stored else None
    launch(
        cache.q, cache.k, cache.v, out, cache.starts, max(cache.rows), cache.used, max(cache.lengths), dim**-0.5, True,
        (window - 1, -1) if window else (-1, -1), cache.table, softcap, None, scale, scale, alibi_slopes=slope,
        sinks=sink, **more,
    )  # fmt: skip
    return [(out, cache.right(sink, window=window, softcap=softcap, slopes=slope))]


def ragged(launch: Callable[..., Any], **features: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The interface that vLLM's and aiter's context_attention_fwd share: packed rows, no cache."""
    dim = features.pop("dim", 64)
    q, k, v = torch.randn(70, 4, dim).half(), torch.randn(70, 2, dim).half(), torch.randn(70, 2, dim).half()
    out, begin, size = torch.full_like(q, math.nan), torch.tensor([0, 30]).int(), torch.tensor([30, 40]).int()
    launch(q, k, v, out, begin, size, 40, **features)
    parts = [slice(0, 30), slice(30, 70)]
    return [(out, torch.cat([attention(q[n], k[n], v[n], causal=features.get("is_causal", True))[0] for n in parts]))]


def vllm(folder: Path, arch: str) -> dict[str, Case]:
    packages(folder, "vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops", "vllm.utils")
    stand_in("vllm.envs", VLLM_BATCH_INVARIANT=False)
    stand_in("vllm.logger", init_logger=lambda name: types.SimpleNamespace(debug_once=print))
    stand_in("vllm.triton_utils", tl=tl, triton=triton)
    stand_in(
        "vllm.platforms",
        current_platform=types.SimpleNamespace(
            fp8_dtype=lambda: float8(arch),
            is_rocm=lambda: True,
            is_cuda_alike=lambda: True,
            has_device_capability=lambda number: True,
            is_device_capability_family=lambda number: False,
        ),
    )
    stand_in("vllm.platforms.rocm", on_gfx1x=lambda: arch in RDNA)
    modes = "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD"
    mode = enum.IntEnum("KVQuantMode", modes, start=0)
    stand_in("vllm.v1.kv_cache_interface", KVQuantMode=mode)
    stand_in("vllm.utils.math_utils", RCP_LN2=1 / math.log(2))

    def module(name: str) -> Any:
        return importlib.import_module(f"vllm.v1.attention.ops.{name}")

    both = functools.partial(unified, module("triton_unified_attention").unified_attention)

    def split(**features: Any) -> Any:  # "3D": segments of the keys, and their sum
        rows, parts = 3, 4
        memory = {
            "softmax_segm_output": torch.full((rows, 4, parts, 64), math.nan),
            "softmax_segm_max": torch.full((rows, 4, parts), math.nan),
            "softmax_segm_expsum": torch.full((rows, 4, parts), math.nan),
        }
        return both(decode=True, seq_threshold_3D=64, num_par_softmax_segments=parts, **memory, **features)

    def per_token() -> Any:
        scales = {f"{name}_scale_cache": torch.ones(12, 16, 2) for name in "kv"}
        return both(stored=torch.int8, kv_quant_mode=mode["INT8_PER_TOKEN_HEAD"], **scales)

    def latent() -> Any:
        q, rows = torch.randn(2, 16, 576).bfloat16(), torch.randn(64, 1, 1, 576).bfloat16()
        table, size, parts = torch.randperm(64).reshape(2, 32).int(), torch.tensor([32, 19]).int(), 2
        out, lse = torch.full((2, 16, 512), math.nan).bfloat16(), torch.full((2, 16), math.nan)
        module("triton_decode_attention").decode_attention_fwd(
            q, rows, rows[..., :512], out, lse, table, size, torch.full((2, 16, parts, 513), math.nan), parts,
            576**-0.5, 1, is_mla=True,
        )  # fmt: skip
        found = []
        for n in range(2):
            keys = rows[table[n, : size[n]].long(), 0]
            found.append(attention(q[n][None], keys, keys[..., :512], causal=False))
        return [(out, torch.cat([x[0] for x in found])), (lse, torch.cat([x[1] for x in found]))]

    return {
        "2d": both,
        "2d fp16 sinks window": lambda: both(torch.float16, sinks=True, window=8),
        "2d softcap": lambda: both(softcap=5.0),
        "2d slopes": lambda: both(slopes=True),
        "2d fp8 cache": lambda: both(stored=float8(arch), kv_quant_mode=mode["FP8_PER_TENSOR"]),
        "2d int8 cache": per_token,
        "2d width 80": lambda: both(dim=80),
        "2d fp32": lambda: both(torch.float32),
        "3d": split,
        "3d sinks": lambda: split(sinks=True),
        "prefill": lambda: ragged(module("triton_prefill_attention").context_attention_fwd),
        "prefill width 80": lambda: ragged(
            module("triton_prefill_attention").context_attention_fwd, dim=80, is_causal=False
        ),
        "latent decode": latent,
    }


def fla(folder: Path, arch: str) -> dict[str, Case]:
    packages(folder, "fla", "fla.ops", "fla.ops.attn", "fla.ops.utils")
    stand_in("einops", reduce=lambda x, pattern, g, reduction: x.unflatten(2, (-1, g)).sum(3))
    stand_in(
        "fla.utils",
        IS_GATHER_SUPPORTED=False,
        IS_NVIDIA_BLACKWELL=False,
        autocast_custom_fwd=lambda function: function,
        autocast_custom_bwd=lambda function: function,
        contiguous=lambda function: function,
        check_shared_mem=lambda *place: False,
    )
    stand_in("fla.backends", dispatch=lambda name: lambda function: function)
    sys.modules["fla.ops.utils"].prepare_chunk_indices = None  # type: ignore[attr-defined] # of packed rows
    stand_in("fla.ops.utils.cumsum", chunk_global_cumsum=None)
    parallel = importlib.import_module("fla.ops.attn.parallel")

    def forward(window: int = 0, sinks: bool = False, dtype: torch.dtype = torch.bfloat16, train: bool = False) -> Any:
        q = torch.randn(1, 70, 4, 64).to(dtype).requires_grad_(train)
        k, v = (torch.randn(1, 70, 2, 64).to(dtype).requires_grad_(train) for _ in range(2))
        sink = torch.randn(4) if sinks else None
        with torch.no_grad():
            out, lse = parallel.parallel_attn_fwd(
                q, k, v, None, None if sink is None else sink / math.log(2), 0.125, window_size=window or None
            )
        right, right_lse = attention(q[0], k[0], v[0], window=window, sinks=sink)
        if not train:
            return [(out[0], right), (lse[0] * math.log(2), right_lse)]
        grad = torch.randn_like(out)
        with torch.no_grad():
            got = parallel.parallel_attn_bwd(q, k, v, out, None, lse, grad, scale=0.125)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        attention(*(x[0] for x in wide))[0].backward(grad[0].double())
        return [(mine[0], theirs.grad[0]) for mine, theirs in zip(got, wide, strict=False)]  # type: ignore[index]

    return {
        "forward": forward,
        "forward window": lambda: forward(window=9),
        "forward sinks": lambda: forward(sinks=True),
        "forward fp32": lambda: forward(dtype=torch.float32),
        "gradients": lambda: forward(train=True),
    }


def aiter(folder: Path, arch: str) -> dict[str, Case]:
    packages(folder, "aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.attention", "aiter.jit")
    stand_in("aiter.jit.utils")
    stand_in("aiter.jit.utils.chip_info", get_cu_num=lambda: 4, get_gfx=lambda: arch)
    torch.cuda.current_device = lambda: 0  # asked for the number of compute units
    torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(multi_processor_count=304)  # type: ignore[assignment]

    def module(name: str) -> Any:
        return importlib.import_module(f"aiter.ops.triton.attention.{name}")

    both = functools.partial(unified, module("unified_attention").unified_attention)

    def dense(dtype: torch.dtype, causal: bool = True, dim: int = 64, sinks: bool = False, train: bool = False) -> Any:
        q = torch.randn(1, 70, 4, dim).to(dtype).requires_grad_(train)
        k, v = (torch.randn(1, 90, 2, dim).to(dtype).requires_grad_(train) for _ in range(2))
        sink = torch.randn(4) if sinks else None
        found = module("mha").flash_attn_func(q, k, v, causal=causal, return_lse=not train, sink=sink)
        right, lse = attention(q[0], k[0], v[0], causal=causal, sinks=sink)
        if not train:
            return [(found[0][0], right), (found[1][0].T, lse)]
        out = found[0] if isinstance(found, tuple) else found
        grad = torch.randn_like(out)
        out.backward(grad)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        attention(*(x[0] for x in wide), causal=causal)[0].backward(grad[0].double())
        return [(mine.grad[0], theirs.grad[0]) for mine, theirs in zip((q, k, v), wide, strict=True)]

    def decode(group: int) -> Any:
        q, size = torch.randn(2, 2 * group, 128).bfloat16(), torch.tensor([50, 17]).int()
        k, v = (torch.randn(8, 2, 16, 128).bfloat16() for _ in range(2))
        table, out, one = torch.randperm(8).reshape(2, 4).int(), torch.full_like(q, math.nan), torch.ones(1)
        module("pa_decode").paged_attention_decode(
            out, q, k, v, size, table, 128**-0.5, 64, tl.bfloat16, one, one, num_seq_partitions=0, alibi_slopes=None
        )
        found = []
        for n in range(2):
            keys, values = (x[table[n].long()].transpose(1, 2).flatten(0, 1)[: size[n]] for x in (k, v))
            found.append(attention(q[n][None], keys, values, causal=False)[0])
        return [(out, torch.cat(found))]

    return {
        "2d": both,
        "2d fp16 sinks window": lambda: both(torch.float16, sinks=True, window=8),
        "2d softcap": lambda: both(softcap=5.0),
        "2d fp8 cache": lambda: both(stored=float8(arch)),
        "2d width 80": lambda: both(dim=80),
        "2d decode": lambda: both(decode=True),
        "2d table as long as the sequence": lambda: both(columns=3),
        "mha": lambda: dense(torch.bfloat16),
        "mha width 128": lambda: dense(torch.float16, False, 128),
        "mha sinks": lambda: dense(torch.bfloat16, sinks=True),
        "mha fp32": lambda: dense(torch.float32),
        "mha gradients": lambda: dense(torch.bfloat16, train=True),
        "paged decode": lambda: decode(4),
        "paged decode of one head": lambda: decode(1),
        "prefill": lambda: ragged(module("prefill_attention").context_attention_fwd),
        "prefill width 80": lambda: ragged(module("prefill_attention").context_attention_fwd, dim=80, is_causal=False),
    }


OWNERS = {"vllm": vllm, "fla": fla, "aiter": aiter}


def main(folder: Path, owner: str, arch: str, wanted: str = "") -> None:
    torch.use_deterministic_algorithms(True)  # torch.empty then holds NaN
    with portattn.backends.rocm.emulator.amdgpu(arch, step_limit=STEPS):
        for name, case in OWNERS[owner](folder, arch).items():
            if wanted not in name:
                continue
            torch.manual_seed(0)
            found: dict[str, Any] = {"name": name}
            try:
                pairs = case()
                errors = [((a.double() - b).abs().max() / b[b.isfinite()].abs().max()).item() for a, b in pairs]
                found["error"] = max(errors) if all(map(math.isfinite, errors)) else None
            except Exception as error:  # noqa: BLE001 - each is a line of the table
                found["reason"] = f"{type(error).__name__}: {error}"[:400]
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
