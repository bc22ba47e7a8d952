"""How many instructions can be left out of a passing kernel before a check or wrong numbers tell. A program:

    python mutation_rates.py [ARCH …]      prints a line of Markdown an arch: the table of docs/emulation.md

The kernel is flash forward in Triton's language (programs.py), fp16, D = 64, as the installed Triton compiles it; its
output is compared to 1e-3. Every barrier, every wait, and 70 instructions by chance are left out, one at a time.
"""

from __future__ import annotations

import random
import re
import sys

import torch
from programs import NAN, flash

from portattn.backends.rocm.emulator.amdgpu import ARCHES, EmulationError, Memory, Program
from portattn.backends.rocm.emulator.amdgpu.memory import address_of
from portattn.backends.rocm.emulator.amdgpu.triton_driver import emulate

S, KEYS, D, BLOCK, BATCH = 50, 75, 64, 32, 2
CHANCE = 70
BARRIER = re.compile(r"^\ts_barrier(_wait)?\b.*$")
# Waits on results; s_waitcnt_depctr and its like order nothing that a program can see.
WAIT = re.compile(r"^\ts_(waitcnt(?!_depctr)|wait_(?!alu|idle))\S*\b.*$")
INSTRUCTION = re.compile(r"^\t(?!s_(nop|delay_alu|clause|endpgm|sendmsg)\b)[a-z]\w+.*$")


def compiled(arch: str) -> tuple[str, int, int]:
    """The kernel's text, its LDS and its waves."""
    q, k = torch.zeros(BATCH, S, D, dtype=torch.float16), torch.zeros(BATCH, KEYS, D, dtype=torch.float16)
    with emulate(arch):
        kernel = flash[(2, BATCH)](
            q, k, k, torch.empty_like(q), torch.empty(BATCH, S), D**-0.5, S, KEYS, D=D, BM=BLOCK, BN=BLOCK, num_warps=4,
            num_stages=2,
        )  # fmt: skip
    return kernel.asm["amdgcn"], kernel.metadata.shared, kernel.metadata.num_warps


def passes(text: str, lds: int, waves: int) -> bool:
    """Does it run without a finding, to the right numbers?"""
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, n, D).half() for n in (S, KEYS, KEYS))
    out, lse = torch.full_like(q, NAN), torch.full((BATCH, S), NAN)
    memory = Memory()
    arguments = [address_of(x, memory) for x in (q, k, v, out, lse)]
    try:
        program = Program.parse(text)
        program.launch(
            (2, BATCH), [*arguments, D**-0.5, S, KEYS], memory, lds_bytes=lds, waves=waves, step_limit=30_000
        )
    except EmulationError:
        return False
    scores = q.double() @ k.double().mT * D**-0.5
    scores = scores.masked_fill(~(torch.arange(S)[:, None] + (KEYS - S) >= torch.arange(KEYS)), -float("inf"))
    return bool((out.double() - scores.softmax(-1) @ v.double()).abs().max() <= 1e-3)


def rate(text: str, lds: int, waves: int, lines: list[int]) -> int:
    """How many of these lines are missed when they are left out."""
    split = text.split("\n")
    return sum(not passes("\n".join([*split[:n], "\ts_nop 0", *split[n + 1 :]]), lds, waves) for n in lines)


def main(arches: list[str]) -> None:
    torch.set_num_threads(1)
    for arch in arches:
        text, lds, waves = compiled(arch)
        assert passes(text, lds, waves)
        lines = text[: text.index("s_endpgm")].split("\n")
        found = [[n for n, line in enumerate(lines) if pattern.match(line)] for pattern in (BARRIER, WAIT, INSTRUCTION)]
        found[2] = sorted(random.Random(0).sample(found[2], CHANCE))
        told = [f"{rate(text, lds, waves, chosen)} of {len(chosen)}" for chosen in found]
        print(f"| {arch} | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(ARCHES))
