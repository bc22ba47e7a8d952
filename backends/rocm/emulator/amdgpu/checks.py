"""What is looked at while a kernel runs, and what was found."""

from __future__ import annotations

from dataclasses import dataclass

from portattn.backends.rocm.emulator.amdgpu.errors import Finding, Place

MOST_FINDINGS = 100  # with stop=False: a kernel that is wrong everywhere says so a hundred times


@dataclass(frozen=True)
class Checks:
    """Which checks are on, and whether the first finding stops the launch.

    stop        raise the first finding; else collect them in Report.findings and go on as the chip might: an access
                out of bounds reads 0 and writes nothing
    memory      global and scratch accesses lie in the buffers given
    lds         LDS accesses lie in the work-group's LDS
    races       no LDS byte is accessed by two waves between barriers unless both only read, or write the same value
    barriers    all waves of a work-group wait at the same barrier
    undefined   nothing undefined reaches memory, an address, a branch or the execution mask
    groups      no byte of global memory is stored by one work-group and accessed by another, unless an atomic orders
                them; off by default: it takes some time, and kernels may order themselves in ways that it cannot see
    waits       results are used, and LDS writes relied on, only after a wait that covers them
    """

    stop: bool = True
    memory: bool = True
    lds: bool = True
    races: bool = True
    barriers: bool = True
    undefined: bool = True
    waits: bool = True
    groups: bool = False

    @classmethod
    def off(cls) -> Checks:
        """No checks: for speed, or to see the numbers that a wrong kernel makes."""
        return cls(memory=False, lds=False, races=False, barriers=False, undefined=False, waits=False)


class Findings:
    """Collects findings, or raises the first."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks
        self.found: list[Finding] = []
        self._seen: set[tuple[type[Finding], int]] = set()

    def clear(self) -> None:
        self.found = []
        self._seen.clear()

    def report(self, kind: type[Finding], problem: str, place: Place | None) -> None:
        error = kind(problem, place)
        if self.checks.stop:
            raise error
        key = (kind, place.line if place else 0)
        if key not in self._seen and len(self.found) < MOST_FINDINGS:
            self._seen.add(key)
            self.found.append(error)
