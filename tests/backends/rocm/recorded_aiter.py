"""A stand-in for AITER: a package whose modules have a release's recorded signatures, and functions that check their
arguments and answer in float64. What AITER's source drops, leaves undefined or multiplies by 0 comes back as NaN."""

import math
from pathlib import Path
from typing import Any

import torch

from portattn.backends.rocm import aiter

CALLS: list[tuple[str, dict[str, Any]]] = []


def install(folder: Path, release: str, change: tuple[str, str] = ("", "")) -> None:
    """Write a release's package and its metadata; `change` is made in the text of its parameters."""
    CALLS.clear()
    for row in aiter.load_signatures():
        if release in row.releases:
            path = folder / "aiter" / row.file
            path.parent.mkdir(parents=True, exist_ok=True)
            text = f"def {row.function}({row.parameters.replace(*change)}):\n    given = dict(locals())\n"
            text += f"    import recorded_aiter as it\n    it.CALLS.append(({row.function!r}, given))\n"
            with path.open("a") as file:
                file.write(text + f"    return it.{row.function}(**given)\n")
    metadata = folder / f"amd_aiter-{release}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: amd-aiter\nVersion: {release}\n")


def attend(
    q: Any, k: Any, v: Any, scale: float, *, causal: bool, window: Any = (-1, -1), softcap: float = 0.0,
    slopes: Any = None, sinks: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out (S, H, Dv) and LSE (H, S) of a sequence, aligned at the bottom right; NaN in rows that see nothing."""
    group, dtype = q.shape[1] // k.shape[1], q.dtype
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    scores = q @ k.mT * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if slopes is None else scores - slopes.double()[:, None, None] * distance.abs()
    hidden = (distance < 0) & causal
    hidden = hidden | ((distance > window[0]) & (window[0] >= 0)) | ((-distance > window[1]) & (window[1] >= 0))
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        assert sinks.dtype is torch.float32
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, q.shape[1], 1)], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[1]]
    lse = torch.logsumexp(scores, -1).masked_fill(hidden.all(-1) | (slopes is not None), math.nan)
    return (weights @ v).transpose(0, 1).to(dtype), lse.float()  # a hidden value has a weight of 0: NaN spreads


def features_of(q: Any, k: Any, v: Any, given: dict[str, Any]) -> dict[str, Any]:
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert max(q.shape[-1], v.shape[-1]) <= 256
    left, right = given["window_size"]
    assert (left, right) == (-1, -1) or max(left, right) > 0, "the assembly kernels have no window then"
    assert (given["dropout_p"], given["bias"], given.get("block_table")) == (0.0, None, None)
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    assert given["return_lse"] or not training, "its own assertion"
    slopes, sinks, softcap = given["alibi_slopes"], given.get("sink_ptr"), given.get("logits_soft_cap", 0.0)
    assert slopes is None or (slopes.dtype is torch.float32 and slopes.is_contiguous() and not given["causal"])
    assert not training or (slopes, sinks, softcap) == (None, None, 0.0), "its backward pass has none of them"
    return {"causal": given["causal"], "window": (left, right), "softcap": softcap if sinks is None else math.nan}


def flash_attn_func(q: Any, k: Any, v: Any, **given: Any) -> Any:
    features, slopes = features_of(q, k, v, given), given["alibi_slopes"]
    slopes = [None] * len(q) if slopes is None else slopes.expand(len(q), -1)
    parts = [attend(*x, given["softmax_scale"], slopes=s, **features) for *x, s in zip(q, k, v, slopes, strict=True)]
    out, lse = (torch.stack(x) for x in zip(*parts, strict=True))
    if given["causal"]:  # "If the row of the mask is all zero, the output will be zero."
        out = torch.where(torch.arange(q.shape[1])[:, None, None] < q.shape[1] - k.shape[1], 0.0, out)
    return (out, lse.detach()) if given["return_lse"] else out  # its backward pass ignores the LSE's gradient


def flash_attn_varlen_func(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **given: Any) -> Any:
    features, slopes = features_of(q, k, v, given), given["alibi_slopes"]
    assert features["window"] == (-1, -1), "keys before a window may hold NaN"
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert given["max_seqlen_q"] >= int(cu_seqlens_q.diff().max())
    assert given["max_seqlen_k"] >= int(cu_seqlens_k.diff().max())
    out, lse = q.new_full((*q.shape[:2], v.shape[-1]), math.nan), torch.full((q.shape[1], q.shape[0]), math.nan)
    for n in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(int(x[n]), int(x[n + 1])) for x in (cu_seqlens_q, cu_seqlens_k))
        slope = None if slopes is None else slopes.expand(len(cu_seqlens_q) - 1, -1)[n]
        part = attend(q[rows], k[keys], v[keys], given["softmax_scale"], slopes=slope, **features)
        out = torch.cat([out[: rows.start], part[0], out[rows.stop :]])
        lse = torch.cat([lse[:, : rows.start], part[1], lse[:, rows.stop :]], 1)
    return (out, lse.detach()) if given["return_lse"] else out


def unified_attention(q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, seqused_k: Any, **given: Any) -> None:
    assert given["causal"]
    assert {given[name] for name in ("q_descale", "k_descale", "v_descale", "alibi_slopes")} == {None}
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert given["block_table"].dtype == seqused_k.dtype == cu_seqlens_q.dtype == torch.int32
    assert k.shape[1] > 64, "it multiplies a page's unused places by 0"
    assert (given["window_size"], given["softcap"]) == ((-1, -1), 0.0), "keys before a window may hold NaN"
    out.fill_(math.nan)
    for n, length in enumerate(seqused_k.tolist()):
        rows = slice(int(cu_seqlens_q[n]), int(cu_seqlens_q[n + 1]))
        ids = given["block_table"][n, : -(-length // k.shape[1])].long()
        keys, values = (x[ids].flatten(0, 1)[:length] for x in (k, v))
        out[rows] = attend(q[rows], keys, values, given["softmax_scale"], causal=True, sinks=given["sinks"])[0]


def mla_decode_fwd(
    q: Any, kv_buffer: Any, o: Any, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_last_page_lens: Any,
    **given: Any,
) -> tuple[None, Any]:  # fmt: skip
    assert q.shape[1] in (16, 128)
    assert (q.shape[2], kv_buffer.shape[1:], given["max_seqlen_q"]) == (576, (1, 1, 576), 1)
    assert q.dtype is kv_buffer.dtype is torch.bfloat16
    assert qo_indptr.diff().eq(1).all()
    assert kv_last_page_lens.eq(1).all()
    assert all(x.dtype is torch.int32 for x in (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens))
    o.fill_(math.nan)
    lse = torch.full(q.shape[:2], math.nan)
    for n in range(len(q)):
        rows = kv_buffer[kv_indices[int(kv_indptr[n]) : int(kv_indptr[n + 1])].long(), 0]
        if len(rows):
            o[n : n + 1], found = attend(q[n : n + 1], rows, rows[..., :512], given["sm_scale"], causal=True)
            lse[n] = found[:, 0]
    return None, lse if given.get("return_lse") else None
