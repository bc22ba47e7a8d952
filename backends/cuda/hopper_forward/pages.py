"""How the Hopper forward's producer brings a tile of keys, or of values, out of pages."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.gluon_names import load, reinterpreted


@gluon.jit
def _piece(n, j: gl.constexpr, length, form):
    """The number, among a sequence's, of key tile n's piece j. After the last one with a key the last one again: the
    table has no page there, and what is brought is masked."""
    return gl.minimum(n * form.PIECES + j, gl.maximum(length - 1, 0) // form.PIECE)


@gluon.jit
def pages_of(table, n, length, form):
    """The pages that key tile n's pieces are in. One that does not exist is brought as zeros."""
    pages = (gl.load(table + _piece(n, 0, length, form) // (form.PAGE // form.PIECE)),)
    for j in gl.static_range(1, form.PIECES):
        page = gl.load(table + _piece(n, j, length, form) // (form.PAGE // form.PIECE))
        pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005  # Triton takes no other way to add to one
    return pages


@gluon.jit
def bring(desc, pages, n, length, head, barrier, buffers, slot, form):
    """Key tile n, piece by piece, into a buffer; the loads arrive at one barrier.

    A tile in shared memory is its blocks of 64 columns one after the other, each its rows one after the other, in
    patterns of 8 rows. So a piece of a block is whole patterns side by side, and an array of pieces has the tile's
    bytes.
    """
    parts: gl.constexpr = form.DIM // form.WIDE
    count: gl.constexpr = parts * form.PIECES
    shape: gl.constexpr = [form.STAGES * count, 1, 1, form.PIECE, form.WIDE]
    if form.PIECES > 1:
        buffers = reinterpreted(buffers, buffers.dtype, shape, desc.layout)
    for j in gl.static_range(form.PIECES):
        row = _piece(n, j, length, form) % (form.PAGE // form.PIECE) * form.PIECE
        for c in gl.static_range(parts):
            place = buffers.index(slot * count + c * form.PIECES + j)
            load(desc, [pages[j], head, row, c * form.WIDE], barrier, place)
