"""CompileRecord: the result of compiling one specialisation for one toolchain. Incident: a classified failure."""

from __future__ import annotations

import datetime
from typing import Literal, Protocol

import msgspec

from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem
from portattn.schema.quirk import Level, Symptom

Standing = Literal["lasting", "timeout", "passing"]


class CompileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of compiling one specialisation for a target and toolchain.

    key       digest of the specialisation, target and toolchain (see ensure_compiled.code_key)
    level     highest evidence level reached
    passed    False: the specialisation must not be used on this toolchain
    error     largest error against the reference, if numbers were compared
    incident  id of the recorded failure when not passed
    facts     registers, spills, local memory and matrix-instruction counts, if they were read
    standing  how long a failure counts. lasting: as long as its key; timeout: until `until`, or until a call gives more
              time than `limit`; passing: in this process, until `until` or until the environment changes
    wait      seconds that a timeout or passing failure counts; they end at `until`
    limit     seconds after which the compile timed out

    >>> import datetime, portattn
    >>> seen = dict(key="0", kernel="dense_forward", target="cuda:sm_90", toolchain="triton==3.6.0", level="compiles")
    >>> failed = portattn.CompileRecord(**seen, passed=False, date=datetime.date(2026, 1, 31), reason="it hung")
    >>> failed.told()
    'failed here on 2026-01-31: it hung'
    """

    key: str
    kernel: str
    target: str
    toolchain: str
    level: Level
    passed: bool
    date: datetime.date
    error: float | None = None
    reason: str = ""
    incident: str = ""
    facts: dict[str, int | str] = {}
    standing: Standing = "lasting"
    wait: float = 0.0
    until: datetime.datetime | None = None
    limit: float = 0.0

    def told(self) -> str:
        """Return a failure as a plan's reason: the failure's cause, and until when it counts."""
        if self.standing == "passing":
            again = f"tried again after {_duration(self.wait)}, or when the environment changes"
            return f"could not be compiled now: {self.reason}; {again}"
        if self.standing == "timeout":
            again = f"tried again after {_duration(self.wait)}, or with compile_seconds over {self.limit:g}"
            return f"failed here on {self.date}: {self.reason}; {again}"
        return f"failed here on {self.date}: {self.reason}"


def _duration(seconds: float) -> str:
    for unit, size in (("hour", 3600.0), ("minute", 60.0), ("second", 1.0)):
        if seconds >= size or unit == "second":
            number = f"{seconds / size:g}"
            return f"{number} {unit}{'' if number == '1' else 's'}"
    raise AssertionError("unreachable")


class Incident(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A failure seen here, with all data to report and reproduce it.

    Attributes:
        symptom: as quirks name it
        stage: where it happened: parse | ttir | ttgir | llir | ptx | cubin | amdgcn | hsaco | ttadapter | load |
            unknown
        message: the line that names the cause
        log: the failing process's last output
        command: a shell command that fails the same way
        environment: toolchain, components and Triton variables that took part
        specialisation: the kernel's signature for the compiler (launch.Signature), as plain data
        problem, lowering, launch, environment_set: the plan's, so that it can be planned and compiled again; None in an
            incident of an older release, or of a path without a kernel of portattn's

    `portattn doctor` lists the latest ones.

    Examples:
        >>> import datetime, portattn
        >>> where = dict(key="0", kernel="dense_forward", target="cuda:sm_90", toolchain="triton==3.6.0", stage="ttgir")
        >>> what = dict(symptom="hang", message="no answer in 120 s", log="", command="", environment={})
        >>> portattn.Incident(id="1", **where, **what, date=datetime.datetime(2026, 1, 31)).symptom
        'hang'
    """

    id: str
    key: str
    kernel: str
    target: str
    toolchain: str
    symptom: Symptom
    stage: str
    message: str
    log: str
    command: str
    environment: dict[str, str]
    date: datetime.datetime
    quirks: tuple[str, ...] = ()
    specialisation: Literal[None] | dict[str, object] = None
    problem: Problem | None = None
    lowering: Lowering | None = None
    launch: Launch | None = None
    environment_set: dict[str, str] = {}


class CompileRecords(Protocol):
    """A lookup of records by key: a dict, or the store on disk."""

    def get(self, key: str, /) -> CompileRecord | None: ...


NO_RECORDS: dict[str, CompileRecord] = {}
