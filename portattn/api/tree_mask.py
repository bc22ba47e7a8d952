"""tree_mask: a tree of drafted tokens as the words that the operations over a cache take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from portattn.errors import ArgumentError
from portattn.schema.problem_limits import MAX_TREE
from portattn.validate.checks import check_dense

OP = "tree_mask"


def tree_mask(tree: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """The `tree_mask` of decode_, paged_ and mla_attention: which new tokens each new token's query attends.

    tree  parents: int32 or int64 (..., S), or a list of S ints. Number i is the node before token i in the tree, which
          is below i; negative where token i follows the last token before the tree. A token attends itself, its parent,
          that one's parent and so on. Or bool (..., S, S): element (i, j) says whether token i attends token j. S is
          at most 64. On any device, with any axes in front

    Returns int64 (..., S) on the tree's device: bit j of word i is set where token i attends token j. Of packed queries
    one gives the sequences' words one after the other: `torch.cat([tree_mask(a), tree_mask(b)])`.

    Nothing waits for the device, so a CUDA graph can hold it. Parents are checked on the CPU alone.

    Raises ArgumentError where the tree is no such tensor or has more than 64 nodes, and on the CPU where a parent does
    not come before its node.

    >>> import portattn
    >>> words = portattn.tree_mask([-1, 0, 0, 1])  # two tokens follow token 0; token 3 follows token 1
    >>> [f"{word:04b}" for word in words.tolist()]
    ['0001', '0011', '0101', '1011']
    """
    if not isinstance(tree, torch.Tensor):
        tree = _parents(tree)
    check_dense(OP, "tree", tree)
    if tree.dtype is torch.bool:
        if tree.ndim < 2 or tree.shape[-1] != tree.shape[-2]:
            raise ArgumentError(OP, "tree.shape", tuple(tree.shape), "must be (..., S, S) of bools")
    elif tree.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            OP, "tree.dtype", tree.dtype, "must be torch.bool, or torch.int32 or torch.int64 of parents"
        )
    elif tree.ndim < 1:
        raise ArgumentError(OP, "tree.shape", tuple(tree.shape), "must be (..., S) of parents")
    count = tree.shape[-1]
    if count > MAX_TREE:
        raise ArgumentError(OP, "tree.shape", tuple(tree.shape), f"must have at most {MAX_TREE} nodes")
    seen = tree if tree.dtype is torch.bool else _ancestors(tree)
    return (seen.long() << torch.arange(count, device=tree.device)).sum(dim=-1)


def _parents(numbers: Sequence[int]) -> torch.Tensor:
    try:
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
        return torch.tensor(list(numbers), dtype=torch.int64) if whole else _refused(numbers)
    except (TypeError, OverflowError, ValueError):
        return _refused(numbers)


def _refused(given: object) -> torch.Tensor:
    raise ArgumentError(OP, "tree", given, "must be a torch.Tensor of parents or of bools, or a list of int parents")


def _ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Which nodes each one is or follows, however far back: bool (..., S, S)."""
    count = parents.shape[-1]
    nodes = torch.arange(count, device=parents.device)
    read = parents.device.type == "cpu" and not torch.compiler.is_compiling()  # a graph holds no number
    if read and bool((parents >= nodes).any()):
        place = int((parents >= nodes).reshape(-1, count).any(dim=0).nonzero()[0])
        wrong = int(parents.reshape(-1, count)[:, place].max())
        raise ArgumentError(OP, f"tree's parent of node {place}", wrong, f"must be below {place}, or negative for none")
    # Steps of 0 or 1 up the tree, squared: of up to 2, 4, … 64.
    steps = ((parents[..., None] == nodes) | torch.eye(count, dtype=torch.bool, device=parents.device)).float()
    for _ in range((MAX_TREE - 1).bit_length()):
        steps = (steps @ steps).clamp(max=1.0)
    return steps.bool()
