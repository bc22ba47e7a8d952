"""Run by test_core_on_npu.py: one public operation on a host device called npu, with triton-ascend as its compiler.
Prints as JSON the path, the kernels that were launched and their stray accesses; an error ends it."""

import json
import sys

import torch
from opcalls import CALLS, assert_right, given, perform, problem
from triton.runtime import driver

import portattn
from portattn.testing.random_calls import random_call
from portattn.testing.tolerance import nan_filled_memory
from portattn.testing.verdict import judge_gradients

CORE = {"backend": "triton"}
WIDTHS = {"head_dim": 64, "head_dim_v": 64, "dtype": "fp16"}


def random(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def on_npu(*tensors):
    return [tensor.to("npu") for tensor in tensors]


def attend(name):
    call = random_call(problem(name, **({} if "mla" in name else WIDTHS)), seed=1, device="npu")
    out, lse = perform(call.problem.op, given(call), **CORE)
    assert_right(call, out, lse)


def differentiate(name):
    op = {"gradients": "attention", "packed gradients": "varlen"}[name]
    lengths = {"leftpad_q": False, "leftpad_k": False, "seqlens_q": False, "seqlens_k": False}
    fields = WIDTHS | (lengths if op == "attention" else {}) | {"causal": "bottom_right"}
    call = random_call(problem(op, **fields), seed=1, device="npu")
    arguments = given(call)
    tensors = [arguments[name].detach().requires_grad_() for name in "qkv"]
    out, lse = perform(call.problem.op, arguments | dict(zip("qkv", tensors, strict=True)), **CORE)
    grads = [random(*result.shape, dtype=result.dtype).to("npu") for result in (out, lse)]
    found = torch.autograd.grad([out, lse.masked_fill(lse.isinf(), 0.0)], tensors, grads)
    seen = dict(zip("qkv", found, strict=True))
    grad_out, grad_lse = grads
    if op == "varlen":
        seen = {name: gradient.transpose(0, 1)[None] for name, gradient in seen.items()}
        grad_out, grad_lse = grad_out.transpose(0, 1)[None], grad_lse[None]
    facts = judge_gradients(call, seen, grad_out, grad_lse)
    assert not facts["wrong"], facts
    assert facts["error"] <= facts["budget"], facts


def write(name):
    """A cache's bytes after the kernel and after the reference are the same."""
    k, v, places = random(2, 2, 3, 64), random(2, 2, 3, 64), torch.tensor([5, 38], dtype=torch.int32)
    caches = torch.zeros(2, 2, 40, 64).half(), torch.ones(2, 2, 40, 64).half()
    if name == "write_pages":
        k, v, places = k.flatten(0, 1), v.flatten(0, 1), torch.tensor([3, 79, -1, 17])
        caches = torch.zeros(5, 16, 3, 64).half(), torch.ones(5, 16, 3, 64).half()
    there = on_npu(*caches)
    getattr(portattn, name)(*on_npu(k, v), *there, places.to("npu"), validate=False, **CORE)
    getattr(portattn, name)(k, v, *caches, places, validate=False, backend="reference")
    assert all(torch.equal(ours.cpu(), right) for ours, right in zip(there, caches, strict=True))


def choose(name):
    if name == "topk_indices":
        logits = random(5, 700, dtype=torch.float32).mul(8).round()  # many are equal
        (found,) = on_npu(logits)
        found = portattn.topk_indices(found, 64, sorted=True, **CORE)
        assert torch.equal(found.cpu(), portattn.topk_indices(logits, 64, sorted=True, backend="reference"))
    elif name == "indexer_logits":
        q, k, weights = random(7, 4, 64), random(90, 64), random(7, 4, dtype=torch.float32)
        found = portattn.indexer_logits(*on_npu(q, k, weights), **CORE).cpu()
        products = torch.relu(q.double() @ k.double().mT) * weights.double()[..., None]
        budget = 64 * torch.finfo(torch.float32).eps * products.abs().sum(1)
        assert ((found - products.sum(1)).abs() <= budget).all()
    else:
        q, k, v = random(1, 4, 70, 64), random(1, 2, 200, 64), random(1, 2, 200, 64)
        blocks = torch.tensor([0, 3, 1, 2] * 70, dtype=torch.int32).reshape(1, 2, 70, 2)
        found = portattn.block_sparse_attention(*on_npu(q, k, v, blocks), block_size=64, causal=True, **CORE).cpu()
        right = portattn.block_sparse_attention(
            q.float(), k.float(), v.float(), blocks, block_size=64, causal=True, backend="reference"
        )
        assert (found - right).abs().max() < 2e-3


CASES = dict.fromkeys(CALLS, attend) | {
    "gradients": differentiate, "packed gradients": differentiate, "append_kv": write, "write_pages": write,
    "topk_indices": choose, "indexer_logits": choose, "block_sparse_attention": choose,
}  # fmt: skip

if __name__ == "__main__":
    with nan_filled_memory():
        CASES[sys.argv[1]](sys.argv[1])
    launches = driver.active.launcher_cls.__call__.__globals__["launches"]
    print(
        json.dumps({"kernels": sorted({kernel for kernel, _, _ in launches}), "strays": [s for *_, s in launches if s]})
    )
