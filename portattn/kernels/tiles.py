"""Named tile primitives. What backends disagree on is decided here, by Lowering choices passed as constexprs.

No helper returns early (triton-ascend 3.2.0 cannot legalise that in a loop), and globals are constexprs (from
Triton 3.3 on a kernel cannot read a plain Python global).

Constructs that not every Triton has (block pointers, tensor descriptors, programmatic dependent launch) come first.
Triton 3.2 resolves every name of a jit function, dead branches included: so each construct sits in a function of its
own. Where a toolchain lacks it, a function chosen at import fails to compile with a plain reason.
"""

import triton
import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import LoopShape, Pages, Rows

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gdc_launch_dependents = gdc_wait = None

# Block pointers: Triton 3.9 no longer has them.


@triton.jit
def load_block_rows(base, rows, stride_row, stride_col,
                    COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
                    BOUNDED: tl.constexpr):  # fmt: skip
    """Load the first BLOCK_ROWS rows of a (rows, COLS) matrix; elements outside read as 0 when BOUNDED."""
    block = tl.make_block_ptr(base, (rows, COLS), (stride_row, stride_col), (0, 0), (BLOCK_ROWS, BLOCK_COLS), (1, 0))
    if BOUNDED and COLS != BLOCK_COLS:
        tile = tl.load(block, boundary_check=(0, 1), padding_option="zero")
    elif BOUNDED:
        tile = tl.load(block, boundary_check=(0,), padding_option="zero")
    elif COLS != BLOCK_COLS:
        tile = tl.load(block, boundary_check=(1,), padding_option="zero")
    else:
        tile = tl.load(block)
    return tile


@triton.jit
def load_block_columns(base, rows, stride_row, stride_col,
                       COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BOUNDED: tl.constexpr,
                       BLOCK_ORDER: tl.constexpr):  # fmt: skip
    """Load the same tile as its transpose (BLOCK_COLS, BLOCK_ROWS), in either order of its dimensions."""
    if BLOCK_ORDER == "column":
        block = tl.make_block_ptr(
            base, (COLS, rows), (stride_col, stride_row), (0, 0), (BLOCK_COLS, BLOCK_ROWS), (0, 1)
        )
    else:
        block = tl.make_block_ptr(
            base, (COLS, rows), (stride_col, stride_row), (0, 0), (BLOCK_COLS, BLOCK_ROWS), (1, 0)
        )
    if BOUNDED and COLS != BLOCK_COLS:
        tile = tl.load(block, boundary_check=(0, 1), padding_option="zero")
    elif BOUNDED:
        tile = tl.load(block, boundary_check=(1,), padding_option="zero")
    elif COLS != BLOCK_COLS:
        tile = tl.load(block, boundary_check=(0,), padding_option="zero")
    else:
        tile = tl.load(block)
    return tile


# Tensor descriptors (TMA on sm_90 and later, ordinary loads elsewhere): Triton before 3.4 has none.

if hasattr(tl, "make_tensor_descriptor"):

    @triton.jit
    def describe_rows(base, rows, stride_row, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
        """Return the descriptor of a (rows, COLS) matrix with contiguous rows. Tiles past its edge read as 0."""
        return tl.make_tensor_descriptor(
            base,
            shape=[tl.maximum(rows, 1), COLS],  # none is defined for 0 rows; no tile of such a matrix is read
            strides=[stride_row, 1],
            block_shape=[BLOCK_ROWS, BLOCK_COLS],
        )

    @triton.jit
    def describe_numbers(base, count, BLOCK: tl.constexpr):
        """Return the descriptor of `count` numbers from an aligned pointer on. Tiles past their end read as 0."""
        return tl.make_tensor_descriptor(base, shape=[tl.maximum(count, 1)], strides=[1], block_shape=[BLOCK])

else:

    @triton.jit
    def describe_rows(base, rows, stride_row, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
        """Fail to compile: the toolchain has no descriptors."""
        tl.static_assert(False, "this Triton has no tensor descriptors: load must be pointer or block_ptr")
        return base

    @triton.jit
    def describe_numbers(base, count, BLOCK: tl.constexpr):
        """Fail to compile: the toolchain has no descriptors."""
        tl.static_assert(False, "this Triton has no tensor descriptors: load must be pointer or block_ptr")
        return base


# Programmatic dependent launch (NVIDIA, sm_90 and later): a kernel may begin while the one before still runs, waits
# for its end, and lets the next one begin. Triton before 3.4 and other vendors' compilers have no such launch.

if gdc_wait is not None:

    @triton.jit
    def wait_for_kernel_before():
        """Wait for the end of the kernel before: what it has written is visible afterwards."""
        gdc_wait()

    @triton.jit
    def let_next_kernel_begin():
        """Let the next kernel, if its launch is dependent, begin when all programs have come here. It still waits for
        this kernel's end (wait_for_kernel_before)."""
        gdc_launch_dependents()

else:

    @triton.jit
    def wait_for_kernel_before():
        """Fail to compile: the toolchain has no dependent launches."""
        tl.static_assert(False, "this Triton has no programmatic dependent launch: launch_pdl must not be set")

    @triton.jit
    def let_next_kernel_begin():
        """Fail to compile: the toolchain has no dependent launches."""
        tl.static_assert(False, "this Triton has no programmatic dependent launch: launch_pdl must not be set")


@triton.jit
def row_source(base, rows, stride_row, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
               LOAD: tl.constexpr):  # fmt: skip
    """Return the source of a (rows, COLS) matrix's tiles: a descriptor, or simply its base pointer."""
    if LOAD == "descriptor":
        source = describe_rows(base, rows, stride_row, COLS, BLOCK_ROWS, BLOCK_COLS)
    else:
        source = base
    return source


@triton.jit
def tile_place(source, table, start, end, pages, stride_page, stride_row,
               BLOCK_ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_LOOP: tl.constexpr,
               READS: tl.constexpr):  # fmt: skip
    """Return the base pointer of the tile's rows, and their offsets [BLOCK_ROWS] from it.

    PAGE_SIZE 0: `source` is one sequence's matrix. Otherwise it is a cache of pages, and `table` the sequence's page
    ids. A tile that lies in one page (`per_page`) needs one id; else (`flat_masked`) each row looks up its own. With
    `slots` the table holds a slot for each row. Ids are clamped: those that were never validated read inside the cache.
    """
    r = tl.arange(0, BLOCK_ROWS)
    if PAGE_SIZE == 0:
        # The distance to the tile can pass 2^31 elements, the distances inside it do not: one 64-bit scalar.
        base = source + start.to(tl.int64) * stride_row
        offsets = r * stride_row
    elif PAGE_LOOP == "per_page":
        page = tl.minimum(tl.maximum(tl.load(table + start // PAGE_SIZE), 0), pages - 1)
        base = source + page.to(tl.int64) * stride_page + (start % PAGE_SIZE).to(tl.int64) * stride_row
        offsets = r * stride_row
    elif PAGE_LOOP == "slots":
        slot = tl.maximum(load_slots(table, start + r, end, READS), 0)
        base = source
        offsets = (
            tl.minimum(slot // PAGE_SIZE, pages - 1).to(tl.int64) * stride_page
            + (slot % PAGE_SIZE).to(tl.int64) * stride_row
        )
    else:
        at = start + r
        if READS == "inside":
            page = tl.load(table + tl.minimum(at, end - 1) // PAGE_SIZE)
        else:
            page = tl.load(table + at // PAGE_SIZE, mask=at < end, other=0)
        page = tl.minimum(tl.maximum(page, 0), pages - 1)
        base = source
        offsets = page.to(tl.int64) * stride_page + (at % PAGE_SIZE).to(tl.int64) * stride_row
    return base, offsets


@triton.jit
def load_rows(source, table, start, end, pages, stride_page, stride_row, stride_col,
              COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BOUNDED: tl.constexpr,
              LOAD: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_LOOP: tl.constexpr,
              READS: tl.constexpr):  # fmt: skip
    """Load tile [BLOCK_ROWS, BLOCK_COLS] from row `start`; rows from `end` read as 0 when BOUNDED, columns always."""
    if LOAD == "descriptor" and PAGE_SIZE == 0:
        tile = source.load([start, 0])
    elif LOAD == "descriptor":
        # The pages are one matrix, of which this is a page's part: rows from `end` on hold what the page holds.
        page = tl.minimum(tl.maximum(tl.load(table + start // PAGE_SIZE), 0), pages - 1)
        tile = source.load([page * PAGE_SIZE + start % PAGE_SIZE, 0])
    elif LOAD == "block_ptr" and (PAGE_SIZE == 0 or PAGE_LOOP == "per_page"):
        base, offsets = tile_place(source, table, start, end, pages, stride_page, stride_row, BLOCK_ROWS, PAGE_SIZE,
                                   PAGE_LOOP, READS)  # fmt: skip
        tile = load_block_rows(base, end - start, stride_row, stride_col, COLS, BLOCK_ROWS, BLOCK_COLS, BOUNDED)
    else:
        base, offsets = tile_place(source, table, start, end, pages, stride_page, stride_row, BLOCK_ROWS, PAGE_SIZE,
                                   PAGE_LOOP, READS)  # fmt: skip
        r = tl.arange(0, BLOCK_ROWS)
        c = tl.arange(0, BLOCK_COLS)
        pointers = base + offsets[:, None] + c[None, :] * stride_col
        if BOUNDED and COLS != BLOCK_COLS:
            there = is_key(table, start + r, end, PAGE_LOOP, READS)
            tile = tl.load(pointers, mask=there[:, None] & (c < COLS)[None, :], other=0.0)
        elif BOUNDED:
            tile = tl.load(pointers, mask=is_key(table, start + r, end, PAGE_LOOP, READS)[:, None], other=0.0)
        elif COLS != BLOCK_COLS:
            tile = tl.load(pointers, mask=(c < COLS)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@records.jit
def read_rows(rows: Rows, pages: Pages, start, end, BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr):
    """Load the tile [BLOCK_N, BLOCK_COLS] of stored rows from `start` on; see load_rows."""
    return load_rows(rows.source, pages.table, start, end, pages.total, rows.stride_page, rows.stride_row,
                     rows.stride_col, rows.COLS, BLOCK_N, rows.BLOCK_COLS, BOUNDED, rows.LOAD, pages.SIZE, pages.LOOP,
                     pages.READS)  # fmt: skip


@records.jit
def read_columns(rows: Rows, pages: Pages, start, end, C: LoopShape, BOUNDED: tl.constexpr):
    """Load the tile of read_rows as its transpose [BLOCK_COLS, BLOCK_N]: what Q·Kᵀ takes on the right."""
    if C.K_TILE == "row" or rows.LOAD == "descriptor":
        tile = tl.trans(read_rows(rows, pages, start, end, C.BLOCK_N, BOUNDED))
    elif rows.LOAD == "block_ptr" and (pages.SIZE == 0 or pages.LOOP == "per_page"):
        base, offsets = tile_place(rows.source, pages.table, start, end, pages.total, rows.stride_page,
                                   rows.stride_row, C.BLOCK_N, pages.SIZE, pages.LOOP, pages.READS)  # fmt: skip
        tile = load_block_columns(base, end - start, rows.stride_row, rows.stride_col, rows.COLS, C.BLOCK_N,
                                  rows.BLOCK_COLS, BOUNDED, C.BLOCK_ORDER)  # fmt: skip
    else:
        base, offsets = tile_place(rows.source, pages.table, start, end, pages.total, rows.stride_page,
                                   rows.stride_row, C.BLOCK_N, pages.SIZE, pages.LOOP, pages.READS)  # fmt: skip
        r = tl.arange(0, C.BLOCK_N)
        c = tl.arange(0, rows.BLOCK_COLS)
        pointers = base + c[:, None] * rows.stride_col + offsets[None, :]
        if BOUNDED and rows.COLS != rows.BLOCK_COLS:
            there = (c < rows.COLS)[:, None] & is_key(pages.table, start + r, end, pages.LOOP, pages.READS)[None, :]
            tile = tl.load(pointers, mask=there, other=0.0)
        elif BOUNDED:
            there = is_key(pages.table, start + r, end, pages.LOOP, pages.READS)
            tile = tl.load(pointers, mask=there[None, :], other=0.0)
        elif rows.COLS != rows.BLOCK_COLS:
            tile = tl.load(pointers, mask=(c < rows.COLS)[:, None], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def load_query_rows(pointers, valid, stride_col,
                    COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, NEGATED: tl.constexpr):  # fmt: skip
    """Load the query tile [BLOCK_M, BLOCK_COLS] whose row i starts at pointers[i]; invalid rows are 0.

    NEGATED carries the sign of a negative scale.
    """
    c = tl.arange(0, BLOCK_COLS)
    tile = tl.load(pointers[:, None] + c[None, :] * stride_col, mask=valid[:, None] & (c < COLS)[None, :], other=0.0)
    if NEGATED:
        tile = -tile
    return tile


@triton.jit
def load_slots(table, at, end, READS: tl.constexpr):
    """Load the slots (page · page size + row) of a list's places `at` [BLOCK_ROWS]; below 0 is a hole."""
    if READS == "inside":
        slots = tl.load(table + tl.minimum(at, end - 1))
    else:
        slots = tl.load(table + at, mask=at < end, other=-1)
    return slots


@triton.jit
def is_key(table, at, end, PAGE_LOOP: tl.constexpr, READS: tl.constexpr):
    """Return whether each place `at` [BLOCK_ROWS] holds a key: it lies before `end` and is no hole."""
    there = at < end
    if PAGE_LOOP == "slots":
        there = there & (load_slots(table, at, end, READS) >= 0)
    return there


@triton.jit
def sequence_bounds(length, leftpad, batch, capacity):
    """Return the first and end row of one sequence inside its (capacity)-row slot; both optional (None), both clamped.

    Clamping keeps every access inside the storage even for lengths that were never validated.
    """
    # capacity - capacity is a zero that is a tensor under the interpreter too, where a literal 0 would be an int.
    first = capacity - capacity
    if leftpad is not None:
        first = tl.minimum(tl.maximum(tl.load(leftpad + batch), 0), capacity)
    end = capacity
    if length is not None:
        # Clamped before it is added: a wild length must not wrap around.
        end = first + tl.minimum(tl.maximum(tl.load(length + batch), 0), capacity - first)
    return first, end


@triton.jit
def packed_first(cu_seqlens, batch, batches, total):
    """Load the first row of sequences of packed rows, clamped; 0 of the first. `batch`: up to `batches`, or a tile."""
    # Only an upper bound in the mask: compilers that know no other one would read the whole tile.
    first = tl.load(cu_seqlens + batch, mask=batch < batches + 1, other=0)
    return tl.minimum(tl.maximum(tl.where(batch > 0, first, 0), 0), total)


@triton.jit
def packed_bounds(cu_seqlens, batch, batches, total):
    """Load first row and end row of a sequence of packed rows, clamped. Sequence `batches` follows the last."""
    first = packed_first(cu_seqlens, batch, batches, total)
    end = tl.load(cu_seqlens + tl.minimum(batch + 1, batches))
    end = tl.minimum(tl.maximum(tl.where(batch == batches, total, end), first), total)
    return first, end


@triton.jit
def of_a_sequence(batch, batches, BLOCK_M: tl.constexpr):
    """Return whether a tile's rows belong to a sequence, not behind the last: one answer for all, as a block.

    A scalar's answer beside a block's becomes int32 in the interpreter of Triton 3.9.0, which takes no such mask.
    """
    return tl.full([BLOCK_M], batch, tl.int32) < batches


@triton.jit
def heads_in_turn(tile, row_tiles, together, tiles):
    """Return (row tile, head) of a tile: `together` heads at a time, of each row tile one after the other.

    Their keys and values share a cache. What ends a launch is then the last rows of many heads; in order of heads it is
    all rows of the last one, which keep few cores busy for long.
    """
    of_group = row_tiles * together
    first = tile // of_group * together
    heads = tl.minimum(tiles // row_tiles - first, together)
    rest = tile % of_group
    return rest // heads, first + rest % heads


@triton.jit
def packed_tile(cu_seqlens, tile, batches, total, per_row,
                BLOCK_M: tl.constexpr, SEARCH: tl.constexpr):  # fmt: skip
    """Return the sequence of a tile of packed rows, and the tile's number in that sequence.

    Sequence b's tiles begin at tile cu_seqlens[b]·per_row // BLOCK_M + b, which leaves room for a ragged last tile of
    each before it; so the number of launched tiles needs no lengths. The sequence is the last that has begun. Rows
    after the last sequence are sequence number `batches`, so that they are written too. Beginnings that were never
    validated, and fall, still have every row written, and no row before a sequence's first.

    per_row  tile rows that one packed row takes (the query heads that share a key/value head)
    """
    sequence = batches - batches
    for chunk in range(tl.cdiv(batches + 1, SEARCH)):
        b = chunk * SEARCH + tl.arange(0, SEARCH)
        first = packed_first(cu_seqlens, b, batches, total)
        begun = first.to(tl.int64) * per_row // BLOCK_M + b <= tile
        sequence = tl.maximum(sequence, tl.max(tl.where(begun & (b <= batches), b, 0), 0))
    first = packed_first(cu_seqlens, sequence, batches, total)
    return sequence, tile - ((first.to(tl.int64) * per_row // BLOCK_M).to(tl.int32) + sequence)
