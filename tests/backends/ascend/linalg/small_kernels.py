"""Kernels of a few lines that show what triton-ascend makes of them. Imported by a child that has it."""

import triton
import triton.language as tl


@triton.jit
def k_tile(k, out, keys, first, BLOCK: tl.constexpr, WIDTH: tl.constexpr, VIEW: tl.constexpr):
    if VIEW == "rows":
        view = tl.make_block_ptr(k, (keys, WIDTH), (WIDTH, 1), (first, 0), (BLOCK, WIDTH), (1, 0))
        tile = tl.trans(tl.load(view, boundary_check=(0,), padding_option="zero"))
    else:
        view = tl.make_block_ptr(k, (WIDTH, keys), (1, WIDTH), (0, first), (WIDTH, BLOCK), (0, 1))
        tile = tl.load(view, boundary_check=(1,), padding_option="zero")
    tl.store(out + tl.arange(0, WIDTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], tile)


@triton.jit
def gathered(k, tokens, out, stride, N: tl.constexpr, D: tl.constexpr):
    token, d = tl.load(tokens + tl.arange(0, N)), tl.arange(0, D)
    tile = tl.load(k + tl.reshape(token, (1, N)) * stride + d[:, None])
    tl.store(out + d[:, None] * N + tl.arange(0, N)[None, :], tile)


@triton.jit
def looked_up(table, out, tokens, N: tl.constexpr, PAGE: tl.constexpr):
    token = tl.arange(0, N)
    page = tl.load(table + token // PAGE, mask=token < tokens, other=0)
    tl.store(out + token, page, mask=token < tokens)
