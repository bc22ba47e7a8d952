"""flex_attention and create_block_mask in the place of torch's: results, gradients, shapes, errors, compiled calls."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from flex_cases import HEADS, KEYS, MASKS, MODS, ROWS, Tensors, assert_right, captured, causal, qkv, results, theirs
from torch.nn.attention import flex_attention as torchs
from torch.utils._python_dispatch import TorchDispatchMode

import portattn
from portattn.integrations import flex_attention as flex
from portattn.integrations.flex_attention import AuxRequest, create_block_mask, flex_attention
from portattn.reference import score_functions

EVERYTHING = AuxRequest(lse=True, max_scores=True)
ON_KERNELS = pytest.param("interpreter", marks=pytest.mark.interpreter)


def check(given: Tensors, score_mod: Any, mask: Any, about: str, backend: str = "auto", **more: Any) -> None:
    """Compare a call's results and gradients; score_mod makes a function of the tensors after q, k and v."""

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *own: torch.Tensor) -> Tensors:
        with portattn.settings(backend=backend):
            mod = None if score_mod is None else score_mod(*own)
            out, aux = flex_attention(q, k, v, mod, mask, enable_gqa=True, return_aux=EVERYTHING, **more)
        return [out, *aux]

    def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *own: torch.Tensor) -> Tensors:
        return list(theirs(q, k, v, None if score_mod is None else score_mod(*own), mask, **more))

    same = results(right, given)
    expected = results(right, [tensor.double() if tensor.is_floating_point() else tensor for tensor in given])
    kernels = backend == "interpreter" and len(given) > 3
    assert_right(results(ours, given, added=kernels), expected, same, about)
    assert not kernels or portattn.last_backward_plan().path == backend


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    arguments = (MASKS[name], 2, HEADS, ROWS, KEYS, "cpu", 16)
    mask = create_block_mask(*arguments)
    assert_same_lists(mask, torchs.create_block_mask(*arguments))
    check(qkv(), None, mask, name)


@pytest.mark.parametrize("backend", ["auto", ON_KERNELS])
@pytest.mark.parametrize("name", MODS)
def test_score_functions(name: str, backend: str) -> None:
    mask = create_block_mask(MASKS["groups of tokens"], None, None, ROWS, KEYS, "cpu", (16, 32))
    check([*qkv(), *captured(name)], MODS[name], mask, name, backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype: torch.dtype) -> None:
    mask = create_block_mask(causal, None, None, ROWS, KEYS, "cpu", 16)
    given = [tensor.to(dtype) for tensor in (*qkv(), *captured("two tables"))]
    check(given, MODS["two tables"], mask, str(dtype), scale=0.3)


SHAPES: dict[str, dict[str, int]] = {
    "a head for each": {"heads": HEADS}, "one head": {"heads": 1}, "values' own width": {"width_v": 40},
    "odd width": {"width": 19}, "one query": {"rows": 1}, "one key": {"keys": 1}, "one batch of keys": {"batch": 1},
    "no queries": {"rows": 0}, "no keys": {"keys": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    q, k, v = qkv(**SHAPES[name])
    mask = create_block_mask(lambda b, h, q, kv: q + 3 * b >= kv, 2, None, q.shape[2], k.shape[2], "cpu", 16)
    if q.numel() and k.numel():
        check([q, k, v, *captured("heads")], MODS["heads"], mask, name)
        return
    out, aux = flex_attention(q, k, v, MODS["ALiBi"](), mask, enable_gqa=True, return_aux=EVERYTHING)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert not out.any()
    assert torch.equal(aux.lse, torch.full(q.shape[:3], float("-inf")))
    assert torch.equal(aux.max_scores, aux.lse)


def test_rows_without_keys_give_nothing() -> None:
    mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q > 4), None, None, ROWS, KEYS, "cpu", 16)
    q, k, v = qkv()
    out, aux = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=EVERYTHING)
    expected = theirs(q.double(), k.double(), v.double(), None, mask)
    assert_right([out, *aux], expected, theirs(q, k, v, None, mask), "")
    assert not out[:, :, :5].any()
    assert aux.lse[:, :, :5].isneginf().all()


def test_further_results_are_those_asked_for() -> None:
    q, k, v = qkv(heads=HEADS)
    out = flex_attention(q, k, v)
    both, lse = flex_attention(q, k, v, return_lse=True)
    assert torch.equal(out, both)
    assert (lse.dtype, lse.shape) == (torch.float32, q.shape[:3])
    for asked in itertools.product([False, True], repeat=2):
        found, aux = flex_attention(q, k, v, return_aux=AuxRequest(*asked))
        assert torch.equal(found, out)
        assert tuple(each is not None for each in aux) == asked
    assert torch.equal(aux.lse, lse)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_results_have_querys_memory_order(order: tuple[int, ...]) -> None:
    q, k, v = (tensor.permute(order).contiguous().permute(order) for tensor in qkv(heads=HEADS))
    assert flex_attention(q, k, v, MODS["soft cap"]()).stride() == torchs.flex_attention(q, k, v).stride()


def test_narrower_keys_are_cast() -> None:
    q, k, v = qkv(heads=HEADS)
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    assert torch.equal(flex_attention(q, k, v), flex_attention(q, k.float(), v.float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which gives keys that are wider its dtype too
        found = flex_attention(q.bfloat16(), k.float(), v.bfloat16())
    assert torch.equal(found, flex_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def assert_same_lists(ours: Any, right: Any) -> None:
    assert vars(ours).keys() == vars(right).keys()
    for name, value in vars(right).items():
        mine = getattr(ours, name)
        if isinstance(value, torch.Tensor):
            assert mine.dtype == value.dtype
            assert torch.equal(mine, value), name
        else:
            assert mine == value, name


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("size", [128, 64, (32, 100), [128, 48]], ids=str)
@pytest.mark.parametrize("lengths", [(300, 300), (128, 256), (5, 300), (1, 1), (257, 40), (0, 5), (5, 0)])
def test_block_masks_are_torchs(lengths: tuple[int, int], size: Any, separate: bool) -> None:
    document = torch.arange(600).view(2, 300) // 70
    packed = torchs.and_masks(causal, lambda b, h, q, kv: document[b, q] == document[b, kv])
    masks = (causal, torchs.noop_mask, lambda b, h, q, kv: q < 0, lambda b, h, q, kv: q >= kv * (h + 1), packed)
    for mask in masks[: 1 if 0 in lengths else None]:  # torch's own fails for some without rows
        for batch, heads in ((None, None), (2, 3)):
            given = (mask, batch, heads, *lengths, "cpu", size, False, separate)
            assert_same_lists(create_block_mask(*given), torchs.create_block_mask(*given))


class _Largest(TorchDispatchMode):
    """Notes the most elements of a result."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.elements = max(self.elements, found.numel())
        return found


def test_a_block_mask_is_made_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_functions, "MARK_ELEMENTS", 2**16)
    with _Largest() as seen:
        mask = create_block_mask(causal, 8, 8, 2048, 2048, "cpu")
    assert seen.elements <= 2048 * 128
    assert mask.kv_num_blocks.shape == (8, 8, 16)


def test_functions_that_are_no_mask_raise_torchs_error() -> None:
    for mask in (lambda b, h, q: q > 0, lambda s, b, h, q, kv: s, lambda b, h, q, kv: q):
        with pytest.raises(AssertionError):
            create_block_mask(mask, 1, 1, 64, 64, "cpu")
    with pytest.raises(ValueError, match="BLOCK_SIZE is 0"):
        create_block_mask(causal, 1, 1, 64, 64, "cpu", 0)
    for place, name in enumerate(("B", "H", "Q_LEN", "KV_LEN")):
        with pytest.raises(ValueError, match=f"{name} is -5"):
            create_block_mask(causal, *(64, 64, 64, 64)[:place], -5, *(64, 64, 64)[place:], "cpu")
    ordered: Any = (causal, 1, 1, 256, 256, "cpu", 128, False, True, True)
    assert_same_lists(create_block_mask(*ordered), torchs.create_block_mask(*ordered))


def sliced() -> Any:
    return torchs.create_block_mask(causal, 2, HEADS, ROWS, KEYS, "cpu", 16)[:, :, :1]


# Changes of a call that torch refuses, and words of portattn's error.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "three axes": ({"query": torch.randn(4, 8, 16)}, "query.ndim is 3"),
    "one axis": ({"query": torch.randn(4)}, "query.ndim is 1"),
    "width": ({"key": torch.randn(2, HEADS, KEYS, 8)}, "key's head_dim is 8"),
    "heads": ({"key": torch.randn(2, 2, KEYS, 16), "value": torch.randn(2, 2, KEYS, 16)}, "enable_gqa=True"),
    "groups": ({"key": torch.randn(2, 3, KEYS, 16), "value": torch.randn(2, 3, KEYS, 16), "enable_gqa": True},
               "heads_q is 4"),
    "batch": ({"key": torch.randn(1, HEADS, KEYS, 16), "value": torch.randn(1, HEADS, KEYS, 16)}, "key's batch is 1"),
    "device": ({"key": torch.empty(2, HEADS, KEYS, 16, device="meta")}, "key.device is 'meta'"),
    "longer mask": ({"block_mask": torchs.create_block_mask(causal, 1, 1, 99, 99, "cpu")}, "lengths is (99, 99)"),
    "shorter mask": ({"block_mask": torchs.create_block_mask(causal, 1, 1, 9, 9, "cpu")}, "lengths is (9, 9)"),
    "sliced mask": ({"block_mask": sliced()}, "sliced BlockMask"),
    "both forms": ({"return_lse": True, "return_aux": EVERYTHING}, "must not go with return_aux"),
    "two paths": ({"kernel_options": {"BACKEND": "AUTO", "FORCE_USE_FLEX_ATTENTION": True}}, "not go with BACKEND"),
    "path": ({"kernel_options": {"BACKEND": "CUDNN"}}, "BACKEND is 'CUDNN'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_torchs_type_of_error(name: str) -> None:
    change, words = BAD[name]
    q, k, v = qkv(heads=HEADS)
    call = {"query": q, "key": k, "value": v} | change
    with pytest.raises((ValueError, RuntimeError)) as expected:  # NotImplementedError is a RuntimeError
        torchs.flex_attention(**call)
    with pytest.raises(expected.type) as raised:
        flex_attention(**call)
    assert isinstance(raised.value, portattn.PortattnError)
    assert words in str(raised.value)


def test_options_of_torchs_kernels() -> None:
    q, k, v = qkv(heads=HEADS)
    out = flex_attention(q, k, v)
    hints = {"BLOCK_M": 32, "fwd_BLOCK_N": 32, "bwd_BLOCK_M1": 16, "PRESCALE_QK": True, "BACKEND": "AUTO"}
    assert torch.equal(flex_attention(q, k, v, kernel_options=hints), out)
    with pytest.raises(ValueError, match="name is 'BLOCK_Q'"):
        flex_attention(q, k, v, kernel_options={"BLOCK_Q": 32})
    with pytest.raises(RuntimeError, match="BACKEND is 'FLASH'"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "FLASH"})
    with pytest.raises(portattn.PathUnavailable, match="backend='triton'"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "TRITON"})
    with pytest.raises(ValueError, match=r"flex_attention: query\.dtype is torch\.float64"):
        flex_attention(q.double(), q.double(), q.double())
    with pytest.raises(ValueError, match="flex_attention: value's seq is 3, but must be key's, "):
        flex_attention(q, q, q[:, :, :3])
    with pytest.raises(ValueError, match="block_mask is 'function'"):
        flex_attention(q, k, v, block_mask=causal)
    for name, wrong in {"kernel_options": 5, "return_aux": True}.items():
        with pytest.raises(ValueError, match=f"{name} is '"):
            flex_attention(q, k, v, **{name: wrong})


def test_compiled_calls() -> None:
    """Functions are traced, and masks made, outside of the graph."""
    q, k, v = qkv()
    compiled = torch.compile(functools.partial(flex_attention, enable_gqa=True), backend="eager")
    made = torch.compile(create_block_mask, backend="eager")(causal, None, None, ROWS, KEYS, "cpu")
    assert_same_lists(made, torchs.create_block_mask(causal, None, None, ROWS, KEYS, "cpu"))
    for mod in (None, MODS["ALiBi"]()):
        out, aux = compiled(q, k, v, mod, made, return_aux=EVERYTHING)
        right, other = flex_attention(q, k, v, mod, made, enable_gqa=True, return_aux=EVERYTHING)
        torch.testing.assert_close((out, *aux), (right, *other))  # whose mask is an option


SHARE = torch.tensor(0.5)


def by_share(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s * SHARE


def by_import(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    import sys

    return s / sys.maxunicode


def test_a_whole_graph_holds_functions_that_their_code_decides() -> None:
    q, k, v = qkv()
    mask, width = create_block_mask(causal, None, None, ROWS, KEYS, "cpu"), 8
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    for mod in (torchs._identity, lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-(h + 1.0))):
        found = []
        for call in (compiled, flex_attention):
            leaf = q.clone().requires_grad_()
            out = call(leaf, k, v, mod, mask, enable_gqa=True)
            found.append([out, *torch.autograd.grad(out.square().sum(), leaf)])
        torch.testing.assert_close(*found)
    reading = (lambda s, b, h, q, kv: s / width, lambda s, b, h, q, kv, at=0.5: s * at, MODS["ALiBi"]())
    for mod in (*reading, by_share, by_import):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="portattn traces score_mod"):
            compiled(q, k, v, mod, mask, enable_gqa=True)


@pytest.mark.transformers
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
@torch.no_grad()
def test_transformers_flex_attention_is_portattns(family: str) -> None:
    """Gemma 2 caps its scores, and has windows."""
    tiny = pytest.importorskip("tiny_models", reason="the transformers package is not installed")
    from transformers import AttentionInterface

    model, ids, mask = tiny.build(family), tiny.tokens(), tiny.padding("left")
    arguments = {"attention_mask": mask, "position_ids": tiny.positions(mask), "use_cache": False}
    eager, before = model(ids, **arguments).logits, AttentionInterface._global_mapping["flex_attention"]
    put_back = flex.register_in_transformers()
    with tiny.using(model, "flex_attention"):
        ours = model(ids, **arguments).logits
        problem = portattn.last_plan().problem
    put_back()
    assert tiny.difference(ours, eager, mask) < tiny.TOLERANCE
    assert problem.mask_mod
    assert problem.softcap == (family == "Gemma2")
    assert not problem.score_mod
    assert AttentionInterface._global_mapping["flex_attention"] is before
