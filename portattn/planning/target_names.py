"""Names of targets: BACKEND:ARCH, an arch (`sm_90`), a chip (`rtx 4090`), a family (`hopper`), a driver's name.

They come from the arches' files. A driver's name loses the words that do not tell the chip (Backend.device_words); the
rest must be a whole name: `H20` is no `H200`.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence

from portattn.errors import ArgumentError
from portattn.schema.target import Arch

Arches = Mapping[str, Mapping[str, Arch]]  # backend -> name -> arch
Words = Mapping[str, Sequence[str]]  # backend -> its device_words
SHOWN = 3  # names that an error proposes
# Separators of the words of a driver's name; in a chip's own, `_` and `-` are inside a word: Ascend910_9382.
_BETWEEN = re.compile(r"[\s_/()-]+")
_APART = re.compile(r"[\s/()]+")


def resolve(name: str, arches: Arches, words: Words | None = None) -> tuple[str, str]:
    """Return the backend and arch of a target's name; raise ArgumentError with the nearest names.

    `cuda:h100` is a chip of one backend. Case, spaces, `-` and `_` make no difference."""
    words = words or {}
    backend, colon, arch = name.partition(":")
    if colon and backend not in arches:
        raise ArgumentError("target", "backend", backend, f"must be one of {', '.join(arches)}")
    if colon and arch in arches[backend]:
        return backend, arch
    within = {backend: arches[backend]} if colon else arches
    found = _meant(arch if colon else name, within, words)
    if len(found) == 1:
        return found[0]
    if found:
        limit = f"is a name of {', '.join(map(':'.join, found[:-1]))} and {':'.join(found[-1])}: say which"
    elif colon:
        limit = f"{backend} knows {', '.join(_served(arches[backend]))}"
        if elsewhere := _meant(arch, arches, words):
            limit += f"; it is a name of {' and '.join(map(':'.join, elsewhere))}"
        elif close := _close(arch, within, words):
            limit += f"; near are {', '.join(close)}"
        raise ArgumentError("target", "arch", arch, limit)
    else:
        limit = f"must be BACKEND:ARCH, an arch or a chip, such as {', '.join(nearest(name, arches, words))}"
    raise ArgumentError("target", "name", name, limit)


def mentioned_chips(text: str, arches: Arches, words: Words) -> dict[tuple[str, str], str]:
    """Return the words by which a text names each (backend, arch) as a driver does.

    A word that its maker's devices share (Backend.device_words), or `Ascend`, stands before the chip's whole name."""
    known: dict[tuple[str, str], dict[str, None]] = {}
    for name, backend, arch in _names(arches):
        known.setdefault((backend, name), {})[arch] = None
    found: dict[tuple[str, str], str] = {}
    for match in dict.fromkeys(re.findall(_after(arches, words), text)):
        parts = [part.rstrip(".") for part in match.split()]
        for last in range(len(parts), 1, -1):  # the longest name: `RTX 4000 Ada`, and not `RTX 4000`
            device = " ".join(parts[:last])
            told = {backend: _plain(_told(device, words.get(backend, ()))) for backend in arches}
            meant = [
                (backend, arch)
                for backend, name in told.items()
                if not name.isdigit() or (len(name) == _DIGITS and not _AMOUNT.match(" ".join(parts)))
                for arch in known.get((backend, name), ())
            ]
            if meant:
                found.update((pair, device) for pair in meant if pair not in found)
                break
    return found


def bare_chips(text: str, arches: Arches) -> dict[tuple[str, str], str]:
    """Return the words by which a text names each (backend, arch) without a maker: `MI300X`, `2080 Ti`, `T4 GPU`.

    A name of one arch alone counts. A short one (`L2`) stands beside `GPU` or, if less short, behind `on`; a number
    (`4090`) likewise, and no unit follows it. One pass over the text, which may have 64 MiB."""
    whole: dict[str, set[tuple[str, str]]] = {}
    shorter: dict[str, set[tuple[str, str]]] = {}
    for backend, known in arches.items():
        for arch, described in known.items():
            for chip in (*chips(described.title), *described.names):
                parts = _APART.split(chip)
                whole.setdefault(chip, set()).add((backend, arch))
                firsts = range(len(parts)) if parts[0] in (*_NUMBERED, *_LETTERED) else range(1)
                for first, last in ((f, n) for f in firsts for n in range(f + 1, len(parts) + 1)):
                    name = " ".join(parts[first:last])
                    number = name.isdigit() and first == 1 and parts[0] in _NUMBERED
                    if name != chip and (not first or number or len(name) >= _SHORTEST_OF_ANY_CASE):
                        shorter.setdefault(name, set()).add((backend, arch))
                shorter.setdefault(re.sub(r"(?<=\d{3})[A-Z]+$", "", chip), set()).add((backend, arch))  # MI300
    named = {name: min(pairs) for name, pairs in {**shorter, **whole}.items() if len(pairs) == 1}
    names = {
        _squeezed(name).lower(): name
        for name in named
        if any(map(str.isdigit, name)) or (" " in name and name in whole)
        if len(shorter.get(name, ())) <= 1 and not _SERIES.fullmatch(name)
    }
    starts: dict[str, list[str]] = {}  # by the first character, on which an alternation is fast
    for name in sorted(names.values(), key=len, reverse=True):  # `RTX 4000 Ada` before `RTX 4000`
        pattern = r"[ \t_-]?".join(map(re.escape, _APART.split(name)))
        starts.setdefault(pattern[0], []).append(pattern[1:])
    scan = "|".join(f"[{start}{start.lower()}](?i:{'|'.join(rests)})" for start, rests in starts.items())
    found: dict[tuple[str, str], str] = {}
    for match in re.finditer(rf"(?:(?<![\w.])|(?<=\b\dx))(?:{scan})(?![\w.]*\w)", text, re.ASCII):
        words = _squeezed(match.group())
        name, length = names[words.lower()], len(words)
        before, after = text[max(match.start() - 12, 0) : match.start()], text[match.end() : match.end() + 16]
        on_it = _ON_A.search(before) and (length >= _SHORTEST_ON or after[:1] in ("", "\n"))
        behind = _GPU_BEFORE.search(before) or on_it
        if words.isdigit():
            alone = bool(behind and _NO_AMOUNT.match(after))
        else:
            own_case = words == _squeezed(name)
            alone = bool(behind) or length >= (_SHORTEST_ALONE if own_case else _SHORTEST_OF_ANY_CASE)
        if alone or _GPU_AFTER.match(after):
            found.setdefault(named[name], match.group())
    return found


def _squeezed(text: str) -> str:
    return "".join(_BETWEEN.split(text))


_NUMBERED = ("RTX", "GTX", "RX")  # series that people leave out before the number: `my 2080 Ti`
_LETTERED = ("AI", "PRO", "Quadro")  # likewise, before a letter and a number: `W7900`
_GPU_BEFORE = re.compile(r"\bGPU:? $", re.IGNORECASE)
_GPU_AFTER = re.compile(r" (?:GPU|graphics|card)s?\b", re.IGNORECASE)
_ON_A = re.compile(r"\bon (?:an? |my |the )?$", re.IGNORECASE)
_DIGITS = 4  # of a product's number
_AMOUNT = re.compile(r"GPUs? |.* \d{4} [kMG]i?B\b", re.IGNORECASE)  # `GPU 3080 MB`
_NO_AMOUNT = re.compile(r"[.,;:)]*(?:\s*$|\n| (?:and|but|with|without|it|when)\b)")
# A series and no chip: `RTX 2000`, of which an `RTX 2000 Ada` is no member.
_SERIES = re.compile(r"(?:RTX )?[1-9]000?")
_SHORTEST_ON = 3  # characters of a name that `on` may stand before
_SHORTEST_ALONE = 4
_SHORTEST_OF_ANY_CASE = 5


def _after(arches: Arches, words: Words) -> re.Pattern[str]:
    """Return the pattern of a device's name: a word that tells a maker, and up to six behind it, maybe another name."""
    series = {word for known in arches.values() for arch in known for word in re.findall(r"^[a-z]{4,}", arch)}
    makers = {word for own in words.values() for word in own if len(word) > 2 and word.isalpha()}
    first = "|".join(sorted(map(re.escape, makers | series)))
    return re.compile(rf"\b(?=((?:{first})[ \t]+[\w.+-]+(?:[ \t]+[\w.+-]+){{0,5}}))", re.IGNORECASE)


def members(text: str, arches: Arches) -> list[tuple[str, str]]:
    """Return (backend, arch) of every arch of a family (`rdna3`, `rocm:rdna3`), arches with kernels first."""
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
    named = dict.fromkeys(f for known in arches.values() for arch in known.values() for f in arch.families)
    return {name: members(name, arches) for name in named}


def nearest(text: str, arches: Arches, words: Words | None = None) -> list[str]:
    """Return names like a text, with their meanings; a backend's targets for its name; else one of each backend."""
    words = words or {}
    # A backend's name, or nothing but words that all its devices have: NVIDIA.
    owners = [
        backend for backend in arches if text == backend or (text.strip() and not _told(text, words.get(backend, ())))
    ]
    if owners:
        return [f"{backend}:{arch}" for backend in owners for arch in _served(arches[backend])]
    if close := _close(text, arches, words):
        return close
    served = {backend: _served(known) for backend, known in arches.items()}
    return [f"{backend}:{known[0]}" for backend, known in served.items() if known]


def _served(arches: Mapping[str, Arch]) -> list[str]:
    return [name for name, arch in arches.items() if not arch.refused]


def _close(text: str, arches: Arches, words: Words) -> list[str]:
    """Return names like a text, with or without a backend's words in it, each with its meaning."""
    names: dict[str, dict[str, None]] = {}
    for name, backend, arch in _names(arches):
        names.setdefault(name, {})[":".join((backend, arch))] = None
    means = {name: " or ".join(found) for name, found in names.items()}
    for family, found in families(arches).items():
        means.setdefault(_plain(family), f"family of {', '.join(map(':'.join, found))}")
    asked = dict.fromkeys([_plain(text), *(_plain(_told(text, words.get(backend, ()))) for backend in arches)])
    scores: dict[str, float] = {}
    for one in filter(None, asked):
        for name in difflib.get_close_matches(one, means, n=SHOWN, cutoff=0.6):
            scores[name] = max(scores.get(name, 0.0), difflib.SequenceMatcher(None, name, one).ratio())
    best = sorted(scores, key=lambda name: -scores[name])[:SHOWN]
    return [f"{name} ({means[name]})" for name in best]


def chips(title: str) -> list[str]:
    """Return the chips of an arch's title: `H100 SXM, H200` has two. The series stands before a colon."""
    return [part.strip() for part in re.sub(r"\(.*?\)", "", title).rpartition(":")[2].split(",") if part.strip()]


def _meant(text: str, arches: Arches, words: Words) -> list[tuple[str, str]]:
    """Return the (backend, arch) pairs of a name, or the one whose tuning a family's arches share."""
    found = _called(text, arches) or _printed(text, arches, words)
    if len(found) > 1 and len({(backend, arches[backend][arch].tuning or arch) for backend, arch in found}) == 1:
        backend, arch = found[0]
        shared = arches[backend][arch].tuning
        return [(backend, shared if shared in arches[backend] else arch)]
    return found


def _called(text: str, arches: Arches) -> list[tuple[str, str]]:
    """Return the pairs of an arch, a chip or a family of this name, or of chips whose number goes on: `mi300`."""
    wanted = _plain(text)
    known = list(_names(arches))
    found = list(dict.fromkeys((backend, arch) for name, backend, arch in known if name == wanted))
    found = found or members(wanted, arches)
    if not found and any(c.isdigit() for c in wanted):
        family = re.compile(re.escape(wanted) + (r"(?=[a-z]).*" if wanted[-1].isdigit() else r"(?=\d).*"))
        found = list(dict.fromkeys((backend, arch) for name, backend, arch in known if family.fullmatch(name)))
    return found


def _printed(text: str, arches: Arches, words: Words) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for backend, known in arches.items():
        device = text.strip().lower()
        found += [
            (backend, name)
            for name, arch in known.items()
            if any(fnmatch.fnmatchcase(device, one.lower()) for one in arch.devices)
        ]
        told = _told(text, words.get(backend, ()))
        if told and _plain(told) != _plain(text):
            found += _called(told, {backend: known})
    return list(dict.fromkeys(found))


def _told(text: str, words: Sequence[str]) -> str:
    """Return the words of a driver's name that tell the chip."""
    return " ".join(word for word in _split(text) if not any(fnmatch.fnmatchcase(word, one) for one in words))


def _names(arches: Arches) -> Iterator[tuple[str, str, str]]:
    """Yield (plain name, backend, arch): arches, chips, words of chips with a digit, and backends with one arch."""
    for backend, known in arches.items():
        for arch, described in known.items():
            if len(known) == 1:
                yield _plain(backend), backend, arch
            yield _plain(arch), backend, arch
            for chip in (*chips(described.title), *described.names):
                words = [_plain(word) for word in _APART.split(chip)]
                for first in range(len(words)):
                    for last in range(first + 1, len(words) + 1):
                        name = "".join(words[first:last])
                        if any(c.isdigit() for c in name) or last - first == len(words):
                            yield name, backend, arch


def matches(name: str, arch: Arch, glob: str) -> bool:
    """Return whether a glob means a target: by full name (`rocm:*`), backend, arch (`gfx9*`) or family."""
    backend = name.partition(":")[0]
    whole = any(fnmatch.fnmatchcase(part, glob) for part in (name, backend))
    return whole or arch.matches(glob.removeprefix(f"{backend}:"))


def _split(text: str) -> list[str]:
    return [word for word in _BETWEEN.split(text.lower()) if word]


def _plain(text: str) -> str:
    return "".join(_split(text))
