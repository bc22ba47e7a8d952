"""Errors cross processes, pickled by pools, and their tracebacks are short where the mistake is the caller's."""

import copy
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import portattn
from portattn.api.request import Request
from portattn.errors import ArgumentError, DataError, PathUnavailable, PortattnError, QuirkConflict, UnknownArgument
from portattn.schema.plan import Rejection

ERRORS = (
    ArgumentError("attention", "q.dtype", ("float64", 1), "must be one of float16, float32"),
    UnknownArgument("attention", "sclae", ": did you mean scale?"), DataError("quirks/a.toml", 3, "misses when"),
    DataError("quirks/a.toml", None, "misses when"),
    QuirkConflict("load", ("cuda-0001", "pointer"), ("cuda-0002", "descriptor")),
    PathUnavailable("attention: none", [Rejection(path="triton", reason="of a reason", hint="do that")]),
)  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickled", "copied"])
def test_an_error_stays_itself(error: PortattnError, again: object) -> None:
    found = again(error)  # type: ignore[operator]
    assert (type(found), str(found)) == (type(error), str(error))
    public = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    assert public
    assert {name: getattr(found, name) for name in public} == public


Q = torch.zeros(1, 2, 3, 8)
LENGTHS = torch.zeros(1, dtype=torch.int32)
# A caller's mistake at each entry, and how many of portattn's frames its traceback shows.
MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], int]] = {
    "attention": (lambda: portattn.attention(Q, Q, Q, causal="left"), ArgumentError, 1),
    "a missing argument": (lambda: portattn.attention(Q, Q), TypeError, 1),  # type: ignore[call-arg]
    "an unknown argument": (lambda: portattn.attention(Q, Q, Q, sclae=1.0), UnknownArgument, 1),  # type: ignore[call-arg]
    "varlen_attention": (
        lambda: portattn.varlen_attention(Q[0], Q[0], Q[0], LENGTHS, LENGTHS, 1.5, 3),  # type: ignore[arg-type]
        ArgumentError, 1,
    ),
    "decode_attention": (lambda: portattn.decode_attention(Q, Q, Q, LENGTHS.long()), ArgumentError, 1),
    "paged_attention": (lambda: portattn.paged_attention(Q, Q, Q, LENGTHS, LENGTHS), ArgumentError, 1),
    "sparse_attention": (lambda: portattn.sparse_attention(Q, Q, Q, LENGTHS, LENGTHS), ArgumentError, 1),
    "mla_attention": (lambda: portattn.mla_attention(Q, Q, Q, LENGTHS, LENGTHS, scale=1.0), ArgumentError, 1),
    "append_kv": (lambda: portattn.append_kv(Q, Q, Q, Q, LENGTHS.long()), ArgumentError, 2),
    "prepare": (lambda: portattn.prepare("attention", Q, Q, Q, causal="left"), ArgumentError, 1),
    "plan": (lambda: portattn.plan("attention", Q, Q, Q, causal="left"), ArgumentError, 1),
    "explain": (lambda: portattn.explain("attention", Q, Q), TypeError, 1),
    "a handle's run": (lambda: portattn.prepare("attention", Q, Q, Q).run(Q, Q, Q, causal=True), ArgumentError, 1),
}  # fmt: skip


def frames_of(error: BaseException) -> list[str]:
    root = os.path.dirname(portattn.__file__)
    return [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(root)]


@pytest.mark.parametrize("entry", MISTAKES)
def test_an_error_of_the_caller_shows_his_line_and_the_entry(entry: str) -> None:
    mistake, kind, shown = MISTAKES[entry]
    with pytest.raises(kind) as raised:
        mistake()
    assert len(frames_of(raised.value)) == shown, frames_of(raised.value)
    assert raised.traceback[1].frame.code.path == Path(__file__)  # the line in the table, above the entry
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


@pytest.mark.parametrize("fault", [RuntimeError("a fault"), TypeError("a fault"), KeyError("a fault")], ids=repr)
def test_a_fault_of_portattn_shows_all_frames(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "build", Mock(side_effect=fault))
    with pytest.raises(type(fault)) as raised:
        portattn.attention(Q, Q, Q, scale=0.123)
    assert len(frames_of(raised.value)) > 2, frames_of(raised.value)
