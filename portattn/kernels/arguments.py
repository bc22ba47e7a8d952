"""Records of the arguments of inner functions: records.py says how Triton sees them.

Small names are run-time values, capitals are compile-time choices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

constexpr = tl.constexpr


class Scales(NamedTuple):
    """A cache's scales: one for each token, or of nvfp4 a row of blocks' scales for each.

    source  pointer from the key/value head's first scale on; None if there are none
    """

    source: Any = None
    stride_page: Any = 0
    stride_row: Any = 0


class Rows(NamedTuple):
    """Rows of keys or values: one sequence's matrix, or a cache of pages.

    source      base pointer, or a descriptor (tiles.row_source)
    COLS        elements of a stored row: two numbers each of int4 and nvfp4
    BLOCK_COLS  elements of a tile's row
    FORMAT      how numbers are stored (kernels/dequantize.py)
    """

    source: Any
    stride_page: Any
    stride_row: Any
    stride_col: Any
    COLS: constexpr
    BLOCK_COLS: constexpr
    LOAD: constexpr
    FORMAT: constexpr
    scales: Scales = Scales()


class KeyRows(NamedTuple):
    """Rows of keys, and a tail of columns beyond their power of two, which a second product adds."""

    main: Rows
    tail: Rows


class Pages(NamedTuple):
    """The pages that hold a sequence.

    table  ids of the sequence's pages, or with LOOP "slots" its keys' slots (tiles.is_key); None without pages
    total  pages of the cache: ids are clamped to them
    SIZE   keys of a page; 0 without pages
    LOOP, READS  Lowering's page_loop and reads
    """

    table: Any = None
    total: Any = 0
    SIZE: constexpr = 0  # type: ignore[assignment]
    LOOP: constexpr = "per_page"  # type: ignore[assignment]
    READS: constexpr = "masked"  # type: ignore[assignment]


class Query(NamedTuple):
    """Rows of queries, by a pointer for each [BLOCK_M].

    scales  a scale for each query [BLOCK_M], or None
    COLS, BLOCK_COLS    of the first product, and TAIL_COLS, BLOCK_TAIL of the second; BLOCK_TAIL is 0 if there is one
    NEGATED             whether scores change their sign
    FORMAT, OPERANDS    how queries are stored, and multiplied (kernels/attend.py)
    """

    pointers: Any
    tail_pointers: Any
    stride_col: Any
    tail_stride_col: Any
    scales: Any
    COLS: constexpr
    BLOCK_COLS: constexpr
    TAIL_COLS: constexpr
    BLOCK_TAIL: constexpr
    NEGATED: constexpr
    FORMAT: constexpr = "as_q"  # type: ignore[assignment]
    OPERANDS: constexpr = "widened"  # type: ignore[assignment]


class TileRange(NamedTuple):
    """Key tiles [first, last), tile t being the keys from origin + t·BLOCK_N on, as kv_tile_range gives them.

    full_begin, full_end  the tiles that every row attends whole
    end                   no row attends a key from here on, and none is read
    blocks, BLOCK         None, or a list of blocks of BLOCK keys, through which tiles are found (attend.listed_start)
    LIMITED               of a list: rows attend a part of any tile, of whole blocks too
    """

    origin: Any
    first: Any
    full_begin: Any
    full_end: Any
    last: Any
    end: Any
    blocks: Any = None
    BLOCK: constexpr = 1  # type: ignore[assignment]
    LIMITED: constexpr = False  # type: ignore[assignment]


class ScoreMods(NamedTuple):
    """The caller's functions of scores and masks (score_program.py), and what they are called with.

    batch, head     number of the sequence, and of the query head, or of each row's [BLOCK_M, 1]
    first_row       position of query 0; rows: how many queries there are
    first_key       place of key 0; keys: how many keys there are
    c0, c1, …       captured tensors; n0, n1, …: their sizes
    SCORE, MASK     Triton functions; None without one
    """

    batch: Any = None
    head: Any = None
    first_row: Any = None
    rows: Any = None
    first_key: Any = None
    keys: Any = None
    c0: Any = None
    c1: Any = None
    c2: Any = None
    c3: Any = None
    n0: Any = None
    n1: Any = None
    n2: Any = None
    n3: Any = None
    n4: Any = None
    n5: Any = None
    n6: Any = None
    n7: Any = None
    SCORE: constexpr = None  # type: ignore[assignment]
    MASK: constexpr = None  # type: ignore[assignment]


class ScoreTerms(NamedTuple):
    """What scores are before the softmax takes them. Absent features are None.

    row_valid  the rows that are real; the others fill a tile up
    row_start, row_end  row i attends the keys before row_end[i] and, with WINDOW, from row_start[i] on
    positions, slopes   each row's position, and its slope of ALiBi
    bias, mask          a pointer for each row, or with BIAS_BY_KEY and MASK_BY_KEY one for all
    tree_low, tree_high, tree_first  each row's tree mask and the key of its first bit (tiles.in_tree)
    CLAMPED             masked loads may read all the same, so they read at a key that exists
    slots, READS        a row's list of slots, whose holes are hidden (tiles.is_key), and Lowering's reads
    """

    row_valid: Any
    row_start: Any
    row_end: Any
    positions: Any
    slopes: Any
    bias: Any
    bias_stride: Any
    mask: Any
    mask_stride: Any
    scale: Any
    softcap: Any
    tree_low: Any
    tree_high: Any
    tree_first: Any
    WINDOW: constexpr
    SOFTCAP: constexpr
    BIAS_BY_KEY: constexpr
    MASK_BY_KEY: constexpr
    EXP: constexpr
    MASK_VALUE: constexpr
    CLAMPED: constexpr
    slots: Any = None
    READS: constexpr = "masked"  # type: ignore[assignment]
    mods: ScoreMods = ScoreMods()


class Dropout(NamedTuple):
    """Dropout of probabilities (kernels/dropout.py).

    seed        None without dropout
    head        number of the head, counted over all sequences
    row         position of the tile's first row in the sequence
    origin      the key from which keys' positions count
    key, turn   of the head: head_words
    """

    seed: Any = None
    head: Any = None
    row: Any = None
    origin: Any = None
    threshold: Any = None
    key: Any = None
    turn: Any = None
    WAY: constexpr = "scores"  # type: ignore[assignment]


class LoopShape(NamedTuple):
    """Choices of `attend`'s loop.

    LATENT   values are the first columns of keys
    P_TERMS  terms of each probability (kernels/attend.py)
    NONE     whether there may be no tile at all
    """

    BLOCK_N: constexpr
    K_TILE: constexpr
    BLOCK_ORDER: constexpr
    DOT_PRECISION: constexpr
    PIPELINE: constexpr
    Q_OPERAND: constexpr
    LATENT: constexpr = False  # type: ignore[assignment]
    NONE: constexpr = False  # type: ignore[assignment]
    P_TERMS: constexpr = 1  # type: ignore[assignment]


class Output(NamedTuple):
    """The tensors that a decoding program stores its rows in.

    out          (slots, Hq, Sq, Dv), or with SPLIT (splits, slots, Hq, Sq, Dv)
    lse          (slots, Hq, Sq), or with SPLIT (splits, slots, Hq, Sq, 2), contiguous; None if it is not asked for
    COLS         Dv
    BLOCK_COLS   columns of the tile that is stored
    SPLIT        whether rows are the states of a share of the keys, to be merged
    """

    out: Any
    lse: Any
    stride_split: Any
    stride_slot: Any
    stride_head: Any
    stride_row: Any
    COLS: constexpr
    BLOCK_COLS: constexpr
    SPLIT: constexpr
