"""Files that are read back as decisions: JSON in an envelope that says what it stands for, with a checksum.

    {"format": 2, "kind": "record", "key": "…", "sha256": "…", "body": {…}}

The checksum is of kind, key and the body's bytes as they stand in the file. It finds what disks, half writes and people
do to files; it is no signature. So a file counts only if its owner and mode are trusted (portattn/files.py): anybody
can seal a record by which no kernel runs, or one by which a kernel with wrong results does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

import msgspec

from portattn.errors import warn_caller
from portattn.files import Untrusted, read_limited

T = TypeVar("T")
FORMAT = 2  # before there was no envelope
MOST = 64 << 20  # bytes of a file: an incident with its log has some 100 kB


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    kind: str
    key: str
    sha256: str
    body: msgspec.Raw


def seal(kind: str, key: str, body: msgspec.Struct) -> bytes:
    """A file's bytes. Text that is no valid Unicode (names of files, variables) is written with replacements."""
    # People read incidents: the whole is laid out, and the body digested as it stands in it.
    raw = msgspec.json.format(_encoded(body))
    envelope = _Envelope(format=FORMAT, kind=kind, key=key, sha256=_digest(kind, key, raw), body=msgspec.Raw(raw))
    return msgspec.json.encode(envelope) + b"\n"


def unseal(data: bytes, kind: str, key: str, of: type[T]) -> T | None:
    """What was sealed under a kind and a key; None where the bytes are anything else, or of another format."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        raw = bytes(envelope.body)
        if (envelope.format, envelope.kind, envelope.key) != (FORMAT, kind, key):
            return None
        if envelope.sha256 != _digest(kind, key, raw):
            return None
        return msgspec.json.decode(raw, type=of)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        # Broken bytes raise DecodeError, UnicodeDecodeError, or RecursionError where they nest deeply; a body of
        # another release raises ValidationError.
        return None


_distrusted: set[Path] = set()  # folders that were warned about


def read(path: Path, kind: str, key: str, of: type[T]) -> T | None:
    """Return what a file holds for a key; None if there is none, if it cannot be read, or if it is another key's.

    A file that another user owns or can change counts as absent, with one warning for each folder.
    """
    try:
        data = read_limited(path, MOST, owned=True)
    except Untrusted as error:
        if path.parent not in _distrusted:
            _distrusted.add(path.parent)
            warn_caller(
                f"{error}: it and all like it in that folder count as absent. To have them counted, make them "
                "yours (chown, chmod go-w); or set PORTATTN_CACHE_DIR to your own folder"
            )
        return None
    except (OSError, ValueError):  # ValueError: a key that can be no file's name
        return None
    return unseal(data, kind, key, of)


def _digest(kind: str, key: str, raw: bytes) -> str:
    named = f"{kind}\0{key}\0".encode(errors="surrogatepass")
    return hashlib.sha256(named + raw).hexdigest()


def _encoded(body: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return msgspec.json.encode(_valid(msgspec.to_builtins(body)))


def _valid(value: object) -> object:
    """The same with "?" for what os.fsdecode made of bytes that are no UTF-8."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_valid(name): _valid(item) for name, item in value.items()}
    return [_valid(item) for item in value] if isinstance(value, (list, tuple)) else value
