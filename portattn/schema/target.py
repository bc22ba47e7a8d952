"""Target: where a call would run. It can name a machine that is not here."""

from __future__ import annotations

from typing import Literal

import msgspec

from portattn.schema.toolchain import Toolchain


class Arch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One chip's limits, as backends/<backend>/arches.toml states them.

    name           the compiler's name of the architecture (`sm_90`, `gfx942`, `ascend910b2`)
    title          chips that people know
    cores          compute units that run programs: SMs, CUs, AI cores (of the chip named first in `title`)
    warp_size      lanes a warp or wavefront (0 where the notion does not apply)
    registers      32-bit registers a thread can have (0 where the notion does not apply)
    local_memory   bytes that one program can have of `local_memory_kind` (shared memory, LDS, UB, or none)
    max_programs   programs in one launch
    matrix         matrix instructions that the compiler uses on it, by the prefix they have in its assembly text
    fp8            fp8 formats that its matrix units take
    dot_precisions how an fp32 product can be computed
    cache_share    bytes of keys and values that row tiles worked on side by side may read, to stay in a cache; 0 where
                   nobody has looked, and tiles are worked on head by head
    tuning         name of the tuning file it shares, its own name when empty
    refused        why no kernel is planned for it; empty when kernels are
    sources        where the numbers come from
    """

    name: str = ""
    title: str
    cores: int
    warp_size: int = 0
    registers: int = 0
    local_memory: int
    local_memory_kind: Literal["shared memory", "LDS", "UB", "none"]
    max_programs: int
    matrix: tuple[str, ...] = ()
    fp8: tuple[str, ...] = ()
    dot_precisions: tuple[str, ...] = ("ieee",)
    cache_share: int = 0
    tuning: str = ""
    refused: str = ""
    sources: tuple[str, ...]


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A backend, one of its arches, and the toolchain that would compile for it. `portattn.target` makes one of a text.

    backend    its name
    arch       the chip's limits
    toolchain  the compiler, and its components as far as they are known

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
