"""Toolchain: which compiler this is, told by the *distribution* that owns the `triton/` folder.

`triton.__version__` does not identify a compiler: forks install under the same import name and report another
project's number. The installed files' owner does.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from portattn.worker import distributions

# Builds of community Triton that are published under other names.
_ALIASES = {
    "pytorch-triton": "triton",
    "pytorch-triton-rocm": "triton",
    "triton-rocm": "triton",
    "triton-windows": "triton",
}
# Compilers whose version numbers say nothing about each other: one is in no range of the other's.
_APART = ("triton", "triton-ascend", "none")
# Chips of community Triton itself: a folder with another one's backend is a fork, whatever number it states.
_COMMUNITY_BACKENDS = ("nvidia", "amd")
COMPILERS = ("triton", "triton-ascend", "flagtree")
# Versions that the kernels were compiled with (community Triton) or lowered with (triton-ascend).
TRIED = {"triton": ">=3.2,<3.10", "triton-ascend": "==3.2.*"}
# Releases that are published (an index of packages lists them); of other compilers nobody knows which there are.
RELEASED = {
    "triton": (
        "2.0.0", "2.1.0", "2.2.0", "2.3.0", "2.3.1", "3.0.0", "3.1.0", "3.2.0", "3.3.0", "3.3.1", "3.4.0", "3.5.0",
        "3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0",
    ),
    "triton-ascend": ("3.1.0", "3.2.0"),
}  # fmt: skip
COMPONENTS = ("ptxas", "cuda", "rocm", "cann", "driver", "torch", "torch-npu", "numpy", "python")


class Toolchain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A compiler's identity.

    distribution  the compiler: `triton` (community), `triton-ascend`, another fork, or `none`
    version       that distribution's version (PEP 440)
    path          folder of the installed `triton` package; empty for a toolchain that is only named
    components    (name, version) pairs of what else takes part: ptxas, cuda, rocm, cann, driver, torch …

    >>> import portattn
    >>> toolchain = portattn.Toolchain.parse("triton==3.6.0,ptxas==13.3.33")
    >>> toolchain.within("triton", ">=3.5"), toolchain.component("ptxas")
    (True, '13.3.33')
    """

    distribution: str
    version: str
    path: str = ""
    components: tuple[tuple[str, str], ...] = ()

    @classmethod
    def none(cls) -> Toolchain:
        """The toolchain of a machine with no Triton at all."""
        return cls(distribution="none", version="0")

    @classmethod
    def parse(cls, text: str) -> Toolchain:
        """Read `triton==3.6.0`, or with components `triton==3.6.0,ptxas==13.3.33`; `none` for no compiler.

        Raises ValueError naming the part that is not NAME==VERSION, an unknown name, or a bad version.
        """
        if text.strip() == "none":
            return cls.none()
        pairs = []
        for part in text.split(","):
            name, equals, version = (s.strip() for s in part.partition("=="))
            if not (name and equals and version):
                raise ValueError(f"toolchain {text!r}: {part!r} is not NAME==VERSION")
            try:
                Version(version)
            except InvalidVersion:
                raise ValueError(f"toolchain {text!r}: {version!r} is not a PEP 440 version") from None
            pairs.append((_ALIASES.get(name, name), version))
        if pairs[0][0] not in COMPILERS:
            raise ValueError(f"toolchain {text!r}: {pairs[0][0]!r} is no known compiler; known: {', '.join(COMPILERS)}")
        unknown = [name for name, _ in pairs[1:] if name not in COMPONENTS]
        if unknown:
            raise ValueError(f"toolchain {text!r}: unknown component {unknown[0]!r}; known: {', '.join(COMPONENTS)}")
        return cls(distribution=pairs[0][0], version=pairs[0][1], components=tuple(sorted(pairs[1:])))

    def __bool__(self) -> bool:
        return self.distribution != "none"

    def component(self, name: str) -> str | None:
        """Version of the compiler itself or of a component; None where it is not known."""
        return self.version if name == self.distribution else dict(self.components).get(name)

    def unknown_release(self) -> str:
        """Why this is no release that is known of: a sentence with the nearest ones; empty for one that is."""
        if self.distribution not in RELEASED:
            return ""
        releases = [Version(text) for text in RELEASED[self.distribution]]
        version = Version(self.version)
        if Version(version.public) in releases:
            return ""
        below = [str(one) for one in releases if one < version][-1:]
        above = [str(one) for one in releases if one > version][:1]
        return f"{self} is no known release of {self.distribution}; the nearest: {' and '.join([*below, *above])}"

    def with_components(self, components: dict[str, str]) -> Toolchain:
        """A copy that knows more. What was named explicitly is kept."""
        merged = components | dict(self.components)
        return msgspec.structs.replace(self, components=tuple(sorted(merged.items())))

    def within(self, name: str, specifier: str) -> bool | None:
        """Whether the named component's version lies in a PEP 440 range; None where its version is not known.

        Community Triton and triton-ascend are in no range of each other's. Of another compiler (a fork, a build that
        nobody has heard of) it is not known which Triton's bugs it has.
        """
        if name in COMPILERS and name != self.distribution:
            return False if self.distribution in _APART else None
        version = self.component(name)
        return None if version is None else parse_range(specifier).contains(version, prereleases=True)

    def __str__(self) -> str:
        return f"{self.distribution}=={self.version}" if self else "none"


@functools.lru_cache(maxsize=512)
def parse_range(text: str) -> SpecifierSet:
    """A PEP 440 version range. Raises ValueError on a malformed one."""
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f"{text!r} is not a PEP 440 version range") from None


def has_upper_bound(text: str) -> bool:
    return any(s.operator in ("<", "<=", "==", "===", "~=") for s in parse_range(text))


def _triton_folder() -> Path | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def owners(folder: Path) -> list[tuple[str, str]]:
    """Every distribution whose file list claims `folder`/__init__.py: (name, version), most recently written last.

    More than one means that one install overwrote another.
    """
    target = folder / "__init__.py"
    found = []
    for name, dist in distributions.claiming("triton"):
        claims = any(
            str(f) == "triton/__init__.py" and Path(str(dist.locate_file(f))).resolve() == target.resolve()
            for f in dist.files or []
        )
        if claims:
            record = Path(str(dist.locate_file(""))) / f"{name.replace('-', '_')}-{dist.version}.dist-info"
            written = record.stat().st_mtime if record.exists() else 0.0
            found.append((written, name, dist.version))
    # A distribution that is found by two entries of sys.path is kept once, in order of writing.
    return list(dict.fromkeys((name, version) for _, name, version in sorted(found)))


def _stated(folder: Path) -> tuple[str, str]:
    """Name and version of a folder that no distribution owns, as a source build has: what its __version__ states.

    The version is marked, so that records about the release are not taken for ones about it. ("unowned", "0") where
    nothing can be read, and for a fork: forks state the number of the Triton that they started from.
    """
    unknown = ("unowned", "0")
    foreign = [p.parent.name for p in folder.glob("backends/*/compiler.py") if p.parent.name not in _COMMUNITY_BACKENDS]
    try:
        text = (folder / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        return unknown
    stated = re.search(r"""^__version__ = ['"]([^'"]+)['"]""", text, re.MULTILINE)
    if foreign or not stated:
        return unknown
    try:
        version = Version(stated.group(1))
    except InvalidVersion:
        return unknown
    local = f"{version.local}.unowned" if version.local else "unowned"
    return "triton", f"{version.public}+{local}"


@functools.lru_cache(maxsize=1)
def installed() -> Toolchain:
    """The toolchain of this Python, read from installed metadata; Triton itself is not imported."""
    folder = _triton_folder()
    if folder is None:
        return Toolchain.none()
    claims = owners(folder)
    name, version = claims[-1] if claims else _stated(folder)
    components = {}
    for component in ("torch", "torch-npu", "numpy"):
        if stated := distributions.version(component):
            components[component] = stated
    return Toolchain(
        distribution=_ALIASES.get(canonicalize_name(name), canonicalize_name(name)),
        version=version,
        path=str(folder),
        components=tuple(sorted(components.items())),
    )
