"""PageTable: the pages of each sequence, also as the compressed rows (CSR) that some serving engines keep."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from portattn.errors import ArgumentError
from portattn.validate.checks import check_dense

OP = "PageTable.from_csr"
NO_PAGE = -1


@dataclass(frozen=True, slots=True)
class PageTable:
    """Page ids of each sequence and, where it is known, how full its last page is.

    Attributes:
        pages: (B, pages a sequence) int32; ids past a sequence's own pages are not read (from_csr: -1)
        counts: (B,) int32: pages of each sequence
        last_page_len: (B,) int32: tokens in each sequence's last page

    Raises:
        ArgumentError: A tensor is not dense int32 with these axes, or numbers of sequences differ.

    Examples:
        >>> import torch, portattn
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> table = portattn.PageTable(pages=ints([3, 1], [0, -1]), counts=ints(2, 1), last_page_len=ints(8, 1))
        >>> table.seqlens(page_size=16).tolist()
        [24, 1]
    """

    pages: torch.Tensor
    counts: torch.Tensor
    last_page_len: torch.Tensor

    def __post_init__(self) -> None:
        for name, axes in (("pages", 2), ("counts", 1), ("last_page_len", 1)):
            tensor = getattr(self, name)
            check_dense("PageTable", name, tensor)
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32 or tensor.ndim != axes:
                raise ArgumentError("PageTable", name, _kind(tensor), f"must be an int32 torch.Tensor with {axes} axes")
            if tensor.shape[0] != self.pages.shape[0]:
                limit = f"must have pages' first axis, {self.pages.shape[0]}"
                raise ArgumentError("PageTable", f"{name}.shape", tuple(tensor.shape), limit)

    @classmethod
    def from_csr(
        cls,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        max_pages: int | None = None,
    ) -> PageTable:
        """Make a table from FlashInfer's compressed rows.

        Args:
            indptr: (B + 1,) int32: sequence b's pages are indices[indptr[b]:indptr[b + 1]]
            indices: (pages in all,) int32 page ids
            last_page_len: (B,) int32: tokens in each sequence's last page, 1..page_size; anything without pages
            max_pages: most pages of one sequence. None: found by reading the lengths back, which waits for the device
                once, and checks them

        All on one device.

        Returns:
            The PageTable: pages (B, max_pages), each row filled up with -1.

        Raises:
            ArgumentError: A tensor has another dtype or shape; or, where lengths are read back, a value is impossible
                (the first one is named).

        Examples:
            >>> import torch, portattn
            >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
            >>> table = portattn.PageTable.from_csr(ints(0, 2, 3), ints(3, 1, 0), ints(8, 1))
            >>> table.pages.tolist()
            [[3, 1], [0, -1]]
        """
        for name, tensor in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
            check_dense(OP, name, tensor)
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32 or tensor.ndim != 1:
                raise ArgumentError(OP, name, _kind(tensor), "must be a torch.Tensor of torch.int32 with one axis")
            if tensor.device != indptr.device:
                raise ArgumentError(OP, f"{name}.device", str(tensor.device), f"must be indptr's, {indptr.device}")
        if indptr.shape[0] != last_page_len.shape[0] + 1:
            limit = f"must have one element more than last_page_len, {last_page_len.shape[0] + 1}"
            raise ArgumentError(OP, "indptr.shape", tuple(indptr.shape), limit)
        counts = indptr[1:] - indptr[:-1]
        if max_pages is None:
            values = torch.cat([indptr, last_page_len]).tolist()
            max_pages = _most(values[: indptr.shape[0]], values[indptr.shape[0] :], indices.shape[0])
        elif isinstance(max_pages, bool) or not isinstance(max_pages, int) or max_pages < 0:
            raise ArgumentError(OP, "max_pages", max_pages, "must be None or an integer ≥ 0")
        places = indptr[:-1, None].long() + torch.arange(max_pages, device=indptr.device)
        if indices.shape[0] == 0:
            pages = indices.new_zeros(places.shape)
        else:
            pages = indices[places.clamp(0, indices.shape[0] - 1)]
        # No page behind a sequence's last: a last_page_len beyond the page must not lead to another sequence's.
        own = torch.arange(max_pages, device=indptr.device) < counts[:, None]
        return cls(torch.where(own, pages, NO_PAGE), counts, last_page_len)

    def check(self, op: str, page_size: int) -> None:
        """Read the lengths of last pages back, which waits for the device.

        Args:
            op: the operation that asks, for the error's text
            page_size: tokens a page

        Returns:
            Nothing.

        Raises:
            ArgumentError: A length (B,) does not fit its page; the first one is named.

        Examples:
            >>> import torch, portattn
            >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
            >>> portattn.PageTable(ints([0]), ints(1), ints(17)).check("paged_attention", 16)
            Traceback (most recent call last):
            portattn.errors.ArgumentError: paged_attention: page_table.last_page_len[0] is 17, but must be in 1..16, ...
        """
        for index, (count, length) in enumerate(zip(self.counts.tolist(), self.last_page_len.tolist(), strict=True)):
            if count and not 1 <= length <= page_size:
                limit = f"must be in 1..{page_size}, the tokens of a page"
                raise ArgumentError(op, f"page_table.last_page_len[{index}]", length, limit)

    def seqlens(self, page_size: int) -> torch.Tensor:
        """Return the tokens of each sequence, computed on the table's device: nothing waits for it.

        Args:
            page_size: tokens a page

        Returns:
            A (B,) int32 tensor.

        Examples:
            >>> import torch, portattn
            >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
            >>> portattn.PageTable(ints([3, 1]), ints(2), ints(8)).seqlens(page_size=16)
            tensor([24], dtype=torch.int32)
        """
        full = (self.counts - 1).clamp(min=0) * page_size + self.last_page_len
        return torch.where(self.counts > 0, full, 0).to(torch.int32)


def _kind(value: object) -> object:
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def _most(indptr: list[int], last_page_len: list[int], pages: int) -> int:
    if indptr[0] != 0:
        raise ArgumentError(OP, "indptr[0]", indptr[0], "must be 0, the first page")
    most = 0
    for index, (before, value) in enumerate(itertools.pairwise(indptr)):
        if value < before:
            raise ArgumentError(OP, f"indptr[{index + 1}]", value, f"must be at least indptr[{index}], {before}")
        if value > pages:
            raise ArgumentError(OP, f"indptr[{index + 1}]", value, f"must be at most {pages}, the pages in indices")
        if value > before and last_page_len[index] < 1:
            limit = "must be at least 1: a sequence's last page is not empty"
            raise ArgumentError(OP, f"last_page_len[{index}]", last_page_len[index], limit)
        most = max(most, value - before)
    return most
