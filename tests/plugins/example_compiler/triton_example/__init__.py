"""A compiler for one chip, Example One, which exists in portattn's tests alone. It is added to Triton, as a vendor may.

Triton does the work down to the IR that has the chip's layouts; what is left is to check that, and to write it out."""

import re

MAX_STAGES = 2  # of a pipelined loop
MAGIC = "; example one"
_OPERATION = re.compile(r"^\s*(?:%\S+(?:, %\S+)* = )?\"?((?:tt|ttg|ttng|arith|math|scf|cf)\.\w+)", re.MULTILINE)
_FUNCTION = re.compile(r"tt\.func public @(\w+)")


class Refused(Exception):
    """A kernel that the chip cannot run."""


def emit(ttir: str, ttgir: str, stages: int, scratchpad: int, fuse: bool = False) -> str:
    """The code of a kernel: its name, and an instruction for each operation. Raises Refused.

    fuse  a load and the addition behind it are one instruction. This release loses the addition"""
    if stages > MAX_STAGES:
        raise Refused(f"a loop has at most {MAX_STAGES} stages, and {stages} were asked for")
    before, after = _FUNCTION.search(ttir), _FUNCTION.search(ttgir)
    if before is None or after is None or before[1] != after[1]:
        raise Refused("the two forms of the kernel are not of one function")
    products = [len(re.findall(rf"\btt\.{name}\b", text)) for name, text in (("dot", ttir), ("dot", ttgir))]
    if bool(products[0]) != bool(products[1]):
        raise Refused("a product was lost on the way")
    lines = [f"{MAGIC}: {after[1]}, {scratchpad} bytes"]
    for name in (found.replace(".", "_") for found in _OPERATION.findall(ttgir)):
        if fuse and name == "arith_addf" and lines[-1] == "tt_load":
            continue
        lines.append(name)
    return "\n".join(lines) + "\n"


def check(code: str) -> str:
    """The name of the kernel that a code is of. Raises Refused on what `emit` did not write."""
    head = re.match(rf"{MAGIC}: (\w+), \d+ bytes\n", code)
    if head is None or not re.fullmatch(r"(?:\w+\n)+", code[head.end() :]):
        raise Refused("this is no code of Example One")
    return head[1]
