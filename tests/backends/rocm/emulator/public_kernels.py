"""Public attention kernels for AMD chips, run in the model by their owners' own launchers. A program by itself:

    python public_kernels.py FOLDER OWNER ARCH [NAME]

prints one JSON line a case: name, error (of the largest value) or reason. FOLDER has `vllm`, `fla` or `aiter` as a
wheel has it; the packages' own __init__ modules, which want a GPU, are not run."""

from __future__ import annotations

import enum
import functools
import importlib
import json
import math
import os
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import portattn.backends.rocm.emulator

STEPS = 200_000_000
Case = Callable[[], "list[tuple[Any, Any]]"]  # what was computed, and what is right


def packages(folder: Path, *names: str) -> None:
    """Let modules of these packages be imported without the packages' own __init__."""
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder.joinpath(*name.split(".")))]


def stand_in(name: str, **members: Any) -> None:
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(members)
    parent, _, own = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], own, module)


def float8(arch: str) -> torch.dtype:
    return torch.float8_e4m3fnuz if arch in ("gfx90a", "gfx942") else torch.float8_e4m3fn


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = True, window: int = 0, softcap: float = 0.0, sinks: Any = None,
    slopes: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Return out (S, H, D) and LSE (S, H) in float64 of one sequence; causal is aligned at the bottom right."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    scores = scores if slopes is None else scores - slopes.double()[:, None, None] * distance
    hidden = ((distance < 0) & causal) | ((distance >= window) & (window > 0))
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, q.shape[1], 1)], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1), torch.logsumexp(scores, -1).transpose(0, 1)


def gradients(tensors: Any, grad: Any) -> list[Any]:
    wide = [x.detach().double().requires_grad_() for x in tensors]
    attention(*(x[0] for x in wide))[0].backward(grad[0].double())
    return [x.grad[0] for x in wide]  # type: ignore[index]


def over_pages(q: Any, k: Any, v: Any, table: Any, sizes: Any, **features: Any) -> Any:
    """Attention of one query a sequence over pages (pages, tokens, heads, width)."""
    keys = [[x[ids.long()].flatten(0, 1)[:size] for x in (k, v)] for ids, size in zip(table, sizes, strict=True)]
    return [torch.cat(x) for x in zip(*(attention(q[n][None], *kv) for n, kv in enumerate(keys)), strict=True)]


def unified(
    launch: Callable[..., Any], dtype: torch.dtype = torch.bfloat16, dim: int = 64, *,
    stored: torch.dtype | None = None, decode: bool = False, columns: int = 4, sinks: bool = False, window: int = 0,
    softcap: float = 0.0, slopes: bool = False, **more: Any,
) -> list[tuple[Any, Any]]:  # fmt: skip
    """Run the interface that vLLM's and aiter's unified_attention share, over pages of 16 tokens, 3 for the longest."""
    rows, lengths = ([1, 1, 1] if decode else [5, 1, 16]), [37, 20, 16]
    starts, one = torch.tensor([0, *rows]).cumsum(0).int(), torch.ones(1)
    q, table = torch.randn(sum(rows), 4, dim).to(dtype), torch.randperm(12)[: 3 * columns].reshape(3, columns)
    k, v = (torch.randn(12, 16, 2, dim).to(stored or dtype) for _ in range(2))
    sink, slope = torch.randn(4) if sinks else None, torch.tensor([0.5, 0.25, 0.125, 0.0625]) if slopes else None
    out, scale, right = torch.full_like(q, math.nan), one if stored else None, []
    for n, length in enumerate(lengths):
        keys, values = (x[table[n]].flatten(0, 1) for x in (k, v))
        own = q[starts[n] : starts[n + 1]], keys[:length].float(), values[:length].float()
        right.append(attention(*own, window=window, softcap=softcap, sinks=sink, slopes=slope)[0])
        if stored is None:  # NaN in places beyond a sequence's length
            for cache, tokens in ((k, keys), (v, values)):
                tokens[length:] = math.nan
                cache[table[n]] = tokens.unflatten(0, (-1, 16))
    launch(
        q, k, v, out, starts, max(rows), torch.tensor(lengths).int(), max(lengths), dim**-0.5, True,
        (window - 1, -1) if window else (-1, -1), table.int(), softcap, None, scale, scale, alibi_slopes=slope,
        sinks=sink, **more,
    )  # fmt: skip
    return [(out, torch.cat(right))]


def ragged(launch: Callable[..., Any], dim: int = 64, causal: bool = True) -> list[tuple[Any, Any]]:
    """Run the interface that vLLM's and aiter's context_attention_fwd share: packed rows, no cache."""
    q, k, v = torch.randn(70, 4, dim).half(), torch.randn(70, 2, dim).half(), torch.randn(70, 2, dim).half()
    out, begin, size = torch.full_like(q, math.nan), torch.tensor([0, 30]).int(), torch.tensor([30, 40]).int()
    launch(q, k, v, out, begin, size, 40, is_causal=causal)
    parts = (slice(0, 30), slice(30, 70))
    return [(out, torch.cat([attention(q[n], k[n], v[n], causal=causal)[0] for n in parts]))]


def vllm(folder: Path, arch: str) -> dict[str, Case]:
    packages(folder, "vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops", "vllm.utils")
    stand_in("vllm.envs", VLLM_BATCH_INVARIANT=False)
    stand_in("vllm.logger", init_logger=lambda name: types.SimpleNamespace(debug_once=print))
    stand_in("vllm.triton_utils", tl=tl, triton=triton)
    platform = types.SimpleNamespace(
        fp8_dtype=lambda: float8(arch), is_rocm=lambda: True, is_cuda_alike=lambda: True,
        has_device_capability=lambda number: True, is_device_capability_family=lambda number: False,
    )  # fmt: skip
    stand_in("vllm.platforms", current_platform=platform)
    stand_in("vllm.platforms.rocm", on_gfx1x=lambda: arch in ("gfx1100", "gfx1201"))
    modes = "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD"
    mode = enum.IntEnum("KVQuantMode", modes, start=0)
    stand_in("vllm.v1.kv_cache_interface", KVQuantMode=mode)
    stand_in("vllm.utils.math_utils", RCP_LN2=1 / math.log(2))
    module = lambda name: importlib.import_module(f"vllm.v1.attention.ops.triton_{name}")  # noqa: E731
    both = functools.partial(unified, module("unified_attention").unified_attention)
    prefill = functools.partial(ragged, module("prefill_attention").context_attention_fwd)

    def split(sinks: bool = False) -> Any:  # "3D": segments of the keys, and their sum
        shapes = {"output": (3, 4, 4, 64), "max": (3, 4, 4), "expsum": (3, 4, 4)}
        memory = {f"softmax_segm_{name}": torch.full(shape, math.nan) for name, shape in shapes.items()}
        return both(decode=True, sinks=sinks, seq_threshold_3D=64, num_par_softmax_segments=4, **memory)

    def per_token() -> Any:
        scales = {f"{name}_scale_cache": torch.ones(12, 16, 2) for name in "kv"}
        return both(stored=torch.int8, kv_quant_mode=mode["INT8_PER_TOKEN_HEAD"], **scales)

    def latent() -> Any:
        q, rows = torch.randn(2, 16, 576).bfloat16(), torch.randn(64, 1, 1, 576).bfloat16()
        table, size = torch.randperm(64).reshape(2, 32).int(), torch.tensor([32, 19]).int()
        out, lse = torch.full((2, 16, 512), math.nan).bfloat16(), torch.full((2, 16), math.nan)
        splits = torch.full((2, 16, 2, 513), math.nan)
        launch = module("decode_attention").decode_attention_fwd
        launch(q, rows, rows[..., :512], out, lse, table, size, splits, 2, 576**-0.5, 1, is_mla=True)
        return list(zip((out, lse), over_pages(q, rows, rows[..., :512], table, size), strict=True))

    return {
        "2d": both, "2d fp16 sinks window": lambda: both(torch.float16, sinks=True, window=8),
        "2d softcap": lambda: both(softcap=5.0), "2d slopes": lambda: both(slopes=True),
        "2d fp8 cache": lambda: both(stored=float8(arch), kv_quant_mode=mode["FP8_PER_TENSOR"]),
        "2d int8 cache": per_token, "2d width 80": lambda: both(dim=80), "2d fp32": lambda: both(torch.float32),
        "3d": split, "3d sinks": lambda: split(sinks=True), "prefill": prefill,
        "prefill width 80": lambda: prefill(80, False), "latent decode": latent,
    }  # fmt: skip


def fla(folder: Path, arch: str) -> dict[str, Case]:
    packages(folder, "fla", "fla.ops", "fla.ops.attn", "fla.ops.utils")
    stand_in("einops", reduce=lambda x, pattern, g, reduction: x.unflatten(2, (-1, g)).sum(3))
    same = dict.fromkeys(("autocast_custom_fwd", "autocast_custom_bwd", "contiguous"), lambda function: function)
    constants = {"IS_GATHER_SUPPORTED": False, "IS_NVIDIA_BLACKWELL": False}
    stand_in("fla.utils", check_shared_mem=lambda *place: False, **same, **constants)
    stand_in("fla.backends", dispatch=lambda name: lambda function: function)
    sys.modules["fla.ops.utils"].prepare_chunk_indices = None  # type: ignore[attr-defined] # of packed rows
    stand_in("fla.ops.utils.cumsum", chunk_global_cumsum=None)
    parallel = importlib.import_module("fla.ops.attn.parallel")

    def forward(window: int = 0, sinks: bool = False, dtype: torch.dtype = torch.bfloat16, train: bool = False) -> Any:
        q, k, v = (torch.randn(1, 70, heads, 64).to(dtype) for heads in (4, 2, 2))
        sink = torch.randn(4) if sinks else None
        base_two = None if sink is None else sink / math.log(2)
        out, lse = parallel.parallel_attn_fwd(q, k, v, None, base_two, 0.125, window_size=window or None)
        if not train:
            right = attention(q[0], k[0], v[0], window=window, sinks=sink)
            return list(zip((out[0], lse[0] * math.log(2)), right, strict=True))
        grad = torch.randn_like(out)
        found = parallel.parallel_attn_bwd(q, k, v, out, None, lse, grad, scale=0.125)
        return list(zip((x[0] for x in found[:3]), gradients((q, k, v), grad), strict=True))

    return {
        "forward": forward, "forward window": lambda: forward(window=9), "forward sinks": lambda: forward(sinks=True),
        "forward fp32": lambda: forward(dtype=torch.float32), "gradients": lambda: forward(train=True),
    }  # fmt: skip


def aiter(folder: Path, arch: str) -> dict[str, Case]:
    packages(folder, "aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.attention", "aiter.jit")
    stand_in("aiter.jit.utils")
    stand_in("aiter.jit.utils.chip_info", get_cu_num=lambda: 4, get_gfx=lambda: arch)
    autotune = triton.autotune
    # flash_attn_triton_amd/bwd.py of 0.1.20.post1 has a key that is no argument, which Triton 3.9 refuses at import.
    triton.autotune = lambda configs, key, **more: (
        lambda kernel: autotune(configs, [name for name in key if name in kernel.arg_names], **more)(kernel)
    )
    torch.cuda.current_device = lambda: 0  # asked for the number of compute units
    torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(multi_processor_count=304)  # type: ignore
    module = lambda name: importlib.import_module(f"aiter.ops.triton.attention.{name}")  # noqa: E731
    both = functools.partial(unified, module("unified_attention").unified_attention)
    prefill = functools.partial(ragged, module("prefill_attention").context_attention_fwd)

    def dense(dtype: torch.dtype, causal: bool = True, dim: int = 64, sinks: bool = False, train: bool = False) -> Any:
        shapes = ((1, 70, 4, dim), (1, 90, 2, dim), (1, 90, 2, dim))
        q, k, v = (torch.randn(shape).to(dtype).requires_grad_(train) for shape in shapes)
        sink = torch.randn(4) if sinks else None
        found = module("mha").flash_attn_func(q, k, v, causal=causal, return_lse=not train, sink=sink)
        if not train:
            right = attention(q[0], k[0], v[0], causal=causal, sinks=sink)
            return list(zip((found[0][0], found[1][0].T), right, strict=True))
        out = found[0] if isinstance(found, tuple) else found
        grad = torch.randn_like(out)
        out.backward(grad)
        return list(zip((x.grad[0] for x in (q, k, v)), gradients((q, k, v), grad), strict=True))  # type: ignore[index]

    def decode(group: int) -> Any:
        q, size = torch.randn(2, 2 * group, 128).bfloat16(), torch.tensor([50, 17]).int()
        k, v = (torch.randn(8, 2, 16, 128).bfloat16() for _ in range(2))
        table, out, one = torch.randperm(8).reshape(2, 4).int(), torch.full_like(q, math.nan), torch.ones(1)
        module("pa_decode").paged_attention_decode(
            out, q, k, v, size, table, 128**-0.5, 64, tl.bfloat16, one, one, num_seq_partitions=0, alibi_slopes=None
        )
        return [(out, over_pages(q, k.transpose(1, 2), v.transpose(1, 2), table, size)[0])]

    return {
        "2d": both, "2d fp16 sinks window": lambda: both(torch.float16, sinks=True, window=8),
        "2d softcap": lambda: both(softcap=5.0), "2d fp8 cache": lambda: both(stored=float8(arch)),
        "2d width 80": lambda: both(dim=80), "2d decode": lambda: both(decode=True),
        "2d table as long as the sequence": lambda: both(columns=3), "mha": lambda: dense(torch.bfloat16),
        "mha width 128": lambda: dense(torch.float16, False, 128),
        "mha sinks": lambda: dense(torch.bfloat16, sinks=True), "mha fp32": lambda: dense(torch.float32),
        "mha gradients": lambda: dense(torch.bfloat16, train=True), "paged decode": lambda: decode(4),
        "paged decode of one head": lambda: decode(1), "prefill": prefill,
        "prefill width 80": lambda: prefill(80, False),
    }  # fmt: skip


def run(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    try:
        pairs = [(a.detach().double(), b.detach()) for a, b in case()]
    except Exception as error:  # noqa: BLE001 - each is a line of the table
        return {"reason": textwrap.shorten(f"{type(error).__name__}: {error}", 2000)}
    errors = [((a - b).abs().max() / b[b.isfinite()].abs().max()).item() for a, b in pairs]
    return {"error": max(errors) if all(map(math.isfinite, errors)) else None}


def main(folder: Path, owner: str, arch: str, wanted: str = "") -> None:
    torch.use_deterministic_algorithms(True)  # torch.empty then holds NaN
    with portattn.backends.rocm.emulator.amdgpu(arch, step_limit=STEPS):
        for name, case in {"vllm": vllm, "fla": fla, "aiter": aiter}[owner](folder, arch).items():
            if wanted not in name:
                continue
            with tempfile.TemporaryFile() as said:  # a compiler that aborts ends its own process only
                child = os.fork()
                if not child:
                    os.dup2(said.fileno(), 2)
                    print(json.dumps({"name": name, **run(case)}), flush=True)
                    os._exit(0)
                if os.waitpid(child, 0)[1]:
                    said.seek(0)
                    print(json.dumps({"name": name, "reason": said.read().decode()[:400]}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
