"""The largest score of each row of a tile, three numbers at a time.

Hopper has a maximum of three whole numbers in one instruction, and of two floats. As whole numbers, floats that are not
negative are in their own order, above all negative ones. So where the largest of a lane's numbers, or what its row's
scores are relative to, is not negative, the maximum of whole numbers is right. Where both are negative, in any lane of
a warp, the warp takes the floats' maximum: a branch of its own, over which nobody waits for anybody.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.sizes import GROUP_ROWS

_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)
_THREADS = 128  # of a warp group


def _largest(names: list[str], kind: str, to: str, chains: int) -> list[str]:
    """PTX: `to` is the largest of these registers, in `chains` chains at first."""
    found, ends = [], []
    for c in range(chains):
        part = names[c::chains]
        end = f"{to}{c}"
        found.append(f"max.{kind} {end}, {part[0]}, {part[1]};")
        found += [f"max.{kind} {end}, {end}, {name};" for name in part[2:]]
        ends.append(end)
    found += [f"max.{kind} {ends[0]}, {ends[0]}, {end};" for end in ends[1:]]
    return found


def _maxima(numbers: int) -> str:
    """PTX. A thread's numbers are of two rows, by turns two of one and two of the other; so are the numbers that they
    are relative to, which are the operands after them. The results of the rows are the first of each."""
    rows = [[f"${numbers + i}" for i in range(numbers) if i % 4 // 2 == row] for row in (0, 1)]
    whole = [line for row, names in zip("ab", rows, strict=True) for line in _largest(names, "s32", row, 2)]
    exact = [line for row, names in zip("ab", rows, strict=True) for line in _largest(names, "f32", row, 2)]
    return "\n".join([
        "{", ".reg .b32 a0, a1, b0, b1; .reg .pred some, other;", *whole,
        f"and.b32 a1, a0, ${2 * numbers};", f"and.b32 b1, b0, ${2 * numbers + 2};", "or.b32 a1, a1, b1;",
        "setp.lt.s32 some, a1, 0;", "vote.sync.any.pred some, some, 0xffffffff;", "@!some bra.uni FOUND;", *exact,
        "FOUND:", "mov.b32 $0, a0;", "mov.b32 $2, b0;", "}",
    ])  # fmt: skip


_NUMBERS = {keys: GROUP_ROWS * keys // _THREADS for keys in (64, 128)}
_CODE = {keys: _maxima(numbers) for keys, numbers in _NUMBERS.items()}
_OPERANDS = {keys: ",".join(["=r"] * numbers + ["r"] * 2 * numbers) for keys, numbers in _NUMBERS.items()}


@gluon.constexpr_function
def _code(keys):
    return _CODE[keys]


@gluon.constexpr_function
def _constraints(keys):
    return _OPERANDS[keys]


@gluon.constexpr_function
def _pack(keys):
    return _NUMBERS[keys]


@gluon.constexpr_function
def _levels(keys):
    return (keys // 8).bit_length() - 1


@gluon.jit
def maximum_of_three(s, before, form):
    """The largest of each row [64] of scores [64, KEYS]; before [64]: what the row's weights are relative to so far,
    or times a positive factor."""
    code: gl.constexpr = _code(form.KEYS)
    constraints: gl.constexpr = _constraints(form.KEYS)
    pack: gl.constexpr = _pack(form.KEYS)
    levels: gl.constexpr = _levels(form.KEYS)
    before = gl.expand_dims(before, 1)
    # Not pure: it stays where it stands, outside the products that are under way.
    x = gl.inline_asm_elementwise(
        code, constraints, [s.to(gl.int32, bitcast=True), before.to(gl.int32, bitcast=True)], dtype=gl.int32,
        is_pure=False, pack=pack,
    )  # fmt: skip
    x, _other = gl.split(gl.reshape(x, [_ROWS, form.KEYS // 8, 4, 2]))
    for j in gl.static_range(levels):
        x = gl.reshape(x, [_ROWS, 2, form.KEYS // 16 // 2**j, 4])
        x, _other = gl.split(gl.permute(x, (0, 2, 3, 1)))
    x = gl.reshape(x, [_ROWS, 4]).to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.max(x, 1), form.ROW)
