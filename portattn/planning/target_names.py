"""Names of targets: BACKEND:ARCH, and what people say instead: an arch alone (`sm_90`), a chip (`h100`, `rtx 4090`),
a family of chips (`hopper`, `910b`).

They come from the files of the arches (title, families), so that a new arch brings its names along.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from portattn.errors import ArgumentError
from portattn.schema.target import Arch

Arches = Mapping[str, Mapping[str, Arch]]  # backend -> name -> arch
SHOWN = 3  # names that an error proposes


def resolve(text: str, arches: Arches) -> tuple[str, str]:
    """Backend and arch that a target's name means. Raises ArgumentError with the nearest names on one that means none.

    `cuda:h100` is a chip of one backend. Case, spaces, `-` and `_` make no difference.
    """
    backend, colon, arch = text.partition(":")
    if colon and backend not in arches:
        raise ArgumentError("target", "backend", backend, f"must be one of {', '.join(arches)}")
    if colon and arch in arches[backend]:
        return backend, arch
    within = {backend: arches[backend]} if colon else arches
    found = _meant(arch if colon else text, within)
    if len(found) == 1:
        return found[0]
    if colon:
        raise ArgumentError("target", "arch", arch, f"{backend} knows {', '.join(arches[backend])}")
    if found:
        limit = f"is a name of {', '.join(map(':'.join, found[:-1]))} and {':'.join(found[-1])}: say which"
    else:
        limit = f"must be BACKEND:ARCH, an arch or a chip, such as {', '.join(nearest(text, arches))}"
    raise ArgumentError("target", "target", text, limit)


def members(text: str, arches: Arches) -> list[tuple[str, str]]:
    """(backend, arch) of every arch of the family that a text names, as `rdna3` or `rocm:rdna3`; none where it names no
    family, and those first that kernels are planned for."""
    backend, colon, name = text.partition(":")
    wanted = _plain(name if colon else text)
    found = [
        (owner, arch)
        for owner, known in arches.items()
        for arch in known
        if not colon or owner == backend
        if wanted in map(_plain, known[arch].families)
    ]
    return sorted(found, key=lambda pair: bool(arches[pair[0]][pair[1]].refused))


def families(arches: Arches) -> dict[str, list[tuple[str, str]]]:
    """Every family's name, and its (backend, arch) pairs."""
    named = dict.fromkeys(f for known in arches.values() for arch in known.values() for f in arch.families)
    return {name: members(name, arches) for name in named}


def nearest(text: str, arches: Arches) -> list[str]:
    """Names that look like a text, with what they mean; a backend's targets for its name, and one of each else."""
    names = {name: ":".join((backend, arch)) for name, backend, arch in _names(arches)}
    for family, found in families(arches).items():
        names.setdefault(_plain(family), f"family of {', '.join(map(':'.join, found))}")
    if text in arches:
        return [f"{text}:{arch}" for arch in arches[text]]
    close = difflib.get_close_matches(_plain(text), names, n=SHOWN, cutoff=0.6)
    if close:
        return [f"{name} ({names[name]})" for name in close]
    served = {backend: [name for name, arch in known.items() if not arch.refused] for backend, known in arches.items()}
    return [f"{backend}:{known[0]}" for backend, known in served.items() if known]


def chips(title: str) -> list[str]:
    """The chips that an arch's title names: `H100 SXM, H200` has two. What comes before a colon is their series."""
    return [part.strip() for part in re.sub(r"\(.*?\)", "", title).rpartition(":")[2].split(",") if part.strip()]


def _meant(text: str, arches: Arches) -> list[tuple[str, str]]:
    """The (backend, arch) pairs that a name means: one arch, or the one whose tuning a family's arches share."""
    wanted = _plain(text)
    known = list(_names(arches))
    found = list(dict.fromkeys((backend, arch) for name, backend, arch in known if name == wanted))
    found = found or members(wanted, arches)
    if not found and any(c.isdigit() for c in wanted):
        family = re.compile(re.escape(wanted) + (r"(?=[a-z]).*" if wanted[-1].isdigit() else r"(?=\d).*"))
        found = list(dict.fromkeys((backend, arch) for name, backend, arch in known if family.fullmatch(name)))
    if len(found) > 1 and len({(backend, arches[backend][arch].tuning or arch) for backend, arch in found}) == 1:
        backend, arch = found[0]
        shared = arches[backend][arch].tuning
        return [(backend, shared if shared in arches[backend] else arch)]
    return found


def _names(arches: Arches) -> Iterator[tuple[str, str, str]]:
    """(plain name, backend, arch): arches, their chips, words of those that have a digit, and backends of one arch."""
    for backend, known in arches.items():
        for arch, described in known.items():
            if len(known) == 1:
                yield _plain(backend), backend, arch
            yield _plain(arch), backend, arch
            for chip in chips(described.title):
                words = [_plain(word) for word in chip.split()]
                for first in range(len(words)):
                    for last in range(first + 1, len(words) + 1):
                        name = "".join(words[first:last])
                        if any(c.isdigit() for c in name) or last - first == len(words):
                            yield name, backend, arch


def _plain(text: str) -> str:
    return re.sub(r"[\s_-]", "", text).lower()
