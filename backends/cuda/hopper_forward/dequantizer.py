"""Pages of 8-bit keys and values, dequantized by four warps of the Hopper forward.

TMA brings bytes, which products of 16 bits cannot read. So a tile of keys and a tile of values have room as bytes
beside the buffers. The dequantizer's warps read them part by part, each lane 8 numbers of a row, convert them, and
store them to a buffer as TMA would have. The bytes of the next tile come during a whole step of the consumers.

Keys get the queries' dtype. Values are float16, which holds every number of the formats exactly, at half the
conversions that bfloat16 costs, and probabilities are rounded to it. Scales of a head are factors on the scores and on
the output (low_precision_products.py).
"""

# No `from __future__ import annotations`: Triton reads the annotations of constants.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from portattn.backends.cuda.gluon_names import reinterpreted, sync
from portattn.backends.cuda.hopper_forward.fragments import following
from portattn.backends.cuda.hopper_forward.products import FREE
from portattn.backends.cuda.hopper_forward.tile_scheduler import BOXES, read, tile_keys

_PART = 8192  # bytes that the warps convert at a time: 16 registers of a lane

# Four numbers, the first lowest, to two pairs.
_PAIRS = {
    "e4m3": "cvt.rn.f16x2.e4m3x2 {0}, low; cvt.rn.f16x2.e4m3x2 {1}, high;",
    "e5m2": "cvt.rn.f16x2.e5m2x2 {0}, low; cvt.rn.f16x2.e5m2x2 {1}, high;",
}
# A pair of float16 to one of bfloat16, which holds every number of the formats too.
_BFLOAT = "mov.b32 {{a, b}}, {0}; cvt.f32.f16 x, a; cvt.f32.f16 y, b; cvt.rn.bf16x2.f32 {1}, y, x;"


def _code(kind: str, bfloat: bool) -> str:
    lines = ["{", ".reg .b16 low, high, a, b; .reg .b32 first, second; .reg .f32 x, y;", "mov.b32 {low, high}, $2;"]
    lines.append(_PAIRS[kind].format(*("first", "second") if bfloat else ("$0", "$1")))
    if bfloat:
        lines += [_BFLOAT.format("first", "$0"), _BFLOAT.format("second", "$1")]
    return "\n".join([*lines, "}"])


_CODE = {(kind, bfloat): _code(kind, bfloat) for kind in _PAIRS for bfloat in (False, True)}


@gluon.constexpr_function
def _converter(form, dtype):
    return _CODE[form.FORMAT.value, dtype == gl.bfloat16]


@gluon.constexpr_function
def _words(form):
    """Return the layout of a tile's words of four numbers, two to a lane: it stores 16 bytes, in no bank's way."""
    lanes = form.DIM.value // 8
    return gl.BlockedLayout([1, 2], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def _rows(form):
    return min(_PART // form.DIM.value, form.KEYS.value)


@gluon.constexpr_function
def byte_layout(form):
    """Return the layout of a tile of bytes that several loads bring."""
    return gl.NVMMASharedLayout(min(form.DIM.value, 128), 8, 4)


@gluon.jit
def _dequantize_tile(place: gl.constexpr, buffers, slot, full, shared, form):
    """Convert the tile of keys (place 0) or values (1) to the dtype of a buffer, store it and arrive at its barrier."""
    code: gl.constexpr = _converter(form, buffers.dtype)
    rows: gl.constexpr = _rows(form)
    words: gl.constexpr = _words(form)
    quads: gl.constexpr = gl.NVMMASharedLayout(min(form.DIM, 128), 32, 2)
    pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    source = reinterpreted(shared.bytes, gl.int32, [2, form.KEYS, form.DIM // 4], quads).index(place)
    target = reinterpreted(buffers, gl.int32, [form.STAGES, form.KEYS, form.DIM // 2], pairs).index(slot)
    for part in gl.static_range(form.KEYS // rows):
        held = source.slice(part * rows, rows, dim=0).load(words)
        first, second = gl.inline_asm_elementwise(
            code, "=r,=r,r", [held], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        found = gl.reshape(gl.join(first, second), [rows, form.DIM // 2])
        target.slice(part * rows, rows, dim=0).store(found)
    fence_async_shared()
    mbarrier.arrive(full.index(slot), count=1)
    mbarrier.arrive(shared.bytes_free.index(place), count=1)


@gluon.jit
def dequantize(sizes, shared, form):
    """Dequantize the key tiles of each tile of rows, as the producer brings them."""
    slot, phase, box, box_phase = 0, 0, 0, 0
    mbarrier.wait(shared.mail_full.index(box), box_phase)
    work = read(box, shared)
    while work.row >= 0:
        begin, end, _some = tile_keys(work, sizes, form)
        mbarrier.arrive(shared.mail_free.index(box), count=1)
        for _ in range(end - begin):
            sync(FREE + slot, form.PARTY)
            mbarrier.wait(shared.bytes_full.index(0), phase)
            _dequantize_tile(0, shared.k, slot, shared.k_full, shared, form)
            sync(FREE + form.STAGES + slot, form.PARTY)
            mbarrier.wait(shared.bytes_full.index(1), phase)
            _dequantize_tile(1, shared.v, slot, shared.v_full, shared, form)
            phase ^= 1
            slot += 1
            if slot == form.STAGES:
                slot = 0
        box, box_phase = following(box, box_phase, BOXES)
        mbarrier.wait(shared.mail_full.index(box), box_phase)
        work = read(box, shared)
    for j in gl.static_range(2 * form.STAGES):  # the last arrivals, for which nothing is loaded
        sync(FREE + j, form.PARTY)
