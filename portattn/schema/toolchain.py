"""Toolchain: a compiler, identified by the distribution that owns the `triton/` folder.
`triton.__version__` does not: forks install under the same import name and report another project's number."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Collection
from pathlib import Path

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from portattn.schema import compilers
from portattn.schema.compilers import COMPONENTS as COMPONENTS
from portattn.schema.compilers import TRITON
from portattn.worker import installed_packages

# Backends of community Triton: a folder with any other backend is a fork, whatever number it states.
_COMMUNITY_BACKENDS = ("nvidia", "amd")


class Toolchain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A compiler's identity.

    Attributes:
        distribution: the compiler: `triton` (community), `triton-ascend`, another fork, or `none`
        version: that distribution's version (PEP 440)
        path: folder of the installed `triton` package; empty for a toolchain that is only named
        components: (name, version) pairs of its other parts: ptxas, cuda, rocm, cann, driver, torch …

    Examples:
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
        """Return the toolchain of a machine without Triton."""
        return cls(distribution="none", version="0")

    @classmethod
    def parse(cls, text: str) -> Toolchain:
        """Read `triton==3.6.0`, or with components `triton==3.6.0,ptxas==13.3.33`; `none` for no compiler.

        Raises:
            ValueError: A part is not NAME==VERSION, a name is unknown, or a version is malformed; the error names the
                part.
        """
        if text.strip() == "none":
            return cls.none()
        pairs = []
        for part in text.split(","):
            name, equals, version = (s.strip() for s in part.partition("=="))
            if not (name and equals and version):
                which = "" if part == text else f"{part!r} "
                raise ValueError(f"toolchain {text!r}: {which}must be NAME==VERSION, as in {_example(part)}")
            try:
                Version(version)
            except InvalidVersion:
                raise ValueError(f"toolchain {text!r}: {version!r} is not a PEP 440 version") from None
            pairs.append((name, version) if name in COMPONENTS else _released(compilers.canonical(name), version))
        if compilers.find(pairs[0][0]) is None:
            raise ValueError(f"toolchain {text!r}: {compilers.unknown(pairs[0][0])}")
        beneath = () if compilers.package(pairs[0][0]) == TRITON else (TRITON,)  # the compiler that it is added to
        unknown = [name for name, _ in pairs[1:] if name not in (*COMPONENTS, *beneath)]
        if unknown:
            raise ValueError(f"toolchain {text!r}: unknown component {unknown[0]!r}; known: {', '.join(COMPONENTS)}")
        return cls(distribution=pairs[0][0], version=pairs[0][1], components=tuple(sorted(pairs[1:])))

    def __bool__(self) -> bool:
        return self.distribution != "none"

    def component(self, name: str) -> str | None:
        """Return the version of the compiler or of a component, or None if it is unknown."""
        return self.version if name == self.distribution else dict(self.components).get(name)

    def unknown_release(self) -> str:
        """Return a sentence with the nearest releases if this is no known release, else an empty text."""
        own = compilers.find(self.distribution)
        if own is None or not own.released:
            return ""
        releases = [Version(text) for text in own.released]
        version = Version(self.version)
        # A rebuild of a release (3.1.0.post2, 3.2.0+git1234) is that release.
        rebuilt = version.base_version if version.is_postrelease else version.public
        if Version(version.public) in releases or Version(rebuilt) in releases:
            return ""
        below = [str(one) for one in releases if one < version][-1:]
        above = [str(one) for one in releases if one > version][:1]
        return f"{self} is no known release of {self.distribution}; the nearest: {' and '.join([*below, *above])}"

    def with_components(self, components: dict[str, str]) -> Toolchain:
        """Return a copy with more components. Explicitly named ones stay."""
        merged = components | dict(self.components)
        return msgspec.structs.replace(self, components=tuple(sorted(merged.items())))

    def within(self, name: str, specifier: str) -> bool | None:
        """Return whether a component's version lies in a PEP 440 range; None if the version is unknown.

        Compilers that stand apart (Compiler.apart), as community Triton and triton-ascend do, are in no range of each
        other's. An unknown compiler (a fork, a private build) may have any Triton's bugs, unless it is added to a
        Triton, which then is one of its components."""
        if name != self.distribution and compilers.is_compiler(name) and name not in dict(self.components):
            own = compilers.find(self.distribution)
            return False if not self or (own is not None and own.apart) else None
        version = self.component(name)
        return None if version is None else in_range(version, specifier)

    def __str__(self) -> str:
        return f"{self.distribution}=={self.version}" if self else "none"


def _example(text: str) -> str:
    """Return the NAME==VERSION that a text may have meant: a version alone is Triton's."""
    try:
        return f"{TRITON}=={Version(text)}"
    except InvalidVersion:
        return f"{TRITON}==3.6.0"


@functools.lru_cache(maxsize=512)
def parse_range(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f"{text!r} is not a PEP 440 version range") from None


@functools.lru_cache(maxsize=1024)
def in_range(version: str, text: str) -> bool:
    """Return whether a version lies in a PEP 440 range; a pre-release comes before its release.

    PEP 440 leaves X's pre-releases out of `<X`: 3.9.0rc1 would be neither in <3.9 nor in >=3.9, though a bug that 3.9
    mends may still be in it."""
    return all(
        one.contains(version, prereleases=True) or (one.operator == "<" and Version(version) < Version(one.version))
        for one in parse_range(text)
    )


def _released(name: str, version: str) -> tuple[str, str]:
    """Return a compiler's name and its version as released: 3.9 and v3.9.0 are 3.9.0."""
    same = (known for known in compilers.released_versions(name) if Version(known) == Version(version))
    return name, next(same, str(Version(version)))


def has_upper_bound(text: str) -> bool:
    return any(s.operator in ("<", "<=", "==", "===", "~=") for s in parse_range(text))


def _triton_folder() -> Path | None:
    return _folder(TRITON)


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def owners(folder: Path) -> list[tuple[str, str]]:
    """Return (name, version) of every distribution whose files include `folder`/__init__.py, the last written last.

    More than one means that one install overwrote another."""
    target, package = folder / "__init__.py", folder.name
    found = []
    for name, dist in installed_packages.claiming(package):
        claims = any(
            str(f) == f"{package}/__init__.py" and Path(str(dist.locate_file(f))).resolve() == target.resolve()
            for f in dist.files or []
        )
        if claims:
            record = Path(str(dist.locate_file(""))) / f"{name.replace('-', '_')}-{dist.version}.dist-info"
            written = record.stat().st_mtime if record.exists() else 0.0
            found.append((written, name, dist.version))
    # A distribution found by two entries of sys.path counts once, in order of writing.
    return list(dict.fromkeys((name, version) for _, name, version in sorted(found)))


def _stated(folder: Path) -> tuple[str, str]:
    """Return name and version of a folder without an owner (a source build) from its __version__, marked "unowned", so
    that records of the release do not apply; ("unowned", "0") for a fork, which states the number of its Triton."""
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
def installed_toolchain() -> Toolchain:
    """Return this Python's Triton, or the fork in its place, from installed metadata: it is not imported."""
    folder = _triton_folder()
    if folder is None:
        return Toolchain.none()
    claims = owners(folder)
    name, version = claims[-1] if claims else _stated(folder)
    return _toolchain(name, version, folder)


def _toolchain(name: str, version: str, folder: Path) -> Toolchain:
    components = {}
    for component in ("torch", "torch-npu", "numpy"):
        if stated := installed_packages.version(component):
            components[component] = stated
    own = compilers.find(name)
    return Toolchain(
        distribution=own.name if own else compilers.canonical(name),
        version=own.version(version) if own else version,
        path=str(folder),
        components=tuple(sorted(components.items())),
    )


def installed_beside() -> list[Toolchain]:
    """Return this Python's compilers that are added to Triton, in folders of their own."""
    found = []
    for one in compilers.all_compilers().values():
        folder = _folder(one.package) if one.package != TRITON else None
        if folder is None:
            continue
        named = ((name, version) for name, version in reversed(owners(folder)) if compilers.canonical(name) == one.name)
        if claim := next(named, None):
            # The Triton that it is added to takes part in its compiles.
            found.append(
                _toolchain(*claim, folder).with_components(
                    {installed_toolchain().distribution: installed_toolchain().version}
                )
            )
    return found


def installed_for(names: Collection[str]) -> Toolchain:
    """Return this Python's compiler for a backend: the first of `names` that is installed, else the one in triton/.

    Args:
        names: Backend.compilers; empty: any compiler may serve
    """
    found = installed_toolchain()
    if not names or found.distribution in names or all(name in compilers.own() for name in names):
        return found  # none of portattn's own is added to Triton
    beside = {one.distribution: one for one in installed_beside()}
    return next((beside[name] for name in names if name in beside), found)


def is_installed(toolchain: Toolchain | str) -> bool:
    wanted = str(toolchain)
    if wanted == str(installed_toolchain()):
        return True
    name = wanted.partition("==")[0]
    return name not in compilers.own() and any(wanted == str(one) for one in installed_beside())


def nameable(name: str) -> bool:
    """Return whether a condition on the toolchain may name this: a component, or a compiler."""
    return name in COMPONENTS or compilers.is_compiler(name)


def unknown_name() -> str:
    listed = ", ".join((*compilers.names(), *COMPONENTS))
    return f"unknown; known: {listed}; a backend package may bring other compilers (docs/backends.md)"
