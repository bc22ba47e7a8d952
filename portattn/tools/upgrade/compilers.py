"""The compilers of an upgrade: NAME==VERSION as it is given, and what is to be known about such a version."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from packaging.version import Version

from portattn.errors import ArgumentError
from portattn.schema.toolchain import Toolchain
from portattn.tools import lab


def parse_compiler(op: str, option: str, text: str) -> Toolchain:
    """The compiler that an option names; a version that the lab knows is written as there: 3.9 is 3.9.0.

    Raises ArgumentError on anything that is no compiler with a version.
    """
    try:
        found = Toolchain.parse(text)
    except ValueError as error:
        raise ArgumentError(op, option, text, str(error).partition(": ")[2]) from None
    if not found:
        raise ArgumentError(op, option, text, "must be a compiler, as in triton==3.6.0")
    if found.distribution in lab.distributions():
        found = msgspec.structs.replace(found, version=lab.canonical(str(found)).partition("==")[2])
    return found


def cautions(toolchain: Toolchain) -> Iterator[str]:
    """What is uncertain where a version is no plain release that portattn knows."""
    unknown, version = toolchain.unknown_release(), Version(toolchain.version)
    if unknown:
        yield f"{unknown}; plans go by its number alone, and nobody is known to have run it"
    if version.is_prerelease:
        yield f"{toolchain} comes before {version.base_version} in the ranges of quirks and of tuning"
    if version.local:
        yield f"{toolchain} is a build of its own: nothing that was seen with {version.public} counts as seen with it"
