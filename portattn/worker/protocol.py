"""The messages between a worker and its child: JSON lines, each with the id of the request that it belongs to.

serve.py, which runs in the child with the standard library alone, writes and reads the same by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from portattn.errors import ArgumentError

PROTOCOL = 2
# Characters of a message's texts that are kept. serve.py cuts its own messages before, at half of that.
NAME_LIMIT, MESSAGE_LIMIT = 200, 16_000


class ProtocolError(Exception):
    """What a child sent is not an answer to what it was asked. The text goes on from "the worker"."""


class Stage(msgspec.Struct):
    """Progress: the compiler stage that the child enters."""

    id: int
    stage: str


class Answer(msgspec.Struct):
    """The end of a request. version: of the protocol that the child speaks."""

    id: int
    ok: bool
    version: int
    facts: dict[str, int | str | float] = {}
    toolchain: str = ""
    stage: str = ""
    kind: str = ""
    message: str = ""
    log: str = ""


def encode(number: int, task: str, fields: Mapping[str, Any]) -> bytes:
    """The line of a request. Raises ArgumentError on a field that JSON cannot carry, or that is the protocol's own."""
    own = {"version": PROTOCOL, "id": number, "task": task}
    for name in fields:
        if name in own:
            raise ArgumentError("Worker.request", "fields", name, f"{', '.join(own)} are the protocol's own")
    try:
        return json.dumps({**own, **fields}).encode() + b"\n"
    except (TypeError, ValueError, RecursionError):
        name = next((name for name, value in fields.items() if not _carried(value)), "fields")
        value, limit = (
            fields.get(name, fields),
            "must be what JSON can carry: numbers, texts, lists and mappings with texts as keys",
        )
        raise ArgumentError("Worker.request", name, _Named(type(value)), limit) from None


class _Named:
    """A value that an error names by its type: it may be large, or its repr may not end either."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"a {self.kind.__qualname__}"


def _carried(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def decode(line: bytes, number: int) -> Stage | Answer:
    """One line of a child that was asked request `number`. Raises ProtocolError on anything else than its message."""
    shown = repr(line[:NAME_LIMIT].decode(errors="backslashreplace"))
    try:
        found = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ProtocolError(f"answered {shown}, which is not UTF-8") from None
    except (ValueError, RecursionError):  # the latter where it is nested deeply
        raise ProtocolError(f"answered {shown}, which is not JSON") from None
    kind: type[Stage | Answer] = Answer if isinstance(found, dict) and "ok" in found else Stage
    spoken = found.get("version") if kind is Answer else PROTOCOL
    if isinstance(spoken, int) and spoken != PROTOCOL:  # looked at first: its other fields may be others
        ours = f"this portattn speaks {PROTOCOL}: they are of different releases, install one of them anew"
        raise ProtocolError(f"speaks protocol {spoken}, and {ours}")
    try:
        message = msgspec.convert(found, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"answered {shown}, which is no message of protocol {PROTOCOL}: {error}") from None
    if message.id != number:
        raise ProtocolError(f"answered request {message.id} where it was asked request {number}")
    return _plain(message)


def _plain(message: Stage | Answer) -> Stage | Answer:
    """The message with texts that can be written as UTF-8, and none longer than is of use."""
    if isinstance(message, Stage):
        return msgspec.structs.replace(message, stage=_text(message.stage, NAME_LIMIT))
    return msgspec.structs.replace(
        message,
        facts={_text(k): _text(v) if isinstance(v, str) else v for k, v in message.facts.items()},
        toolchain=_text(message.toolchain, NAME_LIMIT),
        stage=_text(message.stage, NAME_LIMIT),
        kind=_text(message.kind, NAME_LIMIT),
        message=_text(message.message, MESSAGE_LIMIT),
        log=_text(message.log),
    )


def _text(text: str, limit: int | None = None) -> str:
    """JSON can name half a surrogate pair, which no file and no terminal takes."""
    return text[:limit].encode(errors="replace").decode()
