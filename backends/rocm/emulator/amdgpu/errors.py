"""Every error that the model raises on purpose. All derive from EmulationError.

Two kinds: the text or the launch cannot be executed (BadProgram, BadLaunch), or the kernel does something that would be
wrong on the chip (Finding). A Finding knows the assembly line and the kernel's source line.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where an instruction stands.

    line    line of the assembly text, from 1
    text    the instruction as written
    source  the kernel's source as the `.loc` before it says, "file.py:12:30"; empty where the text has none
    """

    line: int
    text: str
    source: str = ""

    def __str__(self) -> str:
        source = f" ({self.source})" if self.source else ""
        return f"line {self.line}{source}: {self.text}"


class EmulationError(Exception):
    """Base class. `place` is where, or None where no instruction is to blame."""

    def __init__(self, problem: str, place: Place | None = None) -> None:
        self.problem, self.place = problem, place
        super().__init__(f"{place}: {problem}" if place else problem)

    def at(self, place: Place) -> EmulationError:
        """The same error with its place, for code that raises without knowing it."""
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
    """Something that the kernel does and that is wrong, or not sure to be right, on the chip."""


class OutOfBounds(Finding):
    """A global or scratch access outside every buffer that the launch was given."""


class LdsOutOfRange(Finding):
    """An LDS access outside the bytes that the work-group has."""


class LdsRace(Finding):
    """Two waves access one LDS byte between two barriers, at least one of them writes, and the order is open."""


class GlobalRace(Finding):
    """Two work-groups of a launch access one byte of global memory, one at least stores, and the order is open."""


class BarrierMismatch(Finding):
    """The waves of a work-group wait at different barriers, or one ends while others wait."""


class Uninitialised(Finding):
    """A value that nothing has defined reaches memory, an address, a branch or the execution mask."""


class MissingWait(Finding):
    """A result is used, or an LDS access relied on, before a wait that covers it."""


class StepLimit(Finding):
    """More instructions than the launch allows: an endless loop, as far as anyone can tell."""
