"""Pages of 8-bit keys and values, dequantized by the producer of the Hopper forward on their way into shared memory.

TMA copies bytes as they are. So four warps load a tile's rows into registers, each lane 8 numbers of a row, convert
them, and store them to where TMA would have put 16-bit numbers: part by part, since both do not fit in registers. A
part's loads are issued as soon as the part of the tile before has left its registers. Keys get the queries' dtype.
Values are float16, which holds every number of the formats exactly, at half the conversions that bfloat16 costs, and
probabilities are rounded to it. Scales of a head are factors on the scores and on the output
(low_precision_products.py).
"""

# No `from __future__ import annotations`: Triton reads the annotations of constants.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from portattn.backends.cuda.gluon_names import reinterpreted

WORDS: gl.constexpr = gl.constexpr(2)  # of a lane's load, of 4 numbers each; it stores 16 bytes, without bank conflicts
STRIDE_UNIT: gl.constexpr = gl.constexpr(16)  # bytes, of which the compiler so knows strides to be multiples
_PART = 8192  # bytes that the warps convert at a time: 16 registers of a lane


@gluon.constexpr_function
def _layout(dim):
    lanes = dim // (4 * WORDS.value)
    return gl.BlockedLayout([1, 1, WORDS.value], [1, 32 // lanes, lanes], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def _pieces(form):
    """Return the pieces of a part of a tile."""
    return min(_PART // form.DIM.value, form.KEYS.value) // form.PIECE.value


@gluon.constexpr_function
def _parts(form):
    return form.PIECES.value // _pieces(form)


@gluon.jit
def _piece_numbers(n, part: gl.constexpr, form):
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _layout(form.DIM)))
    count: gl.constexpr = _pieces(form)
    return n * form.PIECES + part * count + gl.arange(0, count, layout)


@gluon.jit
def _pages_of_part(table, count, n, part: gl.constexpr, length, form):
    piece = _piece_numbers(n, part, form)
    page = gl.load(table + piece // (form.PAGE // form.PIECE), mask=piece * form.PIECE < length, other=-1)
    return gl.where(page < count, page, -1)


@gluon.jit
def page_numbers(table, count, n, length, form):
    """Load the page of each PIECE keys of key tile n, a tensor for each part: negative if there is none.

    count: of all pages"""
    found = (_pages_of_part(table, count, n, 0, length, form),)
    for part in gl.static_range(1, _parts(form)):
        one = _pages_of_part(table, count, n, part, length, form)
        found = found + (one,)  # type: ignore[assignment]  # noqa: RUF005  # Triton takes no other way to add to one
    return found


@gluon.jit
def _load_part(pages, first, page_step, row_step, n, part: gl.constexpr, length, form):
    layout: gl.constexpr = _layout(form.DIM)
    piece = _piece_numbers(n, part, form)
    row = gl.arange(0, form.PIECE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    word = gl.arange(0, form.DIM // 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    place = pages.to(gl.int64) * page_step + piece % (form.PAGE // form.PIECE) * form.PIECE * row_step
    rows = gl.expand_dims(gl.expand_dims(place, 1) + gl.expand_dims(row * row_step, 0), 2) * (STRIDE_UNIT // 4)
    # Pages that do not exist read as zeros, as through TMA.
    begin = gl.where(pages >= 0, piece * form.PIECE, length)
    there = gl.expand_dims(begin, 1) + gl.expand_dims(row, 0) < length
    at = first + (rows + gl.expand_dims(gl.expand_dims(word, 0), 1))
    return gl.load(at, mask=gl.expand_dims(there, 2), other=0)


@gluon.jit
def head_words(numbers, head_step, head):
    """Return a pointer to the words of a head's row 0 of page 0."""
    numbers = numbers.to(gl.pointer_type(gl.int32), bitcast=True)
    return numbers + head.to(gl.int64) * head_step * (STRIDE_UNIT // 4)


@gluon.jit
def load_tile(pages, first, page_step, row_step, n, length, form):
    """Load key tile n, each part [pieces, PIECE, DIM/4] words of four numbers: 0 without a key.

    pages: page_numbers'; first: head_words'; page_step, row_step: strides in STRIDE_UNIT."""
    found = (_load_part(pages[0], first, page_step, row_step, n, 0, length, form),)
    for part in gl.static_range(1, _parts(form)):
        one = _load_part(pages[part], first, page_step, row_step, n, part, length, form)
        found = found + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return found


# Four numbers, the first lowest, to two pairs.
_HALVES = {
    "e4m3": "cvt.rn.f16x2.e4m3x2 {0}, low; cvt.rn.f16x2.e4m3x2 {1}, high;",
    "e5m2": "cvt.rn.f16x2.e5m2x2 {0}, low; cvt.rn.f16x2.e5m2x2 {1}, high;",
}
# A pair of float16 to one of bfloat16, which holds every number of the formats too.
_BFLOAT = "mov.b32 {{a, b}}, {0}; cvt.f32.f16 x, a; cvt.f32.f16 y, b; cvt.rn.bf16x2.f32 {1}, y, x;"


def _code(kind: str, bfloat: bool) -> str:
    lines = ["{", ".reg .b16 low, high, a, b; .reg .b32 first, second; .reg .f32 x, y;", "mov.b32 {low, high}, $2;"]
    lines.append(_HALVES[kind].format(*("first", "second") if bfloat else ("$0", "$1")))
    if bfloat:
        lines += [_BFLOAT.format("first", "$0"), _BFLOAT.format("second", "$1")]
    return "\n".join([*lines, "}"])


_CODE = {(kind, bfloat): _code(kind, bfloat) for kind in _HALVES for bfloat in (False, True)}


@gluon.constexpr_function
def _converter(form, dtype):
    return _CODE[form.FORMAT.value, dtype == gl.bfloat16]


@gluon.jit
def _store_part(words, buffers, slot, part: gl.constexpr, form):
    code: gl.constexpr = _converter(form, buffers.dtype)
    rows: gl.constexpr = _pieces(form) * form.PIECE
    pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    shape: gl.constexpr = [form.STAGES, form.KEYS, form.DIM // 2]
    buffer = reinterpreted(buffers, gl.int32, shape, pairs).index(slot).slice(part * rows, rows, dim=0)
    first, second = gl.inline_asm_elementwise(
        code, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    buffer.store(gl.reshape(gl.join(first, second), [rows, form.DIM // 2]))


@gluon.jit
def store_and_load(tile, buffers, slot, full, pages, first, page_step, row_step, n, length, form):
    """Convert a tile to the dtype of a buffer, store it there and arrive at its barrier; load a tile like load_tile.

    Each part is loaded into the registers of the part just stored."""
    _store_part(tile[0], buffers, slot, 0, form)
    found = (_load_part(pages[0], first, page_step, row_step, n, 0, length, form),)
    for part in gl.static_range(1, _parts(form)):
        _store_part(tile[part], buffers, slot, part, form)
        one = _load_part(pages[part], first, page_step, row_step, n, part, length, form)
        found = found + (one,)  # type: ignore[assignment]  # noqa: RUF005
    fence_async_shared()
    mbarrier.arrive(full.index(slot), count=1)
    return found
