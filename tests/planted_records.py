"""Records and incidents of a compile that failed."""

import datetime
from typing import Any

from portattn import CompileRecord, Incident

WHEN = datetime.datetime(2026, 11, 21, 3, tzinfo=datetime.timezone.utc)
WHERE = {"kernel": "dense_forward", "target": "cuda:sm_90", "toolchain": "triton==3.6.0"}


def record(key: str = "k", **fields: Any) -> CompileRecord:
    known: dict[str, Any] = {**WHERE, "level": "declared", "passed": False, "date": WHEN.date()}
    return CompileRecord(key=key, **(known | fields))


def incident(name: str = "i", **fields: Any) -> Incident:
    known: dict[str, Any] = {
        **WHERE, "key": "k", "symptom": "hang", "stage": "ttgir", "message": "no answer", "log": "…", "command": "",
        "environment": {}, "date": WHEN,
    }  # fmt: skip
    return Incident(id=name, **(known | fields))
