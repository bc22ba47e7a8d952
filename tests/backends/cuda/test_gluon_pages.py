"""`gluon_forward` over pages, without a chip: when it is planned, what it refuses, and what its launches are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from portattn import Problem
from portattn.backends.cuda.hopper_forward.tile_scheduler import heads_of
from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.config import Settings
from portattn.errors import PathUnavailable
from portattn.launch import Signature, meta_call
from portattn.launch.described import signatures
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target

SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")
VARIANT = ForwardVariant()
CHUNKS = Problem(
    op="paged_attention", batch=4, heads_q=32, heads_k=8, seq_q=512, seq_k=8192, head_dim=128, dtype="bf16",
    page_size=64, seqlens_k=True, causal="bottom_right", return_lse=True,
)  # fmt: skip
MIXED = msgspec.structs.replace(CHUNKS, batch=68, total_q=2112)


def problem(base: Problem = CHUNKS, **fields: Any) -> Problem:
    return msgspec.structs.replace(base, **fields)


@pytest.mark.parametrize("p", [CHUNKS, MIXED, problem(page_size=16), problem(batch=1)], ids=str)
def test_chunks_over_pages_run_on_it(p: Problem) -> None:
    made = plan(p, SM_90)
    assert made.path == VARIANT.name, made.explain()
    assert made.schedule["splits"] == 1


DECODING = {"batch": 64, "seq_q": 1}
FEW = {"batch": 1, "seq_q": 128}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (DECODING, "64 sequences of one query 477 µs for 478"),
        ({**DECODING, "total_q": 64}, "64 sequences of one query 477 µs for 478"),
        (FEW, "it has tiles of rows for less than 45 % of the chip's cores, and does not split keys of pages"),
    ],
)
def test_what_the_core_is_faster_at_is_left_to_it(fields: dict[str, Any], why: str) -> None:
    made = plan(problem(**fields), SM_90)
    assert made.path == "triton"
    assert why in " ".join(made.notes)
    by_name = plan(problem(**fields), SM_90, settings=Settings(backend=VARIANT.name))
    assert by_name.path == VARIANT.name


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"page_size": 8}, "takes pages of a multiple of 16 tokens, not 8"),
        ({"page_size": 24, "seq_k": 240}, "takes pages of a multiple of 16 tokens, not 24"),
        ({"page_size": 1}, "takes pages of a multiple of 16 tokens, not 1"),
        ({"kv_format": "e4m3"}, "takes no kv_format"),
        ({"num_splits": 2}, "takes no num_splits"),
        ({"needs_grad": True}, "takes no needs_grad"),
        ({"bias": True}, "takes no bias"),
        ({"head_dim": 320, "head_dim_v": 320}, "takes heads of at most 256 columns, not 320"),
        ({"head_dim_v": 64}, "takes K and V of one width, not 128 and 64"),
        ({"seq_k": 0}, "seq_k is 0: there is nothing to read through a descriptor"),
    ],
    ids=str,
)
def test_what_it_cannot_do_it_refuses_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PathUnavailable) as no:
        plan(problem(**fields), SM_90, settings=Settings(backend=VARIANT.name))
    assert no.value.rejected[-1].reason == reason


def seen(p: Problem) -> Signature:
    pytest.importorskip("triton.experimental.gluon")
    (one,) = signatures(VARIANT, meta_call(p))
    return one


@pytest.mark.parametrize(
    ("fields", "block"),
    [
        ({"page_size": 16}, [1, 1, 16, 64]),  # a load for each of eight pages
        ({"page_size": 48, "seq_k": 480}, [1, 1, 16, 64]),  # the power of two in a page never crosses its end
        ({"page_size": 64}, [1, 1, 64, 64]),
        ({"page_size": 128}, [1, 1, 128, 128]),  # a tile in one load
        ({"page_size": 256}, [1, 1, 128, 128]),
        ({"page_size": 384, "seq_k": 3840}, [1, 1, 128, 128]),
        ({"page_size": 16, "head_dim": 256, "head_dim_v": 256}, [1, 1, 16, 64]),
        ({"page_size": 64, "head_dim": 256, "head_dim_v": 256}, [1, 1, 64, 256]),  # tiles of 64 keys
        ({"page_size": 32, "head_dim": 40, "head_dim_v": 40}, [1, 1, 32, 64]),
    ],
    ids=str,
)
@pytest.mark.parametrize("page_layout", ["phd", "hpd"])
def test_a_load_never_crosses_the_end_of_a_page(fields: dict[str, Any], block: list[int], page_layout: str) -> None:
    one = seen(problem(**fields, page_layout=page_layout))
    for name in ("k_desc", "v_desc"):
        assert one.types[name].startswith(f"tensordesc<bf16{block},NVMMASharedLayout(")
    assert one.constants["PAGE"] == fields["page_size"]
    assert fields["page_size"] % block[2] == 0


@pytest.mark.parametrize(
    ("heads_q", "heads_k", "together"), [(32, 8, 4), (8, 8, 1), (12, 2, 2), (10, 2, 1), (64, 1, 64), (128, 1, 64)]
)
def test_heads_of_one_key_head_share_tiles(heads_q: int, heads_k: int, together: int) -> None:
    p = problem(MIXED, heads_q=heads_q, heads_k=heads_k)
    assert heads_of(p) == together
    one = seen(p)
    assert one.types["q_desc"].startswith(f"tensordesc<bf16[1, {64 // together}, {together}, 128],")
    assert (one.constants["HEADS"], one.constants["VARYING"]) == (together, "packed_q")
    assert heads_of(problem(op="attention", page_size=0, heads_q=heads_q, heads_k=heads_k)) == 1


def test_lengths_of_queries_in_a_batch_are_the_batch_s() -> None:
    one = seen(CHUNKS)
    assert (one.constants["VARYING"], one.constants["lengths_q"]) == ("padded_k", None)
    assert one.types["page_table"] == one.types["lengths_k"] == "*i32"
    assert one.types["table_stride"] == "i32"


def test_without_pages_the_kernel_has_none_of_it() -> None:
    """Its arguments are constants, so that the code is what it was."""
    one = seen(problem(op="attention", page_size=0, seqlens_k=False))
    assert (one.constants["page_table"], one.constants["table_stride"]) == (None, None)
    assert (one.constants["PAGE"], one.constants["HEADS"]) == (0, 1)
    assert one.types["k_desc"].startswith("tensordesc<bf16[1, 1, 128, 128],")
    assert one.types["q_desc"].startswith("tensordesc<bf16[1, 1, 64, 128],")
