"""On what a log was written: chip, compiler, components, kernel. Only what the text says, with the words for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from packaging.version import InvalidVersion, Version

from portattn.planning.kernel_specs import CORES
from portattn.schema.target import Arch

_BACKEND_OF = {"cuda": "cuda", "hip": "rocm", "npu": "ascend"}
_FAMILY_OF = {"ptxas": "cuda", "llvm-amdgpu": "rocm", "triton-ascend": "ascend"}

# Where a chip is named, most telling first; groups `kind` (Triton's backend, where the text has it) and `chip`.
_CHIPS: tuple[str, ...] = (
    r"\"(?:target|name)\": \[?\"(?P<kind>cuda|hip|npu)\", \"?(?P<chip>\w+)\"?",
    r"(?:ttg|triton_gpu|\"ttg)[.\"]*target\"? = \"(?P<kind>cuda|hip):(?P<chip>\w+)\"",
    r"GPUTarget\((?:backend=)?['\"](?P<kind>cuda|hip|npu)['\"], (?:arch=)?['\"]?(?P<chip>\w+)['\"]?",
    r"--gpu-name[= ](?P<chip>sm_\d+a?)",
    r"^\.target (?P<chip>sm_\d+a?)",
    r"arch-generation-name=(?P<chip>gfx\w+)",
    r"amdgcn-amd-amdhsa-*(?P<chip>gfx\w+)",
    r"-mcpu=(?P<chip>gfx\w+)",
    r"\b(?P<chip>Ascend910(?:B[1-4]|_93\d\d))",
)
# The same for backends alone, by the folders of the compilers.
_FOLDERS = (("backends/nvidia/", "cuda"), ("backends/amd/", "rocm"), ("backends/ascend/", "ascend"))
_ANY_CHIP = re.compile(r"\b(sm_\d{2,3}|gfx\d{1,4}[a-z]?\w?|ascend910\w+)\b")

_NUMBER = r"(?P<version>\d+(?:\.\d+)+(?:[-+.]?\w+)*)"
# Component -> how tools print its version: pip, torch.utils.collect_env, ptxas --version, npu-smi, nvidia-smi.
_VERSIONS: Mapping[str, tuple[str, ...]] = {
    "triton-ascend": (rf"triton[-_]ascend(?:==|[-: ]+v?){_NUMBER}",),
    "triton": (
        rf"\b(?:pytorch-)?triton(?:-rocm)?==\s*{_NUMBER}",
        rf"\b[Tt]riton(?: version)?(?:: *| ){_NUMBER}",
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
    r"in function '?(?P<name>\w+)'?",
    r"CompilationError: at \d+:\d+:\n(?:@[^\n]*\n)*def (?P<name>\w+)\(",
)


class Told(msgspec.Struct, frozen=True):
    """A value, and the words of the log that say so."""

    value: str
    words: str


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says of where it was written; None and empty for what it does not say.

    chip      the compiler's name of a chip that portattn has no arch for, when that is what the log names
    versions  compiler and components by name; one that the log names in two versions is left out
    kernels   portattn's names of the core kernels that `function` is the source of
    """

    backend: Told | None = None
    arch: Told | None = None
    chip: str = ""
    versions: dict[str, Told] = {}
    function: Told | None = None
    kernels: tuple[str, ...] = ()

    @property
    def compiler(self) -> str:
        """NAME==VERSION of the compiler; empty where the log does not say.

        A triton-ascend reports the version of the Triton that it grew from as well: that one names no compiler.
        """
        names = ("triton-ascend",) if self.backend and self.backend.value == "ascend" else ("triton-ascend", "triton")
        return next((f"{name}=={self.versions[name].value}" for name in names if name in self.versions), "")


def surroundings(text: str, family: str, arches: Mapping[str, Mapping[str, Arch]]) -> Surroundings:
    """Read a log. `family` is the failure's (patterns.Recogniser), `arches` the chips that portattn knows."""
    backend, arch, chip = _chip(text, arches)
    if backend is None:
        backend = _backend(text, family)
    function = _first(text, _FUNCTIONS, "name")
    name = function.value if function else ""
    return Surroundings(
        backend=backend,
        arch=arch,
        chip=chip,
        versions={name: told for name in _VERSIONS if (told := _version(text, name)) is not None},
        function=function,
        kernels=tuple(kernel.name for kernel in CORES.values() if kernel.function == name),
    )


def _chip(text: str, arches: Mapping[str, Mapping[str, Arch]]) -> tuple[Told | None, Told | None, str]:
    """(backend, arch, chip without an arch) by the first pattern that names a chip."""
    for match in _matches(text, _CHIPS):
        kind = match.groupdict().get("kind") or ""
        name = _arch_name(kind, match["chip"])
        words = " ".join(match.group().split())
        for backend, known in arches.items():
            if name in known:
                return Told(backend, words), Told(name, words), ""
        backend_name = _BACKEND_OF.get(kind, "")
        return (Told(backend_name, words) if backend_name else None), None, name
    # No compiler's own words: a name alone counts where the log names one chip only.
    named = {name for name in _ANY_CHIP.findall(text) if any(name in known for known in arches.values())}
    if len(named) == 1:
        name = named.pop()
        backend_name = next(b for b, known in arches.items() if name in known)
        return Told(backend_name, name), Told(name, name), ""
    return None, None, ""


def _arch_name(kind: str, chip: str) -> str:
    """A chip's name as arches.toml spells it: sm_90a and 90 are sm_90, Ascend910B2 is ascend910b2."""
    if chip.isdigit():
        return f"sm_{chip}"
    if chip.startswith("sm_"):
        return chip.rstrip("a")
    lowered = chip.lower()
    return "ascend910_93" if lowered.startswith("ascend910_93") else lowered


def _backend(text: str, family: str) -> Told | None:
    for folder, name in _FOLDERS:
        if folder in text:
            return Told(name, folder)
    return Told(_FAMILY_OF[family], family) if family in _FAMILY_OF else None


def _version(text: str, name: str) -> Told | None:
    """The one version of a component that the text names; None where it names none, or several."""
    found: dict[str, Told] = {}
    for match in _matches(text, _VERSIONS[name]):
        try:
            version = str(Version(match["version"]))
        except InvalidVersion:
            continue
        found.setdefault(version, Told(version, " ".join(match.group().split())))
    return next(iter(found.values())) if len(found) == 1 else None


def _first(text: str, patterns: Iterable[str], group: str) -> Told | None:
    match = next(_matches(text, patterns), None)
    return Told(match[group], " ".join(match.group().split())) if match else None


def _matches(text: str, patterns: Iterable[str]) -> Iterator[re.Match[str]]:
    """Matches of the first pattern, then of the next."""
    search: Callable[[str], Iterator[re.Match[str]]] = lambda p: re.finditer(p, text, re.MULTILINE)  # noqa: E731
    for pattern in patterns:
        yield from search(pattern)
