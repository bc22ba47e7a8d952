"""The producer of lists for the latent kernel: a warp group gathers the rows of a tile's slots into shared memory."""

# No `from __future__ import annotations`: Triton's aggregates read the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from portattn.backends.cuda.gluon_names import gather, reinterpreted, sync
from portattn.backends.cuda.hopper_latent import CHUNKS, FREE, KEYS, RANK, ROPE

_FREE: gl.constexpr = gl.constexpr(FREE)
_KEYS: gl.constexpr = gl.constexpr(KEYS)
_LATENT: gl.constexpr = gl.constexpr(RANK)
_ROPE: gl.constexpr = gl.constexpr(ROPE)
_CHUNKS: gl.constexpr = gl.constexpr(CHUNKS)
_CHUNK: gl.constexpr = gl.constexpr(RANK // CHUNKS)

# Gathered rows: 16 bytes a thread. Of bytes, four numbers a word, a row takes four threads: once they are widened,
# eight threads write half of two rows' 128 bytes each, which the swizzle puts in different banks.
_GATHER: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_BYTES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
_BYTES_TAIL: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))


@gluon.jit
def load_slots(tile, work, layout: gl.constexpr):
    """Load the slots of a tile's keys [KEYS], below 0 for holes and behind the list's length."""
    places = tile * _KEYS + gl.arange(0, _KEYS, layout)
    return gl.load(work.table + places, mask=places < work.length, other=-1)


@gluon.jit
def _row_places(k, slots, most, row_units):
    """Return pointers to the rows of slots [KEYS, 1], which are row_units times 16 bytes apart."""
    unit: gl.constexpr = 16 // (k.dtype.element_ty.primitive_bitwidth // 8)
    return (k + gl.minimum(gl.maximum(slots, 0), most).to(gl.int64) * row_units * unit)[:, None]


@gluon.jit
def gather_rows(k, row_units, most, work, shared):
    """Load the rows of every tile's slots, by one warp group; holes become rows of zeros."""
    columns = gl.arange(0, _CHUNK, gl.SliceLayout(0, _GATHER))[None, :]
    tail_columns = gl.arange(0, _ROPE, gl.SliceLayout(0, _GATHER))[None, :]
    slots = load_slots(work.first, work, gl.SliceLayout(1, _GATHER))
    for i in range(work.tiles):
        buffer = i % 2
        rows, there = _row_places(k, slots, most, row_units), (slots >= 0)[:, None]
        slots = load_slots(work.first + i + 1, work, gl.SliceLayout(1, _GATHER))  # ahead of the waits below
        for turn in gl.static_range(2):
            half = buffer ^ turn  # the owner's first: it is free first
            if i >= 2:
                sync(_FREE + 2 * buffer + half, work.LOADERS)
            if turn == 0:  # the owner has read the tail before it frees its half
                place = shared.k_tail.index(buffer)
                gather(place, rows + (_LATENT + tail_columns), mask=there)
            for j in gl.static_range(_CHUNKS // 2):
                chunk = half * (_CHUNKS // 2) + j
                place = shared.k.index(buffer * _CHUNKS + chunk)
                gather(place, rows + (chunk * _CHUNK + columns), mask=there)
                # Every thread arrives when its copies so far are there.
                full = shared.k_full.index(buffer * _CHUNKS + chunk)
                async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _load_bytes(rows, there, chunk):
    """Load a chunk of fp8_ds_mla rows as words of four numbers [KEYS, CHUNK / 4], and its scales [KEYS, 1]."""
    words = gl.arange(0, _CHUNK // 4, gl.SliceLayout(0, _BYTES))[None, :]
    found = gl.load(rows.to(gl.pointer_type(gl.int32)) + (chunk * (_CHUNK // 4) + words), mask=there, other=0)
    scales = gl.load(rows.to(gl.pointer_type(gl.float32)) + (_LATENT // 4 + chunk), mask=there, other=0.0)
    return found, scales


@gluon.jit
def _store_widened(place, words, scales):
    """Write e4m3 numbers times their scales, as bfloat16, to a chunk in shared memory."""
    low, high = gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b, c, d, e, f;
        .reg .b32 x, y;
        .reg .f32 p, q, r, s;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 x, a;
        cvt.rn.f16x2.e4m3x2 y, b;
        mov.b32 {c, d}, x;
        mov.b32 {e, f}, y;
        cvt.f32.f16 p, c;
        cvt.f32.f16 q, d;
        cvt.f32.f16 r, e;
        cvt.f32.f16 s, f;
        mul.f32 p, p, $3;
        mul.f32 q, q, $3;
        mul.f32 r, r, $3;
        mul.f32 s, s, $3;
        cvt.rn.bf16x2.f32 $0, q, p;
        cvt.rn.bf16x2.f32 $1, s, r;
        }
        """,
        "=r,=r,r,r",
        [words, scales],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    pairs = gl.join(low, high).reshape([_KEYS, _CHUNK // 2])
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    reinterpreted(place, gl.int32, [_KEYS, _CHUNK // 2], layout).store(pairs)


@gluon.jit
def gather_bytes(k, row_units, most, work, shared):
    """Like `gather_rows`, of fp8_ds_mla rows (bytes): 512 e4m3 numbers, 4 float32 scales, 64 bfloat16 numbers."""
    tail_columns = gl.arange(0, _ROPE, gl.SliceLayout(0, _BYTES_TAIL))[None, :]
    slots = load_slots(work.first, work, gl.SliceLayout(1, _BYTES))
    rows, there = _row_places(k, slots, most, row_units), (slots >= 0)[:, None]
    found, scales = _load_bytes(rows, there, 0)
    for i in range(work.tiles):
        buffer = i % 2
        tail_slots = gl.convert_layout(slots, gl.SliceLayout(1, _BYTES_TAIL))
        slots = load_slots(work.first + i + 1, work, gl.SliceLayout(1, _BYTES))
        for step in gl.static_range(_CHUNKS):
            half = buffer ^ (step // (_CHUNKS // 2))  # the owner's first: it is free first
            chunk = half * (_CHUNKS // 2) + step % (_CHUNKS // 2)
            # The next chunk's bytes are under way while this one's are widened, or wait for their place.
            if step + 1 < _CHUNKS:
                after = (buffer ^ ((step + 1) // (_CHUNKS // 2))) * (_CHUNKS // 2) + (step + 1) % (_CHUNKS // 2)
            else:
                after = (1 - buffer) * (_CHUNKS // 2)
                rows, there = _row_places(k, slots, most, row_units), (slots >= 0)[:, None]
            next_found, next_scales = _load_bytes(rows, there, after)
            if step % (_CHUNKS // 2) == 0 and i >= 2:
                sync(_FREE + 2 * buffer + half, work.LOADERS)
            full = shared.k_full.index(buffer * _CHUNKS + chunk)
            if step == 0:  # the owner has read the tail before it frees its half
                tails = _row_places(k, tail_slots, most, row_units) + (_LATENT + 16)
                tails = tails.to(gl.pointer_type(gl.bfloat16)) + tail_columns
                tail_there = (tail_slots >= 0)[:, None]
                gather(shared.k_tail.index(buffer), tails, mask=tail_there)
                async_copy.mbarrier_arrive(full, increment_count=False)
            _store_widened(shared.k.index(buffer * _CHUNKS + chunk), found, scales)
            fence_async_shared()
            mbarrier.arrive(full, count=1)
            found, scales = next_found, next_scales
