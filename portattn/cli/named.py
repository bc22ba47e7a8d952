"""Names that several commands take: a quirk's id, a release of a compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portattn.planning.registry import Registry
    from portattn.schema.quirk import Quirk
    from portattn.schema.toolchain import Toolchain


def quirk_of(command: str, text: str, registry: Registry, argument: str = "ID") -> Quirk:
    """The living entry that an id, whole or up to its number, names.

    Raises ArgumentError on an id of none or of several, with the nearest ids, and of a retired one.
    """
    return registry.quirk(text, command, argument)


def tell_unknown(toolchains: Iterable[Toolchain]) -> None:
    """A line on standard error for each toolchain that is no known release: it is planned for all the same."""
    for text in dict.fromkeys(toolchain.unknown_release() for toolchain in toolchains):
        if text:
            click.echo(f"portattn: {text}; plans go by its number alone", err=True)
