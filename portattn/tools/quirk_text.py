"""A quirk of the registry as named lines of text: the catalogue's page and the matrix's site show the same."""

from __future__ import annotations

from collections.abc import Iterable

from portattn.schema.quirk import Quirk, describe_effect


def fields(quirk: Quirk) -> dict[str, str]:
    """Where it holds, what it does and what it rests on. Names of code stand in backticks."""
    when, evidence = quirk.when, quirk.evidence
    conditions = [
        *(f"`{text}`" for text in when.features),
        *(f"`{name} = {value}`" for name, value in when.lowering.items()),
        *(
            f"`{name} {value}`" if str(value)[0] in "<>!" else f"`{name} = {value}`"
            for name, value in when.launch.items()
        ),
    ]
    seen = f", last seen on {evidence.last_seen}" if evidence.last_seen else ""
    return {
        "Where": f"{when.backend or 'any'}, {_code(when.arch) or 'all chips'}",
        "Toolchains": ", ".join(f"{name} {text}" for name, text in when.toolchain.items()) or "all",
        "Only when": ", ".join([_code(when.kernels) or "every kernel", *conditions]),
        "Effect": describe_effect(quirk.effect) + (f"; cost: {quirk.effect.cost}" if quirk.effect.cost else ""),
        "Source": evidence.source,
        "Review": (f"by {evidence.review_by}" if evidence.review_by else "none due") + seen,
    }


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
