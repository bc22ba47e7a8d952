"""Whether the registry knows a failure already: entries and tombstones whose signature its text matches."""

from __future__ import annotations

import fnmatch
import functools
import re
from pathlib import Path
from typing import Any

import msgspec

from portattn.planning.registry import Registry
from portattn.schema.quirk import Quirk
from portattn.schema.target import Arch, Target
from portattn.schema.toml_reader import tomllib
from portattn.tools.quirks.lifecycle.facts import Facts

_EXCEPTION = re.compile(r"^\s*(?:[A-Za-z_][\w.]*(?:Error|Exception)\b:?\s*)+")


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """An entry with the failure's signature.

    exact     whether the signature is in the words that say what went wrong, and not only somewhere in the log
    in_range  whether it applies where the failure was seen; None where that is not known
    says      what that means, for people
    """

    id: str
    title: str
    exact: bool
    in_range: bool | None
    says: str

    def __str__(self) -> str:
        return f"this {'is' if self.exact else 'may be'} {self.id}: {self.title}; {self.says}"


def known(facts: Facts, registry: Registry) -> list[Known]:
    """Every entry whose signature the text matches: exact ones first, and of them those that apply here."""
    target = facts.target(registry)
    found = []
    for quirk in (*registry.quirks.values(), *registry.retired.values()):
        signature = quirk.evidence.signature
        if quirk.when.backend not in (None, facts.backend) or not signature:
            continue
        exact = re.search(signature, _cause(facts)) is not None
        if exact or re.search(signature, facts.log):
            within, says = _range(quirk, facts, target, registry)
            found.append(Known(id=quirk.id, title=quirk.title, exact=exact, in_range=within, says=says))
    return sorted(found, key=lambda entry: (not entry.exact, entry.in_range is not True, entry.id))


def _cause(facts: Facts) -> str:
    """What went wrong, as it was recognised and as it stands in the log; not the exception's name before it, which many
    bugs have in common."""
    lines = facts.log.splitlines()[facts.failure.line - 1 :]
    return "\n".join(_EXCEPTION.sub("", text) for text in (facts.failure.cause, *lines[:1]))


def drafted(facts: Facts, out: Path) -> list[Known]:
    """Drafts under a folder that are of this failure: the same signature on the same chips and compiler."""
    found = []
    for path in sorted((out / facts.backend).glob("*.toml")):
        draft = _read(path)
        when, evidence = (draft[name] if isinstance(draft.get(name), dict) else {} for name in ("when", "evidence"))
        same = (
            facts.failure.signature
            and evidence.get("signature") == facts.failure.signature
            and when.get("arch", []) == list(facts.arches)
            and evidence.get("last_seen", "") == facts.compiler
        )
        if same:
            says = f"drafted already, in {path}"
            found.append(Known(id=path.stem, title=str(draft.get("title")), exact=True, in_range=None, says=says))
    return found


def _read(path: Path) -> dict[str, Any]:
    """A draft's tables; none of a file that cannot be read, or is being written by hand and is no TOML now."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}


def _range(quirk: Quirk, facts: Facts, target: Target | None, registry: Registry) -> tuple[bool | None, str]:
    if quirk.retired:
        fixed = f", fixed in {quirk.retired.fixed_in}" if quirk.retired.fixed_in else ""
        return False, f"retired on {quirk.retired.date}{fixed}: it is back, so log it anew with --force"
    other = [arch for arch in facts.arches if not _has_arch(quirk, arch, registry.arches[facts.backend].get(arch))]
    if other:
        return False, f"it names {', '.join(quirk.when.arch)}, and this is {', '.join(other)}: add the chip to its file"
    if target is None:
        return None, "in range or not is unknown: give --target and --toolchain to ask"
    for name, text in quirk.when.toolchain.items():
        if target.toolchain.within(name, text) is False:
            version = target.toolchain.component(name) or target.toolchain
            return False, f"out of range here: {name} {text}, and this is {version}; the range is too narrow"
    unverified = quirk.newer_than_seen(target.toolchain)
    caution = f", though last seen on {quirk.evidence.last_seen}" if unverified else ""
    if facts.kernels and quirk.when.kernels and not any(_has_kernel(quirk, name) for name in facts.kernels):
        return False, f"it names the kernels {', '.join(quirk.when.kernels)}, and this is {', '.join(facts.kernels)}"
    if quirk.effect.note is not None:
        return True, f"in range here{caution}, and no plan can avoid it: {quirk.effect.note}"
    return True, f"in range here{caution}: its work-around should have been applied"


def _has_arch(quirk: Quirk, name: str, arch: Arch | None) -> bool:
    """Whether an entry concerns a chip; arch is what is known of it, its families too."""
    patterns = quirk.when.arch
    known = arch.matches if arch else functools.partial(fnmatch.fnmatchcase, name)
    return not patterns or any(known(pattern) for pattern in patterns)


def _has_kernel(quirk: Quirk, kernel: str) -> bool:
    return any(fnmatch.fnmatchcase(kernel, pattern) for pattern in quirk.when.kernels)
