"""ptxas before 13.3 can reuse the registers of a WGMMA's left operand while the instruction still reads them.

A computed operand of `tl.dot` is a left operand in registers on Hopper, as in attention's P·V, and with several stages
the loop goes on during the asynchronous read. ptxas 12.9 gave 61 for 64 products of one; with one stage, or by ptxas
13.4 on the same PTX, the result was right.

Expected: exact sums of small integers. `on` and `control` have one stage. An `off` that passes proves only these loop
shapes: ptxas decides anew for every kernel. TRITON_PTXAS_PATH names another assembler to try.
"""

import itertools

import triton
import triton.language as tl
from harness import RUNS, Bench, BugFound, Missing, main

PROGRAMS, STEPS, SMALL = 528, 24, 5  # four programs for each of 132 cores; loop steps; integers below this
TILES = ((64, 32), (128, 32), (128, 64), (256, 32), (64, 128), (256, 64))  # columns and depth
SHAPES = [
    (rows, *tile, warps, stages) for rows, tile, warps, stages in itertools.product((64, 128), TILES, (4, 8), (2, 4))
]
RETAINED, RECOMPUTED, CHAINED = 0, 1, 2


@triton.jit
def products(
    a, b, out, steps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    rows, columns, depth = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    program = tl.program_id(0)
    start = tl.load(a + rows[:, None] * DEPTH + depth[None, :])
    left = (start.to(tl.float32) + 1.0).to(tl.bfloat16)  # computed: stays in registers
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        right = tl.load(b + (step * DEPTH + depth)[:, None] * COLUMNS + columns[None, :])
        if FORM == 1:  # another operand in every step, made while the product before it still runs
            left = (start.to(tl.float32) + (step % 3).to(tl.float32)).to(tl.bfloat16)
        if FORM == 2:  # attention's: the operand is itself a product
            scores = tl.dot(start, tl.trans(tl.load(a + depth[:, None] * DEPTH + depth[None, :])))
            left = (scores + (step % 3).to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(left, right, sums)
    tl.store(out + program * ROWS * COLUMNS + rows[:, None] * COLUMNS + columns[None, :], sums)


def probe(arm: str, bench: Bench) -> None:
    try:
        import torch
    except ImportError:
        raise Missing("needs torch") from None
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise Missing("needs a Hopper GPU")
    bench.level = RUNS
    shapes = [(*shape[:4], 1) for shape in SHAPES[::3]] if arm != "off" else SHAPES
    complaints, register_operands = [], 0
    for (rows, columns, depth, warps, stages), form in itertools.product(shapes, (RETAINED, RECOMPUTED, CHAINED)):
        draw = torch.Generator().manual_seed(rows + columns + form)
        # 0 and 1 where a product becomes an operand: it has to fit the 8 bits of a bf16.
        every = torch.randint(0, 2 if form == CHAINED else SMALL, (max(rows, depth), depth), generator=draw).float()
        a = every[:rows]
        b = torch.randint(0, SMALL, (STEPS * depth, columns), generator=draw).float()
        out = torch.full((PROGRAMS, rows, columns), float("nan"), device="cuda")
        compiled = products[(PROGRAMS,)](
            every.bfloat16().cuda(),
            b.bfloat16().cuda(),
            out,
            STEPS,
            rows,
            columns,
            depth,
            form,
            stages,
            num_warps=warps,
        )
        register_operands += from_registers(compiled.asm["ptx"])
        wanted = torch.zeros(rows, columns)
        for step, right in enumerate(b.split(depth)):
            left = {RETAINED: a + 1, RECOMPUTED: a + step % 3, CHAINED: a @ every[:depth].T + step % 3}[form]
            wanted += left @ right
        wrong = (out.cpu() != wanted).nonzero()
        if len(wrong):
            program, row, column = wrong[0].tolist()
            complaints.append(
                f"{rows}x{columns}x{depth}, {warps} warps, {stages} stages, form {form}: {len(wrong)} wrong, "
                f"{out[program, row, column].item():g} for {wanted[row, column].item():g}"
            )
    if complaints:
        raise BugFound("; ".join(complaints[:5]))
    if arm == "off" and not register_operands:
        raise RuntimeError("no product took its left operand from registers: this compiler does not make the form")


def from_registers(ptx: str) -> int:
    """Return the number of WGMMAs with a left operand in registers: a list in braces after the sums' own."""
    instructions = (text.split(";")[0] for text in ptx.split("wgmma.mma_async")[1:])
    return sum(text.count("{") > 1 for text in instructions)


if __name__ == "__main__":
    main(probe, "cuda:sm_90", __doc__)
