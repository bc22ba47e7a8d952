"""The table of features: one row for each thing that a call can ask for beyond plain attention, by a flag of Problem.

What the library must know of a feature in general is read from its row: the command line's option, conditions, tensors
without data, random calls, the problems of the matrix, tuning classes. Which operations have it is in schema/ops.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Kind = Literal["lengths", "tokens", "scores", "row", "result"]


@dataclass(frozen=True)
class Feature:
    """One feature.

    help   help of its option on the command line
    kind   the part that it changes: positions that count (lengths), chosen tokens (tokens), every score (scores), the
           softmax of each row (row), the results (result)
    axes   axes of its tensor in a Call, by letter: b batch, h query heads, q query rows, k keys, t chosen tokens; s and
           r batch and rows of the query tensor, 1 and all rows for packed queries; m and n blocks of queries and of
           keys. Empty if it has no tensor
    dtype  of that tensor, a name of torch's; empty: q's
    title  its name in reports; its own name when empty
    """

    help: str
    kind: Kind
    axes: str = ""
    dtype: str = ""
    title: str = ""


FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        "seqlens_q": Feature("Query lengths are given per sequence", "lengths", "b", "int32"),
        "seqlens_k": Feature("Key lengths are given per sequence; of pages they always are", "lengths", "b", "int32"),
        "leftpad_q": Feature("Queries are padded on the left", "lengths", "b", "int32"),
        "leftpad_k": Feature("Keys are padded on the left", "lengths", "b", "int32"),
        "log_weights": Feature("Chosen tokens have weights", "tokens", "bht", "float32"),
        "magicpig": Feature("Chosen tokens were sampled by MagicPIG", "tokens"),
        "softcap": Feature("Scores are capped", "scores"),
        "alibi_slopes": Feature("ALiBi slopes are given", "scores", "bh", "float32", title="ALiBi"),
        "sinks": Feature("Attention sinks are given", "row", "h", "float32"),
        "bias": Feature("A bias is given", "scores", "bhqk"),
        "mask": Feature("A boolean mask is given", "scores", "bhqk", "bool"),
        "tree_mask": Feature("A tree mask of the new tokens is given", "scores", "sr", "int64", title="tree mask"),
        "block_mask": Feature("Lists of blocks are given", "scores", "bhmn", "bool", title="block mask"),
        "return_lse": Feature("The log-sum-exp is returned as well", "result"),
    }
)


def of_kinds(*kinds: Kind) -> tuple[str, ...]:
    """The names of the features of these kinds, in order."""
    return tuple(name for name, feature in FEATURES.items() if feature.kind in kinds)


# What is done to every score of a tile: it takes registers. So do a window and a chunk, which are told by numbers.
EVERY_SCORE = ("window", "chunk", *of_kinds("scores"))
# What most operations have beside their masks.
COMMON = of_kinds("scores", "row")
