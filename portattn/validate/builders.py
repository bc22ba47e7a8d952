"""What makes a Call of an operation's tensors and other arguments: one function an operation.

Tensors come by the names that a Request has them under, None where they are not given; values by the caller's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from portattn.config import Settings
from portattn.schema.call import Call
from portattn.validate.dense import attention_call
from portattn.validate.latent import mla_call
from portattn.validate.paged import paged_call
from portattn.validate.sparse import sparse_call
from portattn.validate.varlen import varlen_call

Builder = Callable[[Settings, Mapping[str, Any], Mapping[str, Any]], Call]


def _attention(settings: Settings, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> Call:
    q, k, v, features = _split(tensors)
    return attention_call("attention", q, k, v, names=("q", "k", "v"), settings=settings, **values, **features)


def _varlen(settings: Settings, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> Call:
    q, k, v, features = _split(tensors)
    return varlen_call(q, k, v, settings=settings, **values, **features)


def _decode(settings: Settings, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> Call:
    q, k, v, features = _split(tensors)
    names = ("q", "k_cache", "v_cache")
    return attention_call("decode_attention", q, k, v, names=names, settings=settings, **values, **features)


def _paged(settings: Settings, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> Call:
    q, k, v, features = _split(tensors)
    table, lengths = features.pop("page_table"), features.pop("seqlens_k")
    return paged_call(q, k, v, table, lengths, settings=settings, **values, **features)


def _sparse(settings: Settings, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> Call:
    q, k, v, features = _split(tensors)
    by_head = features.pop("magicpig_bits"), features.pop("magicpig_tables")
    given = {**values, "magicpig": by_head if by_head[0] is not None else values["magicpig"]}
    return sparse_call(q, k, v, settings=settings, **given, **features)


def _mla(settings: Settings, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> Call:
    q, k, _, features = _split(tensors)
    rope, table, lengths = features.pop("q_rope"), features.pop("page_table"), features.pop("seqlens_k")
    return mla_call(q, rope, k, table, lengths, settings=settings, **values, **features)


def _split(tensors: Mapping[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    features = dict(tensors)
    return features.pop("q"), features.pop("k"), features.pop("v"), features


BUILDERS: dict[str, Builder] = {
    "attention": _attention,
    "varlen_attention": _varlen,
    "decode_attention": _decode,
    "paged_attention": _paged,
    "sparse_attention": _sparse,
    "mla_attention": _mla,
}
