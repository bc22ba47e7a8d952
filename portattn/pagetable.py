"""PageTable: the pages of each sequence, also as the compressed rows (CSR) that some serving engines keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from portattn.errors import ArgumentError

OP = "PageTable.from_csr"


@dataclass(frozen=True, slots=True)
class PageTable:
    """Page ids of each sequence and, where it is known, how full its last page is.

    pages          (B, pages a sequence) int32; what lies past a sequence's own pages is not read
    counts         (B,) int32: pages of each sequence
    last_page_len  (B,) int32: tokens in each sequence's last page
    """

    pages: torch.Tensor
    counts: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def from_csr(
        cls,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        max_pages: int | None = None,
    ) -> PageTable:
        """A table from FlashInfer's form of one.

        indptr         (B + 1,) int32: sequence b's pages are indices[indptr[b]:indptr[b + 1]]
        indices        (pages in all,) int32 page ids
        last_page_len  (B,) int32: tokens in each sequence's last page, 1..page_size; 0 for a sequence without pages
        max_pages      most pages of one sequence. None: read back from indptr, which waits for the device once

        All on one device. Raises ArgumentError.
        """
        for name, tensor in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32 or tensor.ndim != 1:
                kind = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor)
                raise ArgumentError(OP, name, str(kind), "must be a torch.Tensor of torch.int32 with one axis")
            if tensor.device != indptr.device:
                raise ArgumentError(OP, f"{name}.device", str(tensor.device), f"must be indptr's, {indptr.device}")
        if indptr.shape[0] != last_page_len.shape[0] + 1:
            limit = f"must have one element more than last_page_len, {last_page_len.shape[0] + 1}"
            raise ArgumentError(OP, "indptr.shape", tuple(indptr.shape), limit)
        counts = indptr[1:] - indptr[:-1]
        if max_pages is None:
            if counts.numel() and int(counts.min()) < 0:
                raise ArgumentError(OP, "indptr", indptr.tolist(), "must never fall")
            if int(indptr[0]) != 0 or int(indptr[-1]) > indices.shape[0]:
                limit = f"must begin with 0 and end within indices, at most {indices.shape[0]}"
                raise ArgumentError(OP, "indptr", (int(indptr[0]), int(indptr[-1])), limit)
            max_pages = int(counts.max()) if counts.numel() else 0
        elif isinstance(max_pages, bool) or not isinstance(max_pages, int) or max_pages < 0:
            raise ArgumentError(OP, "max_pages", max_pages, "must be None or an integer ≥ 0")
        places = indptr[:-1, None].long() + torch.arange(max_pages, device=indptr.device)
        if indices.shape[0] == 0:
            pages = indices.new_zeros(places.shape)
        else:
            pages = indices[places.clamp(0, indices.shape[0] - 1)]
        return cls(pages, counts, last_page_len)

    def seqlens(self, page_size: int) -> torch.Tensor:
        """Tokens of each sequence (B,) int32, computed where the table is."""
        full = (self.counts - 1).clamp(min=0) * page_size + self.last_page_len
        return torch.where(self.counts > 0, full, 0).to(torch.int32)
