"""On what a log was written: chip, compiler, components, kernel. Only what the text says, with the words for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from packaging.version import Version

from portattn.planning import target_names
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema import compilers
from portattn.schema.target import Arch

# Where a chip is named, most telling first; groups `kind` (Triton's backend, where the text has it) and `chip`.
_CHIPS: tuple[str, ...] = (
    r"\"(?:target|name)\": \[?\"(?P<kind>\w+)\", \"?(?P<chip>\w+)\"?",
    r"(?:ttg|triton_gpu|\"ttg)[.\"]*target\"? = \"(?P<kind>\w+):(?P<chip>\w+)\"",
    r"GPUTarget\((?:backend=)?['\"](?P<kind>\w+)['\"], (?:arch=)?['\"]?(?P<chip>\w+)['\"]?",
    r"--gpu-name[= ](?P<chip>\w+)",
    r"^\.target (?P<chip>\w+)",
    r"arch-generation-name=(?P<chip>\w+)",
    r"amdgcn-amd-amdhsa-*(?P<chip>\w+)",
    r"Value '(?P<chip>sm_\w+)' is not defined for option 'gpu-name'",
    r"unsupported target: '(?P<chip>\w+)'",
    r"-mcpu=(?P<chip>\w+)",
)

# What a text says of the chip that something takes, and that this one may not be: "requires .target sm_100 or higher".
_WANTED = re.compile(
    r"(?:\brequir\w*|\bneeds?\b|\bat least\b|\binstead of\b|(?<!not )(?<!n't )\bsupported\b)[^\n]*"
    r"|\b\w+(?:\+|,? (?:or|and) (?:higher|newer|later|above|greater|up)\b)",
    re.IGNORECASE,
)

_NUMBER = r"(?P<version>\d+(?:\.\d+)+(?:[-+.]?\w+)*)"
# Component -> how tools print its version: pip, torch.utils.collect_env, ptxas --version, npu-smi, nvidia-smi.
_VERSIONS: Mapping[str, tuple[str, ...]] = {
    "triton-ascend": (rf"triton[-_]ascend(?:==|[-: ]+v?){_NUMBER}",),
    "triton": (
        rf"\b(?:pytorch-)?triton(?:-rocm)?==\s*{_NUMBER}",
        rf"\b[Tt]riton`?(?: version)?(?:: *| +){_NUMBER}",
        rf"\btriton-{_NUMBER}\.dist-info",
    ),
    "ptxas": (rf"release \d+\.\d+, V{_NUMBER}", rf"\bptxas(?: version)?[ :]+{_NUMBER}"),
    "cuda": (rf"CUDA used to build PyTorch: {_NUMBER}", rf"CUDA Version: {_NUMBER}"),
    "rocm": (rf"\bROC[mM](?: version)?[ :]+{_NUMBER}", rf"ROCM used to build PyTorch: {_NUMBER}"),
    "cann": (
        rf"\bCANN(?: version)?[ :]+{_NUMBER}",
        rf"Ascend-cann-toolkit[_-]{_NUMBER}",
        rf"ascend-toolkit/{_NUMBER}",
    ),
    "driver": (rf"Driver Version: {_NUMBER}", rf"npu-smi {_NUMBER}"),
    "torch-npu": (rf"\btorch[-_]npu(?:==|[-: ]+){_NUMBER}",),
    "torch": (rf"\btorch==\s*{_NUMBER}", rf"PyTorch version: {_NUMBER}"),
    "python": (rf"Python version: {_NUMBER}", r"lib/python(?P<version>3\.\d+)/"),
}
# Where a kernel's function is named.
_FUNCTIONS: tuple[str, ...] = (
    r"\"function\": \"(?P<name>\w+)\"",
    r"tt\.func public @(?P<name>\w+)",
    r"^\.visible \.entry (?P<name>\w+)",
    r"Triton compilation failed: (?!\w*(?:Error|Exception|OutOfResources)\b)(?P<name>\w+)",
    r"in function '?@?(?P<name>\w+)'?",
    r"^In function: (?P<name>\w+)$",  # after LLVM's "Cannot select"
    r"on function '@(?P<name>\w+)'",
    r"for kernel (?P<name>\w+): \d",
    r"(?:CompilationError(?:\(['\"]|: )|error ')at \d+:\d+:\n(?:@[^\n]*\n)*def (?P<name>\w+)\(",
    # A launch, as a traceback shows it.
    r"^    (?:return )?(?:\w+\.)*(?P<name>\w+)\[(?:\(|grid\b|lambda )",
)


class LogValue(msgspec.Struct, frozen=True):
    """A value, and the words of the log that say so."""

    value: str
    words: str


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says of where it was written; None and empty for what it does not say.

    chip      the compiler's name of a chip that portattn has no arch for, when that is what the log names
    versions  compiler and components by name; one that the log names in two versions is left out
    kernels   portattn's names of the core kernels that `function` is the source of
    """

    backend: LogValue | None = None
    arch: LogValue | None = None
    chip: str = ""
    versions: dict[str, LogValue] = {}
    function: LogValue | None = None
    kernels: tuple[str, ...] = ()

    def completed(self, other: Surroundings) -> Surroundings:
        """With what another text says: of the chip where this one names none of another backend, of all versions."""
        same = self.backend is None or (other.backend is not None and other.backend.value == self.backend.value)
        chip = self if self.arch or self.chip or not same else other
        return msgspec.structs.replace(
            self,
            backend=self.backend or other.backend,
            arch=chip.arch,
            chip=chip.chip,
            versions=other.versions | self.versions,
        )

    @property
    def compiler(self) -> str:
        """NAME==VERSION of the compiler; empty where the log does not say.

        A triton-ascend reports the version of the Triton that it grew from as well: that one names no compiler.
        """
        owner = Registry.load().backends.get(self.backend.value) if self.backend else None
        names = (owner.compiler,) if owner and owner.compiler != "triton" else ("triton-ascend", "triton")
        return next((f"{name}=={self.versions[name].value}" for name in names if name in self.versions), "")


def surroundings(text: str, family: str, registry: Registry) -> Surroundings:
    """Read a log. `family` is the failure's (formats/row.py), `registry` the chips that portattn knows."""
    owner = _backend(text, family, registry)
    backend, arch, chip = _chip(text, registry, owner)
    if backend is None:
        backend = owner
    function = _first(text, _FUNCTIONS, "name")
    name = function.value if function else ""
    return Surroundings(
        backend=backend,
        arch=arch,
        chip=chip,
        versions={name: told for name in _versions() if (told := _version(text, name)) is not None},
        function=function,
        kernels=tuple(kernel.name for kernel in CORES.values() if name in kernel.functions),
    )


_Arches = Mapping[str, Mapping[str, Arch]]
# What precedes a number in an arch's name: what begins so is a chip, known or not.
_PREFIX = re.compile(r"^[a-z_]+")
_VARIANT = re.compile(r"(?<=\d)[a-z]$")  # of a chip whose name for Triton is a number, as ptxas writes it: sm_90a


def _chip(text: str, registry: Registry, owner: LogValue | None) -> tuple[LogValue | None, LogValue | None, str]:
    """(backend, arch, chip without an arch) by the first pattern that names a chip, or by its name alone.

    owner  the backend whose compiler the text tells of: of several names alone, its chips' count
    """
    arches = registry.arches
    kinds = {
        arch.compiler_target[0]: backend
        for backend, known in arches.items()
        for arch in known.values()
        if arch.compiler_target
    }
    prefixes = _prefixes(arches)
    for match in _matches(text, (*_CHIPS, *_devices(arches))):
        kind, chip, words = match.groupdict().get("kind") or "", match["chip"], " ".join(match.group().split())
        if (kind and kind not in kinds) or not (kind or chip.lower().startswith(prefixes)):
            continue
        found = _arch_of(kind, chip, arches)
        if found:
            return LogValue(found[0], words), LogValue(found[1], words), ""
        return (LogValue(kinds[kind], words) if kind else None), None, _spelled(kind, chip, arches)
    # No compiler's own words: a name alone counts where the log names one chip only, and does not ask for it.
    named = _named(_WANTED.sub("", text), registry)
    if len(named) > 1 and owner:
        named = {pair: words for pair, words in named.items() if pair[0] == owner.value}
    if len(named) == 1:
        [((found_in, name), words)] = named.items()
        return LogValue(found_in, words), LogValue(name, words), ""
    return None, None, ""


def _named(text: str, registry: Registry) -> dict[tuple[str, str], str]:
    """(backend, arch) of every chip that a text names, as the compiler or as its driver does, and the words."""
    arches, prefixes = registry.arches, _prefixes(registry.arches)
    alone = re.findall(rf"\b(?:{'|'.join(map(re.escape, prefixes))})\w+\b", text) if prefixes else []
    own = {(backend, name): name for name in alone for backend, known in arches.items() if name in known}
    words = {backend: described.device_words for backend, described in registry.backends.items()}
    return target_names.mentioned_chips(text, arches, words) | own


def _prefixes(arches: _Arches) -> tuple[str, ...]:
    """Return the prefixes of the names of chips that Triton compiles for: `sm_`, `gfx`."""
    described = [arch for known in arches.values() for arch in known.values() if arch.compiler_target]
    return tuple(dict.fromkeys(m.group() for arch in described if (m := _PREFIX.match(arch.name))))


def _devices(arches: _Arches) -> list[str]:
    """Return a pattern for each driver's spelling of a device that is a word and not the arch's own name."""
    globs = [
        glob for known in arches.values() for arch in known.values() for glob in arch.devices if glob[:1].isalpha()
    ]
    # A glob's `*` would run over what follows the name.
    return [rf"\b(?P<chip>{glob.replace('?', '[0-9A-Za-z]').replace('*', '[0-9A-Za-z]*')})\b" for glob in globs]


def _arch_of(kind: str, chip: str, arches: _Arches) -> tuple[str, str] | None:
    """(backend, arch) of a chip by any name: sm_90a, 90 and sm_90 are one, so are Ascend910B2 and ascend910b2."""
    for name in (chip, chip.lower(), _VARIANT.sub("", chip)):
        for backend, known in arches.items():
            for arch in known.values():
                target = arch.compiler_target
                if kind and (target is None or target[0] != kind):
                    continue
                if name not in (chip, chip.lower()) and not _is_numbered(arch):
                    continue
                if name == arch.name or (target and kind and name == str(target[1])) or arch.is_device(name):
                    return backend, arch.name
    return None


def _is_numbered(arch: Arch) -> bool:
    """Whether Triton has a number for the arch: then letters after it in a name are a variant's, and no other chip."""
    return arch.compiler_target is not None and isinstance(arch.compiler_target[1], int)


def _spelled(kind: str, chip: str, arches: _Arches) -> str:
    """An unknown chip's name as an arch of its kind is named: 75 is sm_75."""
    numbered = [arch for known in arches.values() for arch in known.values() if _is_numbered(arch)]
    for arch in numbered:
        assert arch.compiler_target is not None, "_is_numbered asks"
        if arch.compiler_target[0] == kind and chip.isdigit():
            return arch.name.replace(str(arch.compiler_target[1]), chip)
        prefix = _PREFIX.match(arch.name)
        if prefix and chip.startswith(prefix.group()):
            return _VARIANT.sub("", chip)
    return chip.lower()


def _backend(text: str, family: str, registry: Registry) -> LogValue | None:
    """The backend by the folder of its compiler, by words of it alone, or by whose wording the failure has."""
    for name, backend in registry.backends.items():
        for words in (*backend.compiler_folders, *backend.compiler_says):
            if words in text:
                return LogValue(name, words)
    owners = [name for name, backend in registry.backends.items() if family in backend.compiler_words]
    return LogValue(owners[0], family) if owners else None


def _versions() -> dict[str, tuple[str, ...]]:
    """How tools print the versions of components, those of other packages' compilers included: as pip does."""
    brought = {name: one for name, one in compilers.all_compilers().items() if name not in compilers.own()}
    spelt = {
        name: "|".join(re.escape(each).replace(r"\-", "[-_]") for each in (name, *one.aliases))
        for name, one in brought.items()
    }
    return {**_VERSIONS, **{name: (rf"\b(?:{words})(?:==|[-: ]+v?){_NUMBER}",) for name, words in spelt.items()}}


def _version(text: str, name: str) -> LogValue | None:
    """The one version of a component that the text names; None where it names none, or several."""
    found: dict[str, LogValue] = {}
    for match in _matches(text, _versions()[name]):
        try:
            version = str(Version(match["version"]))
        except ValueError:  # InvalidVersion, or a number of more digits than Python reads
            continue
        found.setdefault(version, LogValue(version, " ".join(match.group().split())))
    return next(iter(found.values())) if len(found) == 1 else None


def _first(text: str, patterns: Iterable[str], group: str) -> LogValue | None:
    match = next(_matches(text, patterns), None)
    return LogValue(match[group], " ".join(match.group().split())) if match else None


def _matches(text: str, patterns: Iterable[str]) -> Iterator[re.Match[str]]:
    """Matches of the first pattern, then of the next."""
    search: Callable[[str], Iterator[re.Match[str]]] = lambda p: re.finditer(p, text, re.MULTILINE)  # noqa: E731
    for pattern in patterns:
        yield from search(pattern)
