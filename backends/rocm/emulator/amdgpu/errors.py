"""Errors of the model: a text or launch that cannot be executed, or a Finding that would be wrong on the chip."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    line: int  # of the assembly text, from 1
    text: str
    source: str = ""  # of the last `.loc`, "file.py:12:30"; empty without one

    def __str__(self) -> str:
        source = f" ({self.source})" if self.source else ""
        return f"line {self.line}{source}: {self.text}"


class EmulationError(Exception):
    """Base class. `place` is None if no instruction is to blame."""

    def __init__(self, problem: str, place: Place | None = None) -> None:
        self.problem, self.place = problem, place
        super().__init__(f"{place}: {problem}" if place else problem)

    def at(self, place: Place) -> EmulationError:
        """Return the error with its place, for code that raises without knowing it."""
        return self if self.place is not None else type(self)(self.problem, place)


class BadProgram(EmulationError):
    """The text cannot be executed."""


class TruncatedText(BadProgram):
    """The text ends before the kernel, its descriptor or its metadata does."""


class WrongArch(BadProgram):
    """The text is for an architecture that is not modelled, or has an instruction that its architecture lacks."""


class UnknownInstruction(BadProgram):
    """An instruction that the model does not know; it never guesses."""


class UnknownOperand(BadProgram):
    """An operand or a modifier that the model does not know."""


class BadLaunch(EmulationError, ValueError):
    """A launch with the wrong arguments, grid or sizes."""


class Finding(EmulationError):
    """A kernel's act that is wrong, or not sure to be right, on the chip."""


class OutOfBounds(Finding):
    """A global or scratch access outside every buffer of the launch."""


class LdsOutOfRange(Finding):
    """An LDS access outside the bytes that the work-group has."""


class LdsRace(Finding):
    """Unordered accesses of two waves to one LDS byte between barriers, one a write at least."""


class GlobalRace(Finding):
    """Unordered accesses of two work-groups to one byte of global memory, one a store at least."""


class BarrierMismatch(Finding):
    """The waves of a work-group wait at different barriers, or one ends while others wait."""


class UninitialisedValue(Finding):
    """An undefined value reaches memory, an address, a branch or the execution mask."""


class MissingWait(Finding):
    """A result is used, or an LDS access relied on, before a wait that covers it."""


class StepLimit(Finding):
    """More instructions than the launch allows: probably an endless loop."""


MOST_FINDINGS = 100  # with stop=False: a kernel that is wrong everywhere says so a hundred times


@dataclass(frozen=True)
class Checks:
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
        """Return no checks: for speed, or to see a wrong kernel's numbers."""
        return cls(memory=False, lds=False, races=False, barriers=False, undefined=False, waits=False)


class Findings:
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
