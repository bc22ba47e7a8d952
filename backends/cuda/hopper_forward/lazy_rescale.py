"""The Hopper forward's accumulator, rescaled only where a row's maximum has grown much (Form.LAZY).

Weights may be relative to any number: the last division removes it. So a row keeps the maximum that they are relative
to until a tile's is more than 2^GROWTH times as large; weights are then at most 2^GROWTH, which fp16 holds, and so are
their sums in float32. A row's LSE is that number and the logarithm of the sum of its weights, as ever, and so are the
partial results of split keys.

Whether the factor of any row of a warp is not 1 is a vote of its lanes, and the products that follow are a branch of
that warp alone: nobody waits for anybody. With scores of one size hardly any tile takes it. The idea is
FlashAttention-4's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.sizes import GROUP_ROWS

GROWTH: gl.constexpr = gl.constexpr(8.0)  # in powers of 2
_THREADS = 128  # of a warp group


def _multiplied(numbers: int) -> str:
    """PTX. A thread's numbers are of two rows, by turns two of one and two of the other; so are their factors, which
    are the operands after them. A factor that is NaN is not 1."""
    kept = "".join(f"mov.b32 ${i}, ${numbers + i};\n" for i in range(numbers))
    multiplied = "".join(f"mul.f32 ${i}, ${i}, ${2 * numbers + i};\n" for i in range(numbers))
    return f"""{{
.reg .pred some, other;
setp.neu.f32 some, ${2 * numbers}, 1.0;
setp.neu.f32 other, ${2 * numbers + 2}, 1.0;
or.pred some, some, other;
vote.sync.any.pred some, some, 0xffffffff;
{kept}@!some bra.uni KEPT;
{multiplied}KEPT:
}}"""


def _operands(numbers: int) -> str:
    return ",".join(["=f"] * numbers + ["f"] * 2 * numbers)


_NUMBERS = {dim: GROUP_ROWS * dim // _THREADS for dim in (64, 128, 256)}
_CODE = {dim: _multiplied(numbers) for dim, numbers in _NUMBERS.items()}
_OPERANDS = {dim: _operands(numbers) for dim, numbers in _NUMBERS.items()}


@gluon.constexpr_function
def _code(dim):
    return _CODE[dim]


@gluon.constexpr_function
def _constraints(dim):
    return _OPERANDS[dim]


@gluon.constexpr_function
def _pack(dim):
    return _NUMBERS[dim]


@gluon.jit
def rescaled_where_needed(acc, factor, form):
    """acc [64, DIM] times each row's factor."""
    code: gl.constexpr = _code(form.DIM)
    constraints: gl.constexpr = _constraints(form.DIM)
    pack: gl.constexpr = _pack(form.DIM)
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, form.OUTPUT)), 1)
    # Not pure: it stays where it stands, outside the products that are under way.
    return gl.inline_asm_elementwise(code, constraints, [acc, factor], dtype=gl.float32, is_pure=False, pack=pack)


@gluon.jit
def reference(before, found):
    """What a row's weights are relative to, in powers of 2: as before or the maximum found; -inf until there is one."""
    return gl.where(found > before + GROWTH, found, before)
