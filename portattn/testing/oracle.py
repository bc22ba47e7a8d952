"""The oracle: attention by its definition, in float64, with the whole score matrix. For tests and canaries only."""

from __future__ import annotations

import torch

from portattn.schema.call import Call
from portattn.testing.dense_view import allowed_keys, dense_view

__all__ = ["allowed_keys", "oracle"]


def oracle(call: Call, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE of any op, both float64, shaped as Call.new_out and Call.new_lse say.

    With a dropout_seed, what it says is dropped; the LSE knows no dropout. Without one nothing is, whatever dropout_p.
    A row with nothing to attend: 0, and -inf or its sink. Rows of no sequence: 0 and -inf.

    rows  compute only these query rows (int64 indices), so that a long problem can be spot-checked; not of packed ones
    """
    view = dense_view(call, rows)
    q, k = view.q.double(), view.k.double()
    products = view.products(q, k)
    scores = view.with_terms(products * call.scale, products, q, k)
    lse = view.lse(scores)
    # Around 1e38 an LSE in float64 is the row's maximum: what it has lost of the sum's logarithm is `rest`.
    base = lse.masked_fill(lse.isinf(), 0.0)[..., None]
    rest = torch.logsumexp(view.with_sinks(scores) - base, dim=-1)
    rest = rest.masked_fill(rest == float("-inf"), 0.0)[..., None]
    probabilities = torch.exp(scores - base - rest)
    out = view.mixed(view.dropped(probabilities), view.v.double())
    return view.restored(out, 0.0), view.restored(lse, float("-inf"))
