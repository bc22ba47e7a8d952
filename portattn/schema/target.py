"""Target: a backend, an arch and a toolchain, which need not be here."""

from __future__ import annotations

import fnmatch
from typing import Literal, get_args

import msgspec

from portattn.schema.toolchain import Toolchain

# deep_pipeline     copies to local memory are asynchronous and cheap: more than two stages of loads pay
# descriptors       tiles are loaded through tensor descriptors by a unit of its own
# dependent_launch  a kernel can begin while the one before it runs, and that is known to pay
# matrix_shapes     its matrix instructions come in two shapes, of which a compiler option picks one
# small_tiles       registers and lanes are few: tiles of more than 64 rows or columns do not fit
Trait = Literal["deep_pipeline", "descriptors", "dependent_launch", "matrix_shapes", "small_tiles"]
TRAITS: tuple[str, ...] = get_args(Trait)


class UnitRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most that one core does in a cycle, for bounds on time (portattn/testing/bound.py): of the fastest chip.

    clock_mhz      highest clock of the chip that the arch file names; cards with a higher one are faster by that ratio
    memory_gbs     bandwidth of the device's memory, 10⁹ bytes a second
    scratchpad     bytes a cycle of the scratchpad
    simds          parts of a core, each with its own warps
    cycles         of a SIMD, for one instruction of a warp, by unit (worker/machine_code.py); issue: for any other
                   unit; transcendental: added to `vector` if `one_pipe`
    one_pipe       the vector unit works on transcendental functions, too
    products       operations a cycle of the core's matrix units, by type of the operands
    least          least cycles of a matrix instruction, by its rows × columns"""

    clock_mhz: int
    memory_gbs: int
    scratchpad: int
    simds: int
    cycles: dict[str, float]
    products: dict[str, int]
    one_pipe: bool = False
    least: dict[str, int] = {}


class Arch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One chip's facts, as backends/<backend>/arches/<name>.toml states them.

    name           the compiler's name of the architecture (`sm_90`, `gfx942`, `ascend910b2`)
    title          chips that people know
    names          further names of its chips, without the words of Backend.device_words: with the title's, the names
                   that a target can be given as
    families       families that it belongs to, the narrowest first; a quirk's `when.arch` and a target can name one
    devices        names of its devices, as glob patterns, in the words of the backend's `detect`; empty: its own name
    relatives      names of further devices of its family, as glob patterns: a device that no arch lists is planned as
                   this arch, with a warning
    compiler_target  its GPUTarget in Triton: (Triton's backend, arch, lanes of a warp)
    traits         its properties for the choice of tiles and loads; see TRAITS
    core_threads, core_registers, register_unit, reserved_memory
                   of one compute unit: threads, registers, registers that are handed out at once, and bytes of
                   `scratchpad_kind` that each program takes beside its own; 0: unknown, and so is the number of
                   programs that fit
    cores          compute units that run programs: SMs, CUs, AI cores (of the chip named first in `title`)
    warp_size      lanes a warp or wavefront (0 where the notion does not apply)
    registers      32-bit registers a thread can have (0 where the notion does not apply)
    scratchpad_bytes   bytes that one program can have of `scratchpad_kind` (shared memory, LDS, UB, or none)
    max_programs   programs in one launch
    matrix         matrix instructions that the compiler uses on it, by the prefix they have in its assembly text
    fp8            fp8 formats that its matrix units take
    dot_precisions how an fp32 product can be computed
    cache_share    bytes of keys and values that row tiles side by side may read and stay in a cache; 0: unknown, and
                   tiles are worked on head by head
    rates          rates of its units, for a bound on time; absent: there is no bound
    tuning         name of the arch whose tuning file it shares, its own name when empty
    toolchain      compiler -> PEP 440 range of its releases that compile for it; absent: all that portattn knows
    refused        why no kernel is planned for it; empty when kernels are
    executors      for each executor of the backend, by its name: its facts about the chip, or as `lacks` the reason why
                   it cannot run its code
    sources        sources of the numbers"""

    name: str = ""
    title: str
    names: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    relatives: tuple[str, ...] = ()
    compiler_target: tuple[str, str | int, int] | None = None
    traits: tuple[Trait, ...] = ()
    cores: int
    core_threads: int = 0
    core_registers: int = 0
    register_unit: int = 0
    reserved_memory: int = 0
    warp_size: int = 0
    registers: int = 0
    scratchpad_bytes: int
    scratchpad_kind: Literal["shared memory", "LDS", "UB", "none"]
    max_programs: int
    matrix: tuple[str, ...] = ()
    fp8: tuple[str, ...] = ()
    dot_precisions: tuple[str, ...] = ("ieee",)
    cache_share: int = 0
    rates: UnitRates | None = None
    tuning: str = ""
    toolchain: dict[str, str] = {}
    refused: str = ""
    executors: dict[str, dict[str, bool | int | str]] = {}
    sources: tuple[str, ...]

    def is_device(self, name: str) -> bool:
        """Return whether a device's name, in the words of the backend's `detect`, is of this arch."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.devices or (self.name,))

    def is_relative(self, name: str) -> bool:
        """Return whether a device without an arch is planned as this arch."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.relatives)

    def matches(self, pattern: str) -> bool:
        """Return whether a glob matches this arch's name or a family's."""
        return any(fnmatch.fnmatchcase(name, pattern) for name in (self.name, *self.families))


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A backend, one of its arches, and the toolchain that would compile for it. `portattn.target` makes one of a text.

    Attributes:
        backend: its name
        arch: the chip's limits
        toolchain: the compiler, and its components as far as they are known

    Examples:
        >>> import portattn
        >>> target = portattn.target("mi300x", "triton==3.6.0")
        >>> print(target, target.arch.warp_size)
        rocm:gfx942 with triton==3.6.0 64
    """

    backend: str
    arch: Arch
    toolchain: Toolchain

    @property
    def name(self) -> str:
        return f"{self.backend}:{self.arch.name}"

    def __str__(self) -> str:
        return f"{self.name} with {self.toolchain}"
