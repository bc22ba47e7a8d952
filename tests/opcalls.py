"""Shared by the tests of the public operations: random calls as their users make them, and memory that is watched."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import Device

import portattn
from portattn.api import call as call_module
from portattn.api import dispatch
from portattn.kernels.score_program import with_functions
from portattn.launch.symbolic_tensor import SymbolicTensor, TensorKind
from portattn.planning import core_path
from portattn.planning.kernel_specs import DecodeSplit
from portattn.planning.registry import Registry, parse_target
from portattn.schema.call import Call
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.ops import COMMON, FEATURES, ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import UNLIMITED
from portattn.schema.symbolic_int import Trace
from portattn.schema.tensors import BLOCK_SCALES, CACHE_DTYPE, spans
from portattn.testing import tolerance

SMALL = {"batch": 3, "heads_q": 4, "heads_k": 2, "head_dim": 16, "head_dim_v": 24, "dtype": "fp32", "return_lse": True}
PAGED = {"seq_k": 40, "page_size": 8, "seqlens_k": True}
LATENT = PAGED | {"op": "mla_attention", "heads_k": 1, "head_dim": 24, "head_dim_v": 16}
# Every op as it is called: three sequences, several small tiles of keys with a ragged end.
CALLS: dict[str, dict[str, Any]] = {
    "attention": {
        "op": "attention", "seq_q": 19, "seq_k": 37, "seqlens_q": True, "seqlens_k": True, "leftpad_q": True,
        "leftpad_k": True,
    },
    "varlen": {"op": "varlen_attention", "seq_q": 19, "seq_k": 37, "total_q": 33, "total_k": 70},
    "decode": {"op": "decode_attention", "seq_q": 3, "seq_k": 37, "seqlens_k": True, "leftpad_k": True},
    "paged": PAGED | {"op": "paged_attention", "seq_q": 3},
    "ragged": PAGED | {"op": "paged_attention", "seq_q": 19, "total_q": 33},
    "sparse": {"op": "sparse_attention", "seq_q": 1, "seq_k": 37, "tokens": 20, "seqlens_k": True},
    "sparse paged": PAGED | {"op": "sparse_attention", "seq_q": 1, "tokens": 20}, "mla": LATENT | {"seq_q": 3},
    "mla ragged": LATENT | {"seq_q": 19, "total_q": 33},
}  # fmt: skip
LENGTHS = ("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k")
SCORE_FEATURES = tuple(name for name in COMMON if FEATURES[name].axes)


def problem(name: str, **fields: Any) -> Problem:
    return Problem(**(SMALL | CALLS[name] | fields))


def given(call: Call) -> dict[str, Any]:
    """The arguments by which a user would make this call, in the layouts of its problem."""
    p = call.problem
    found: dict[str, Any] = {"scale": call.scale, "return_lse": p.return_lse, "softcap": call.softcap or None}
    found |= {n: getattr(call, n) for n in SCORE_FEATURES if getattr(call, n) is not None}
    if p.op != "sparse_attention":
        sides = (None if side == UNLIMITED else side for side in (p.window_left, p.window_right))
        causal = {"none": False, "bottom_right": True, "top_left": "top_left"}[p.causal]
        found |= {"causal": causal, "window": tuple(sides), "chunk": p.chunk or None}
    if p.op == "varlen_attention":
        cu_seqlens = {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
        most = {"max_seqlen_q": p.seq_q, "max_seqlen_k": p.seq_k}
        if p.q_format != "as_q":
            found |= _operand_scales(call, lambda scale: scale[0].transpose(0, 1))
            if p.window or p.chunk or p.causal != "none":
                found["validate"] = False  # as below
            call = _in_formats(call)
        return found | {n: getattr(call, n)[0].transpose(0, 1) for n in "qkv"} | cu_seqlens | most
    found |= {n: getattr(call, n) for n in LENGTHS if getattr(call, n) is not None} | {"layout": p.layout}
    if p.num_splits:
        found["num_splits"] = p.num_splits
    if p.page_size:
        found |= {} if p.has_lists else {"page_table": call.page_table}
        if p.op != "mla_attention":
            found["page_layout"] = p.page_layout
    if p.has_lists:
        found |= {"indices": call.indices, "topk_length": call.counts}
    elif p.packed:
        found["cu_seqlens_q"] = call.cu_seqlens_q
        if call.tree_mask is not None:
            found |= {"tree_mask": call.tree_mask[0], "max_seqlen_q": p.seq_q}
    if p.op == "sparse_attention":
        found["validate"] = False  # tokens beyond a sequence, which random calls have, are passed over where none reads
        found |= {n: getattr(call, n) for n in ("indices", "counts", "log_weights") if getattr(call, n) is not None}
        if call.magicpig_bits is not None:
            found["magicpig"] = (call.magicpig_bits, call.magicpig_tables)
    if p.op == "mla_attention":
        if p.kv_format != "as_q":
            found |= _latent_scale(call)
            call = replace(call, k=call.k.view(CACHE_DTYPE[p.kv_format]))
        q_rope = None if call.q_rope is None else _queries(p, call.q_rope)
        return found | {"q_nope": _queries(p, call.q), "q_rope": q_rope, "kv_pages": call.k[:, 0]}
    if p.q_format != "as_q":
        found |= _operand_scales(call, lambda scale: _queries(p, scale[..., None])[..., 0])
        if p.window or p.chunk or p.mask or p.bias or p.causal != "none":
            found["validate"] = False  # as below
        call = _in_formats(call)
    elif p.kv_format != "as_q":
        found |= _scales(call)
        if p.kv_scales == "token" and (p.window or p.chunk or p.mask or p.bias or p.causal != "none"):
            found["validate"] = False  # scales of tokens that these hide are wild, and are refused where they are read
        if p.cache_format.block:
            if p.window or p.chunk or p.mask or p.bias or p.tree_mask or p.causal != "none":
                found["validate"] = False  # as above, of scales of blocks
            blocks = {n: getattr(call, n).view(BLOCK_SCALES) for n in ("k_block_scale", "v_block_scale")}
            found |= {n: _keys(p, scale) for n, scale in blocks.items()}
        call = replace(call, **{n: getattr(call, n).view(CACHE_DTYPE[p.kv_format]) for n in "kv"})
    names = {"attention": ("k", "v"), "paged_attention": ("k_pages", "v_pages")}.get(p.op, ("k_cache", "v_cache"))
    return found | {"q": _queries(p, call.q)} | dict(zip(names, (_keys(p, call.k), _keys(p, call.v)), strict=True))


def _scales(call: Call) -> dict[str, Any]:
    scales = {name: getattr(call, name) for name in ("k_scale", "v_scale")}
    if call.problem.kv_scales == "token":
        scales = {name: _keys(call.problem, scale[..., None])[..., 0] for name, scale in scales.items()}
    return {name: scale for name, scale in scales.items() if scale is not None}


def _in_formats(call: Call) -> Call:
    formats = {"q": call.problem.q_format, "k": call.problem.kv_format, "v": call.problem.v_format}
    viewed = {n: getattr(call, n).view(CACHE_DTYPE[kind]) for n, kind in formats.items() if kind != "as_q"}
    return replace(call, **viewed)


def _operand_scales(call: Call, by_row: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Scales of quantised q, k and v, and the results' dtype. by_row: one for each token in the caller's layout."""
    scales = {name: getattr(call, name) for name in ("q_scale", "k_scale", "v_scale")}
    found = {name: by_row(s) if s.ndim == 3 else s for name, s in scales.items() if s is not None}
    return found | {"out_dtype": call.dtype}


def _latent_scale(call: Call) -> dict[str, Any]:
    """A quantised latent cache's scale as a user would give it."""
    if call.k_scale is None:
        return {}
    by_token = call.problem.kv_scales == "token"
    scale = call.k_scale[:, 0] if by_token else call.k_scale[:1].sum()  # without sequences there is none
    return {"kv_scale": scale, "validate": False}


def _queries(p: Problem, q: torch.Tensor | None) -> torch.Tensor:
    if p.packed:
        return q[0].transpose(0, 1)
    return q.transpose(1, 2) if p.layout == "bshd" else q


def _keys(p: Problem, k: torch.Tensor) -> torch.Tensor:
    swapped = p.page_layout == "phd" if p.page_size else p.layout == "bshd"
    return k.transpose(1, 2) if swapped else k


def int32(device: Device, *values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device.name)


def carry_out_by(function: Callable[..., Any]) -> None:
    """Every public operation hands a request that no cached launch answers to `function`."""
    call_module.perform = function


def perform(op: str, arguments: dict[str, Any], **changes: Any) -> Any:
    return getattr(portattn, op)(**(arguments | changes))


def differentiable(op: str) -> dict[str, Any]:
    """What to add to a call's arguments for gradients: some operations have one on the reference path alone."""
    return {"backend": "reference"} if ROWS[op].trained_by else {}


def changed(arguments: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for n, t in arguments.items():
        if isinstance(t, torch.Tensor):
            t = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
            if n in ("q", "q_nope", "q_rope", "v", "v_pages", "v_cache", "kv_pages"):
                t = t.mul_(-0.5)
            if n in ("seqlens_k", "counts"):
                t = t.floor_divide_(2)
        found[n] = t
    return found


def one_sequence(arguments: dict[str, Any], b: int) -> dict[str, Any]:
    found = dict(arguments)
    of_sequences = ["page_table", "seqlens_k", "leftpad_k", "indices", "counts", "log_weights"]
    of_rows = ["q", "q_nope", "q_rope"]
    if "cu_seqlens_q" in found:
        first, end = found["cu_seqlens_q"][b : b + 2].tolist()
        found |= {n: found[n][first:end] for n in of_rows if n in found}
        found["cu_seqlens_q"] = (found["cu_seqlens_q"][b : b + 2] - first).contiguous()
    else:
        of_sequences += of_rows
    if "page_table" not in found:
        of_sequences += ["k_cache", "v_cache"]
    return found | {n: found[n][b : b + 1] for n in of_sequences if n in found}


def symbolic(trace: Trace, dtype: torch.dtype, *sizes: int) -> SymbolicTensor:
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    kind = TensorKind(dtype, torch.device("cuda", 0), len(sizes), 0, False)
    return SymbolicTensor.make(kind, [trace.input(n) for n in sizes], [trace.input(n) for n in strides])


def as_call(p: Problem, out: torch.Tensor) -> torch.Tensor:
    if p.packed:
        return out.transpose(0, 1)[None]
    return out.transpose(1, 2) if p.layout == "bshd" else out


def assert_right(call: Call, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """A result in the caller's layout against the float64 oracle, within the library's budget."""
    p = call.problem
    assert out.is_contiguous()
    if lse is not None:
        assert lse.is_contiguous()
        lse = lse[None] if p.packed else lse
    facts = tolerance.judge(call, as_call(p, out), lse)
    assert not facts["wrong"], facts
    assert facts["error"] <= facts["budget"], facts
    if lse is not None:
        assert facts["lse_error"] <= facts["lse_budget"], facts


def paths(device: Device) -> dict[str, dict[str, str]]:
    return {"reference": {"backend": "reference"}, "core": {"backend": device.path}}


def use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without a tuning entry (all those for a CPU) get tiles of 16 × 16, so that small problems have several."""
    monkeypatch.setattr(core_path, "Launch", lambda: Launch(block_m=16, block_n=16))
    dispatch.forget_plans()


@contextlib.contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Inside the block the interpreter raises where a kernel touches an address outside the launch's tensors. Yields
    the kernels that ran: an empty list means that nothing was watched."""
    import numpy as np
    from triton.runtime import interpreter

    builder, launch_all = interpreter.InterpreterBuilder, dispatch.launch_all
    load, store = builder.create_masked_load, builder.create_masked_store
    tensors: list[tuple[str, int, int]] = []  # name, first byte, end
    kernels: list[str] = []

    def check_addresses(what: str, pointers: Any, mask: Any) -> None:
        addresses = pointers.data[np.broadcast_to(np.asarray(mask.data).astype(bool), pointers.data.shape)].astype(
            np.int64
        )
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        inside = np.zeros(addresses.shape, dtype=bool)
        for _, first, end in tensors:
            inside |= (addresses >= first) & (addresses + size <= end)
        if not inside.all():
            address = int(addresses[~inside][0])
            name, first, end = min(tensors, key=lambda t: min(abs(address - t[1]), abs(address - t[2])))
            raise AssertionError(f"{what} at byte {address - first} of {name}, which has {end - first}")

    def launch_watched(launches: Any, plan: Any, q: torch.Tensor) -> None:
        given = [item for launch in launches for item in launch.arguments.items()]
        tensors[:] = [(n, t.data_ptr(), t.data_ptr() + spans(t)) for n, t in given if isinstance(t, torch.Tensor)]
        kernels.extend(launch.function for launch in launches)
        launch_all(launches, plan, q)

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        check_addresses("load", pointers, mask)
        return load(self, pointers, mask, *rest, **named)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check_addresses("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_masked_load", watched_load)
        patch.setattr(builder, "create_masked_store", watched_store)
        patch.setattr(dispatch, "launch_all", launch_watched)
        yield kernels


class _Interpreted:
    """A kernel under the interpreter that takes what the compiled one takes: compiler options, by `kernel[grid]`."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.arg_names = kernel, kernel.arg_names
        self.fn, self.do_not_specialize = kernel.fn, kernel.kwargs.get("do_not_specialize", ())

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self._kernel[grid](*arguments)


def pretend_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as an H100's: plans are for one, calls are cached, and the core's kernels run under the
    interpreter (which has nothing to run a variant's with). Skips where Triton compiles for a real accelerator."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the accelerator in this process")
    from portattn.api.request import Request
    from portattn.compile import ensure_compiled
    from portattn.launch import cached_launch
    from portattn.launch.run import has_rows, load_kernels
    from portattn.validate import values

    target = parse_target("cuda:sm_90", "triton==3.6.0")

    @functools.cache  # one object a kernel, as Triton has it
    def kernels(module: str, interpreted: bool) -> Any:
        loaded = load_kernels(module, interpreted=True)
        return SimpleNamespace(**{n: _Interpreted(k) for n, k in vars(loaded).items() if hasattr(k, "arg_names")})

    def launch_all(launches: Any, plan: Any, q: torch.Tensor) -> None:
        for launch in launches if has_rows(plan) else ():
            kernel = getattr(load_kernels(launch.module, interpreted=True), launch.function)
            kernel[launch.grid](**launch.arguments, **with_functions(launch.constexprs))

    constexprs = DecodeSplit.constexprs

    def portable(self: DecodeSplit, problem: Problem, lowering: Lowering, launch: Launch) -> dict[str, Any]:
        found = constexprs(self, problem, lowering, launch)
        return found | {"UNPACK": "words"} if found.get("UNPACK") == "ptx" else found

    monkeypatch.setattr(DecodeSplit, "constexprs", portable)
    monkeypatch.setattr(Registry.load().backends["cuda"], "variants", ())
    monkeypatch.setattr(dispatch, "detect_target", lambda device_type, index: (target, ""))
    monkeypatch.setattr(dispatch, "launch_all", launch_all)
    monkeypatch.setattr(Request, "_on_accelerator", lambda request: True)
    # As on an accelerator: lengths are read back only where that is asked for.
    monkeypatch.setattr(values, "reads", lambda settings, tensor: settings.validate == "always")
    monkeypatch.setattr(cached_launch, "load_kernels", kernels)
    monkeypatch.setattr(cached_launch, "descriptor_memory", lambda memory: contextlib.nullcontext())
    monkeypatch.setattr(torch.cpu, "current_device", lambda: None)  # as a CPU tensor's device.index is
    monkeypatch.setattr(ensure_compiled, "ensure", lambda *arguments: None)
    dispatch.forget_plans()
