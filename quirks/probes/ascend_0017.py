"""triton-ascend turns a gather of keys as columns into a scalar copy for each element.

The adapter lowers the addresses `token[None, :] * stride + d[:, None]` to D x N copies of one element; as rows,
`token[:, None] * stride + d[None, :]`, the keys take N copies of D elements, and `tl.trans` is free.

Expected: a copy for each key, whichever way the tile lies.
"""

import re

import triton
import triton.language as tl
from harness import Bench, BugFound, Code, main


@triton.jit
def gather(k, tokens, out, N: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    token, d = tl.load(tokens + tl.arange(0, N)), tl.arange(0, D)
    if COLUMNS:
        tile = tl.load(k + token[None, :] * D + d[:, None])
    else:
        tile = tl.trans(tl.load(k + token[:, None] * D + d[None, :]))
    tl.store(out + d[:, None] * N + tl.arange(0, N)[None, :], tile)


@triton.jit
def contiguous(k, tokens, out, N: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    places = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + places, tl.load(k + places))


def copies(code: Code) -> int:
    """Return the number of copies in the lowered text's nested loops: the product of constant bounds around a copy."""
    most, open_loops = 0, []
    constants = {
        name: int(value) for name, value in re.findall(r"(%\w+) = arith.constant (\d+) : index", code.texts["linalg"])
    }
    for line in code.texts["linalg"].splitlines():
        loop = re.search(r"scf\.for .* to (%\w+) step", line)
        if loop:
            open_loops.append((len(line) - len(line.lstrip()), constants.get(loop.group(1), 1)))
        elif line.strip() == "}" and open_loops and len(line) - len(line.lstrip()) == open_loops[-1][0]:
            open_loops.pop()
        elif re.search(r"memref\.copy|memref\.load|tensor\.extract|tensor\.insert_slice", line) and open_loops:
            count = 1
            for _, bound in open_loops:
                count *= bound
            most = max(most, count)
    return most


def probe(arm: str, bench: Bench) -> None:
    types = {"k": "*fp16", "tokens": "*i32", "out": "*fp16"}
    keys, width = 16, 128
    kernel = contiguous if arm == "control" else gather
    code = bench.compile(kernel, types, {"N": keys, "D": width, "COLUMNS": arm == "off"})
    seen = copies(code)
    if arm == "control" and seen:
        raise BugFound(f"a contiguous tile takes {seen} copies")
    if seen > keys:
        raise BugFound(f"{seen} scalar copies for {keys} keys of {width} elements")


if __name__ == "__main__":
    main(probe, "ascend:ascend910b2", __doc__)
