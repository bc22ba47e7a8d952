"""Score and mask functions in every kernel that takes them, against the float64 oracle, which runs the programs too."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import gradient_cases
import pytest
import torch
from kernel_cases import CAUSAL, check, problem
from support import Device, assert_right, random_call, run_core

import portattn
from portattn.backends.cuda.schedules import ALIBI
from portattn.kernels.score_program import CAPTURES, SIZES, load_function, python_source
from portattn.reference.score_functions import evaluate

# Programs of kernels/score_program.py: a table of heads and distances, a cap, and what all operations are made of.
TABLE = "c0 f 2 0\nt0 i sub q_idx kv_idx\nt1 i add t0 36\nt2 f load c0 h t1\nt3 f add score t2\nout t3"
CAPPED = "t0 f div score 3.0\nt1 f tanh t0\nt2 f mul t1 3.0\nt3 b lt q_idx 2\nt4 f where t3 score t2\nout t4"
WOVEN = (
    "c0 l 1 0\nc1 b 2 1\nt0 l load c0 kv_idx\nt1 f to_f t0\nt2 f exp t1\nt3 f mul score 0.25\nt4 f sigmoid t3\n"
    "t5 f div t4 t2\nt6 b load c1 b q_idx\nt7 f where t6 t5 -inf\nt8 f maximum t7 score\nt9 f abs t8\n"
    "t10 f add t9 1.5\nt11 f log t10\nt12 f sqrt t10\nt13 f mul t11 t12\nt14 f sub t13 score\nout t14"
)
# Tensors of heads, of keys and of rows, the first of which is read twice.
LEARNED = (
    "c0 f 1 0\nc1 f 2 1\nc2 f 2 3\nt0 f load c0 h\nt1 f load c1 b kv_idx\nt2 f load c2 q_idx h\nt3 f mul score t0\n"
    "t4 f tanh t1\nt5 f mul t4 t2\nt6 f add t3 t5\nt7 f load c0 b\nt8 f sub t6 t7\nout t8"
)
BAND = (
    "t0 i sub q_idx kv_idx\nt1 i abs t0\nt2 i positive_mod kv_idx 5\nt3 b le t1 t2\nt4 b eq h 1\nt5 b or t3 t4\nout t5"
)
DOCUMENTS = (
    "c1 i 1 2\nt0 i load c1 q_idx\nt1 i load c1 kv_idx\nt2 b eq t0 t1\nt3 i floordiv t0 -2\nt4 b ne t3 b\n"
    "t5 b and t2 t4\nout t5"
)
# A tree of new tokens, after the first 20 keys: words of bits, as tree_mask makes them, in a function with gradients.
TREE = (
    "c0 l 2 0\nt0 l load c0 b q_idx\nt1 i sub kv_idx 20\nt2 i maximum t1 0\nt3 l to_l t2\nt4 l rshift t0 t3\n"
    "t5 l and t4 1\nt6 b eq t5 1\nt7 b lt kv_idx 20\nt8 b or t6 t7\nout t8"
)
FUNCTIONS: dict[str, dict[str, Any]] = {
    "table": {"score_mod": TABLE},
    "capped": {"score_mod": CAPPED, "sinks": True},
    "woven": {"score_mod": WOVEN, "softcap": True},
    "band": {"mask_mod": BAND},
    "tree": {"mask_mod": TREE},
    "documents": {"score_mod": TABLE, "mask_mod": DOCUMENTS, "alibi_slopes": True},
    "learned": {"score_mod": LEARNED, "softcap": True},
}
CAPTURED = {"table": 1, "documents": 1, "learned": 7}  # bits of tensors whose gradients are asked for
NAN = float("nan")
OPS = ("dense", "padded", "varlen", "decode", "paged", "ragged")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_right(device: Device, op: str, name: str) -> None:
    for seed, causal in enumerate(CAUSAL):
        fields = FUNCTIONS[name] | ({"window_left": 9} if seed == 1 else {})
        call = random_call(problem(op, causal=causal, **fields), seed, device=device.name)
        check(device, call, 2 if op in ("decode", "paged") else 1)


@pytest.mark.parametrize("kind", ["e4m3", "int8", "int4", "nvfp4"])
def test_functions_over_quantised_caches(device: Device, kind: str) -> None:
    scales = "head" if kind == "nvfp4" else "token"
    stored = {"kv_format": kind, "kv_scales": scales, "dtype": "fp16", "head_dim": 32}
    for name in ("table", "documents"):
        for op in ("decode", "paged"):
            check(device, random_call(problem(op, **FUNCTIONS[name], **stored), 3, device=device.name), 2)


@pytest.mark.parametrize("base", [gradient_cases.DENSE, gradient_cases.PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_right(device: Device, base: dict, name: str) -> None:
    for seed, causal in enumerate(CAUSAL):
        fields = {"heads_q": 4, "grad_captured": CAPTURED.get(name, 0)} | FUNCTIONS[name]
        fields |= {"window_left": 9} if seed == 1 else {}
        call = gradient_cases.random(device, seed, base, causal=causal, **fields)
        gradient_cases.check(device, call)


# Lists of blocks: kernels have other code beside other limits, beside sinks, and of lists alone.
BLOCKS: dict[str, Any] = {"batch": 1, "block_mask": True, "block_q": 16, "block_k": 32, "seq_q": 53, "seq_k": 100}
LISTED: dict[str, dict[str, Any]] = {
    "alone": {}, "band": {"mask_mod": BAND}, "sinks": {"mask_mod": BAND, "sinks": True},
    "documents": FUNCTIONS["documents"] | {"causal": "bottom_right", "window_left": 40},
    "learned": FUNCTIONS["learned"], "lengths": {"mask_mod": BAND, "seqlens_q": True, "seqlens_k": True},
    "causal": {"causal": "bottom_right", "seq_k": 40}, "whole blocks": {"mask_mod": BAND, "seq_q": 48, "seq_k": 96},
}  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
def test_lists_are_right(device: Device, name: str) -> None:
    """Whole blocks are attended whole whatever the mask function says, and rows without keys hold NaN."""
    for seed in range(2):
        fields = {"heads_q": 4} | BLOCKS | LISTED[name]
        call = random_call(problem("dense", **fields), seed, device=device.name)
        assert_right(call, *run_core(device, call, launch={"block_n": 16 + 16 * seed}))
        call = gradient_cases.random(device, seed, **fields, grad_captured=CAPTURED.get(name, 0))
        call.q[:, :, 32:48] = NAN  # no list of these rows names a block
        gradient_cases.check(device, call, block_n=16, rows_n=16 + 16 * seed)
        if name == "band":
            gradient_cases.check(device, call, {"dot_precision": "bf16x6"})


@pytest.mark.parametrize(("kind", "scales"), [("e4m3", "head"), ("e5m2", "none"), ("int8", "token")])
@pytest.mark.parametrize("name", LISTED)
def test_lists_beside_quantised_operands(device: Device, name: str, kind: str, scales: str) -> None:
    stored = {"kv_format": kind, "kv_scales": scales, "dtype": "fp16", "head_dim": 32}
    for operands in ("stored", "widened"):
        call = random_call(problem("dense", **{"heads_q": 4} | BLOCKS | LISTED[name] | stored), device=device.name)
        assert_right(call, *run_core(device, call, {"operands": operands}, {"block_n": 16}))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("hides", ["a constant", "a logarithm", "a tensor"])
def test_gradients_of_rows_that_a_score_function_hides_may_be_nan(device: Device, hides: str, layout: str) -> None:
    """No mask tells of such rows."""
    added = torch.zeros(37, device=device.name)
    added[3] = -torch.inf
    mod = {
        "a constant": lambda s, b, h, q, k: torch.where(q == 3, -torch.inf, s),
        "a logarithm": lambda s, b, h, q, k: s + torch.log((q != 3).float()),
        "a tensor": lambda s, b, h, q, k: s + added[q],
    }[hides]
    for path in (device.path, "auto"):
        found = []
        for value in (NAN, 0.0):
            torch.manual_seed(0)
            tensors = [torch.randn(1, 2, n, 64, dtype=torch.float16).to(device.name) for n in (37, 45, 45, 37)]
            tensors[3][:, :, 3] = value
            *given, grad = (t if layout == "bhsd" else t.transpose(1, 2).contiguous() for t in tensors)
            given = [tensor.requires_grad_() for tensor in given]
            out = portattn.attention(*given, score_mod=mod, layout=layout, backend=path)
            found.append(torch.autograd.grad(out, given, grad))
        torch.testing.assert_close(*found)


def test_rows_hidden_from_all_keys_may_be_nan(device: Device) -> None:
    """Of a partial block: the mask function alone hides them, and only the LSE tells."""
    never = "t0 b ge q_idx 7\nt1 i positive_mod kv_idx 5\nt2 b lt t1 q_idx\nt3 b and t0 t2\nout t3"
    for sinks in (False, True):
        call = gradient_cases.random(device, 1, mask_mod=never, sinks=sinks)
        call.q[:, :, :7] = NAN
        gradient_cases.check(device, call)


@pytest.mark.parametrize("wild", [-(2**31), -1, 99, 2**31 - 1])
def test_wild_lists_read_nothing_outside(device: Device, wild: int) -> None:
    """Counts and numbers of no block: keys and values are a part of memory that is NaN around them."""
    fields: dict[str, Any] = {"heads_q": 4, "mask_mod": BAND} | BLOCKS | {"seq_q": 48, "seq_k": 96}
    for place in (0, 1, slice(2, 4)):
        forward = random_call(problem("dense", **fields), device=device.name)
        for call in (forward, gradient_cases.random(device, **fields)):
            for name in ("block_mask", "block_queries"):
                if getattr(call, name) is not None:
                    setattr(call, name, getattr(call, name).clone())
                    getattr(call, name)[..., place] = wild
            for name in ("q", "k", "v", "grad_out", "forward_out"):
                if getattr(call, name) is not None:
                    own = torch.nn.functional.pad(getattr(call, name).nan_to_num(0.0), (0, 0, 512, 512), value=NAN)
                    setattr(call, name, own[:, :, 512:-512])
            if call.forward_lse is not None:  # of other lists: rows that attend nothing are in some
                call.forward_lse.nan_to_num_(neginf=0.0)
            out, _ = run_core(device, call)
            results = (call.grad_q, call.grad_k, call.grad_v) if call.problem.backward else (out,)
            assert all(result.isfinite().all() for result in results)


NEAR = "t0 i sub kv_idx 9\nt1 i sub q_idx t0\nt2 i abs t1\nt3 i neg t2\nt4 f to_f t3\nt5 f mul t4 score\nout t5"
FAR = "t0 i mul q_idx 3\nt1 i sub t0 kv_idx\nt2 f to_f t1\nt3 f div score t2\nout t3"


@pytest.mark.parametrize("text", [NEAR, FAR, ALIBI])
def test_a_source_computes_its_program(text: str) -> None:
    """With torch in the place of Triton, also where distances are computed as floats (the Hopper forward's)."""
    jit: Any = ModuleType("plain")
    jit.jit = lambda function: function
    language: Any = ModuleType("language")
    language.__dict__.update(vars(torch), expand_dims=torch.unsqueeze)
    at = torch.arange(2**20, 2**20 - 50, -7, dtype=torch.int32)
    given = {"score": torch.randn(8, 8), "b": at[0], "h": at[-1] % 7, "q_idx": at[:, None], "kv_idx": at // 2}
    for floats in (False, True):
        source = python_source(text, floats=floats)
        assert ("q_idx).to(tl.float32)" in source) == (floats and text != FAR)
        found = load_function(source, jit, language, torch.tanh)(*given.values(), *[None] * (CAPTURES + SIZES))
        assert torch.equal(found, evaluate(text, given, {}))
    for axes, tile in (("qk", given["score"]), ("kq", given["score"].T)):
        source = python_source(text, floats=True, axes=axes)
        vectors = given | {"score": tile, "q_idx": at, "kv_idx": at // 2}
        found = load_function(source, jit, language, torch.tanh)(*vectors.values(), *[None] * (CAPTURES + SIZES))
        assert torch.equal(found if axes == "qk" else found.T, evaluate(text, given, {}))


LONG = "c0 i 1 0\nc1 i 2 1\nt0 i load c0 q_idx\nt1 i load c0 kv_idx\nt2 i load c1 b kv_idx\nt3 b eq t0 t1\n"


def test_vectors_are_loaded_as_vectors() -> None:
    """Each row's number and each key's once, and without a limit where no tile reaches behind the tensor."""
    text = LONG + "t4 b le t0 t2\nt5 b and t3 t4\nout t5"
    limited, free = (python_source(text, axes="qk", long=long) for long in ((), (0, 2)))
    for source in (limited, free):
        assert "t3 = tl.expand_dims(t0, 1) == tl.expand_dims(t1, 0)" in source
        assert "t5 = t3 & t4" in source
    assert "tl.load(c0 + tl.minimum(q_idx, n0 - 1))" in limited
    assert "tl.load(c0 + q_idx)" in free
    assert "tl.load(c1 + (tl.minimum(b, n1 - 1)).to(tl.int64) * (n2) + kv_idx)" in free
