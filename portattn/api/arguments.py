"""Parameters of public operations that stand for several tensors, as those tensors."""

from __future__ import annotations

from typing import Any

import torch

from portattn.api.page_table import PageTable
from portattn.api.request import settings_for
from portattn.errors import ArgumentError
from portattn.validate.checks import check_dense
from portattn.validate.values import reads

NO_SAMPLING = {"magicpig_bits": None, "magicpig_tables": None}


def paged(given: dict[str, Any]) -> None:
    """Replace a PageTable by page ids and lengths."""
    _table("paged_attention", given, given["k_pages"], given["page_layout"])


def latent(given: dict[str, Any]) -> None:
    """Replace a PageTable by page ids and lengths."""
    _table("mla_attention", given, given["kv_pages"], "phd")


def sparse(given: dict[str, Any]) -> None:
    """Replace a PageTable by page ids and lengths, and MagicPIG's numbers by tensors where one of them is a tensor."""
    _table("sparse_attention", given, given["k_cache"], given["page_layout"])
    sampling, constants = magicpig_tensors("sparse_attention", given["magicpig"], given["counts"])
    given.update(sampling, magicpig=constants)


def _table(op: str, given: dict[str, Any], pages: Any, page_layout: Any) -> None:
    asked = given["backend"], given["validate"]
    given["page_table"], given["seqlens_k"] = table_tensors(
        op, given["page_table"], given["seqlens_k"], pages, page_layout, *asked
    )


def table_tensors(
    op: str,
    table: Any,
    seqlens_k: torch.Tensor | None,
    pages: Any,
    page_layout: str,
    backend: str | None,
    validate: bool | None,
) -> tuple[Any, torch.Tensor | None]:
    """Page ids and lengths as tensors; a PageTable's lengths follow from the size of the pages."""
    if not isinstance(table, PageTable):
        return table, seqlens_k
    if seqlens_k is not None:
        check_dense(op, "seqlens_k", seqlens_k)
        given = tuple(seqlens_k.shape) if isinstance(seqlens_k, torch.Tensor) else seqlens_k
        raise ArgumentError(op, "seqlens_k", given, "goes with a tensor of page ids; a PageTable has its own")
    if not isinstance(pages, torch.Tensor) or pages.is_nested or pages.ndim < 3:
        return table.pages, None  # validation says what is wrong with the pages
    page_size = pages.shape[2 if page_layout == "hpd" else 1]
    # Dynamo can trace no reading of a context variable; what is recorded has no values to read.
    if not torch.compiler.is_dynamo_compiling() and reads(settings_for(op, backend, validate), table.counts):
        table.check(op, page_size)
    return table.pages, table.seqlens(page_size)


def magicpig_tensors(op: str, magicpig: Any, counts: Any) -> tuple[dict[str, Any], tuple[int, int] | None]:
    """MagicPIG's K and L: (tensors by their names in a Call, None) or (no tensors, two integers or None)."""
    if magicpig is None:
        return NO_SAMPLING, None
    bits, tables = _magicpig(op, magicpig, counts)
    if isinstance(bits, torch.Tensor) or isinstance(tables, torch.Tensor):
        return {"magicpig_bits": bits, "magicpig_tables": tables}, None
    return NO_SAMPLING, (bits, tables)


def _magicpig(op: str, magicpig: Any, counts: Any) -> tuple[Any, Any]:
    """K and L, both integers or both tensors."""
    if not isinstance(magicpig, (tuple, list)) or len(magicpig) != 2:
        raise ArgumentError(op, "magicpig", magicpig, "must be (K, L), bits a hash table and number of tables")
    for name, value, least in (("K", magicpig[0], 1), ("L", magicpig[1], 2)):
        if isinstance(value, torch.Tensor):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**15:
            limit = f"must be an integer in {least}..{2**15 - 1}, or (Hq,) int32"
            raise ArgumentError(op, f"magicpig's {name}", value, limit)
    tensor = next((value for value in magicpig if isinstance(value, torch.Tensor)), None)
    if tensor is None or all(isinstance(value, torch.Tensor) for value in magicpig):
        return magicpig[0], magicpig[1]
    for name, value in (("counts", counts), ("magicpig's K", magicpig[0]), ("magicpig's L", magicpig[1])):
        check_dense(op, name, value)
    if isinstance(counts, torch.Tensor) and counts.ndim == 2:
        heads = counts.shape[1]
        magicpig = tuple(
            t if isinstance(t, torch.Tensor) else tensor.new_full((heads,), t, dtype=torch.int32) for t in magicpig
        )
    return magicpig[0], magicpig[1]
