"""The version range that a verdict asks for, as a diff of the quirk's file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from packaging.version import Version

from portattn.schema import compilers, toml_reader
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.schema.toolchain import in_range, parse_range

LOWER, UPPER = (">=", ">"), ("<=", "<")


def component(quirk: Quirk) -> str:
    """The name that the entry's range is about: its compiler, or else its first component; empty without a range."""
    names = list(quirk.when.toolchain)
    return next((name for name in names if compilers.is_compiler(name)), names[0] if names else "")


def narrow_range(text: str, version: str, affected: Iterable[str]) -> str:
    """The range without a version on which nothing was wrong; `affected` are versions on which it was.

    The bound moves on the side on which no affected version is; between two of them the version is taken out. With
    none at all the bug is taken to be gone from that version on.
    """
    kept = [str(s) for s in parse_range(text)]
    seen = [Version(v) for v in affected]
    older = any(v < Version(version) for v in seen)
    newer = any(v > Version(version) for v in seen)
    if older and newer:
        return _joined([*kept, f"!={version}"])
    if newer:
        return _joined([s for s in kept if not s.startswith(LOWER)] + [f">={min(seen)}"])
    return _joined([s for s in kept if not s.startswith((*UPPER, "==", "~="))] + _lower_of(text) + [f"<{version}"])


def satisfiable(text: str) -> bool:
    """Whether a range has any version, released or not."""
    named = [Version(s.version.removesuffix(".*")) for s in parse_range(text)]
    after = [Version(f"{v}.0.0.1") for v in named]  # right behind each of them
    return any(parse_range(text).contains(v, prereleases=True) for v in (Version("0"), *named, *after))


def _lower_of(text: str) -> list[str]:
    """The lower bound that `==` and `~=` imply."""
    return [f">={s.version.removesuffix('.*')}" for s in parse_range(text) if s.operator in ("==", "~=")]


def extend_range(text: str, version: str) -> str:
    """The range with one version more, on which the bug was seen."""
    kept = [s for s in parse_range(text) if not (s.operator == "!=" and s.contains(version) is False)]
    missing = [s for s in kept if not in_range(version, str(s))]
    found = [str(s) for s in kept if s not in missing]
    for specifier in missing:
        other = Version(specifier.version.removesuffix(".*"))
        if specifier.operator in LOWER or (specifier.operator in ("==", "~=") and Version(version) < other):
            found.append(f">={version}")
            if specifier.operator in ("==", "~="):
                found.append(f"<={other}" if not specifier.version.endswith(".*") else f"<{_next(other)}")
        else:
            found += [f"<={version}", *(_lower_of(str(specifier)))]
    return _joined(found)


def _next(version: Version) -> str:
    return ".".join(map(str, (*version.release[:-1], version.release[-1] + 1)))


def _joined(parts: Iterable[str]) -> str:
    """Lower bounds first, as the registry's files have them."""
    unique = list(dict.fromkeys(parts))
    return ",".join(
        sorted(unique, key=lambda s: (not s.startswith(LOWER), not s.startswith("="), s.startswith("!"), s))
    )


def diff(quirk: Quirk, target: Target, verdict: str, affected: Iterable[str]) -> str:
    """The change of the quirk's file that `stale` or `too narrow` on this target asks for; empty for none.

    Where no version of the range would be left, a sentence that says so.
    """
    name = component(quirk)
    version = target.toolchain.component(name) if name else None
    if verdict not in ("stale", "too narrow") or version is None:
        return ""
    old, affected = quirk.when.toolchain[name], list(affected)
    new = narrow_range(old, version, affected) if verdict == "stale" else extend_range(old, version)
    if not satisfiable(new):
        seen = f"{name}=={version} does not have it any more" if version in affected else f"nobody has seen it in {old}"
        return f"{seen}: retire {quirk.id}, or mend its probe"
    path = Path(quirk.file)
    if not path.is_file() or new == old:
        return ""
    text = path.read_text(encoding="utf-8")
    number = toml_reader.line_of(text, "when", "toolchain", name)
    line = text.splitlines()[number - 1] if number else ""
    if old not in line:
        return ""
    return f"--- {path}:{number}\n-{line}\n+{line.replace(old, new)}"
