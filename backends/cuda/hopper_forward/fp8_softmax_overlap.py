"""A tile's probabilities in e4m3 by halves of its columns, with the values of the tile before added between them.

The second half's powers of two leave the multipliers idle two thirds of the time, and so the accumulator is rescaled
and added to meanwhile. By then the product of values has been complete for long.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from portattn.backends.cuda.hopper_forward.fp8_forward import SHIFT, arrive_after_exponentials
from portattn.backends.cuda.hopper_forward.fragments import lane_sum, split_columns, whole
from portattn.backends.cuda.named_barriers import arrive
from portattn.backends.cuda.sizes import GROUP_ROWS

_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)
_THREADS = 128  # of a warp group


def _after(numbers: int) -> str:
    """Return PTX of numbers * factor - base that depends on `fresh`.

    A thread's numbers are of two rows, by turns two of one and two of the other. ptxas does not know that the minimum
    of a magnitude and 0 is 0.
    """
    lines = ["{", ".reg .f32 z, a, b;", f"abs.f32 z, ${4 * numbers};", "min.f32 z, z, 0f00000000;"]
    lines += [f"neg.f32 a, ${3 * numbers};", f"neg.f32 b, ${3 * numbers + 2};", "sub.f32 a, a, z;", "sub.f32 b, b, z;"]
    lines += [f"fma.rn.f32 ${i}, ${numbers + i}, ${2 * numbers}, {'ab'[i % 4 // 2]};" for i in range(numbers)]
    return "\n".join([*lines, "}"])


_NUMBERS = {columns: GROUP_ROWS * columns // _THREADS for columns in (32, 64)}
_CODE = {columns: _after(numbers) for columns, numbers in _NUMBERS.items()}
_OPERANDS = {columns: ",".join(["=f"] * numbers + ["f"] * 4 * numbers) for columns, numbers in _NUMBERS.items()}


@gluon.constexpr_function
def _code(columns):
    return _CODE[columns]


@gluon.constexpr_function
def _constraints(columns):
    return _OPERANDS[columns]


@gluon.constexpr_function
def _pack(columns):
    return _NUMBERS[columns]


@gluon.constexpr_function
def _times(columns, part):
    """Return the number of halvings from `columns` to `part`."""
    return (columns // part).bit_length() - 1


@gluon.jit
def _scaled_after(s, factor, base, fresh, columns: gl.constexpr, form):
    """Return s * factor - base of [64, columns] after `fresh` [64, DIM]: ptxas would move it before the wait."""
    code: gl.constexpr = _code(columns)
    constraints: gl.constexpr = _constraints(columns)
    pack: gl.constexpr = _pack(columns)
    for j in gl.static_range(_times(form.DIM, columns)):
        fresh, _other = split_columns(fresh, form.DIM // 2**j)
    fresh = gl.convert_layout(fresh, s.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        code, constraints, [s, factor, base, fresh], dtype=gl.float32, is_pure=False, pack=pack
    )


@gluon.jit
def weights_around_values(s, factor, base, acc, alpha, fresh, slot, v_slot, free, form):
    """Probabilities of a tile; a lane's sums of them; and the accumulator with the values of the tile before.

    fresh      the product of those values, under way; alpha: its factor on acc
    slot, v_slot  buffers of keys and of values that are returned on the way, at the barriers from `free` on
    """
    half: gl.constexpr = form.KEYS // 2
    a, b = split_columns(s, form.KEYS)
    base = gl.expand_dims(gl.convert_layout(base, gl.SliceLayout(1, a.type.layout)) - SHIFT, 1)
    a = gl.exp2(a * factor - base)
    sums = lane_sum(a, half)
    arrive_after_exponentials(free + slot, sums, form)
    fresh = warpgroup_mma_wait(0, deps=[fresh])
    arrive(free + form.STAGES + v_slot, form.PARTY)
    alpha = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, form.OUTPUT)), 1)
    # Not pure: it stays between the two waits.
    acc = gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [acc, alpha, fresh], dtype=gl.float32, is_pure=False, pack=1
    )
    b = gl.exp2(_scaled_after(b, factor, base, fresh, half, form))
    sums = sums + lane_sum(b, half)
    return whole(a, b, form), sums, acc
