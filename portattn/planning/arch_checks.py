"""What the file of an arch must be beyond its types: a name that fits, sizes that a chip can have, compilers' names."""

from __future__ import annotations

import re

from portattn.schema import compilers
from portattn.schema.target import Arch
from portattn.schema.toolchain import parse_range

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_AT_LEAST_ONE = ("cores", "max_programs")
_NOT_NEGATIVE = (
    "core_threads", "core_registers", "register_unit", "reserved_memory", "warp_size", "registers", "scratchpad_bytes",
    "cache_share",
)  # fmt: skip
_NONE = "none"  # the scratchpad_kind of a chip without one


def arch_problem(arch: Arch, stated: str) -> tuple[str, str] | None:
    """(key, what is wrong with it) where the types alone do not catch it. The key is empty where it is the name.

    arch    named by its file or table
    stated  the `name` that it states itself
    """
    return _name(arch, stated) or _sizes(arch) or _compilers(arch) or _families(arch)


def _name(arch: Arch, stated: str) -> tuple[str, str] | None:
    if not _NAME.fullmatch(arch.name):
        return "", f"{arch.name!r} cannot be an arch's name: it has letters, digits, - and _ only"
    if stated and stated != arch.name:
        return "name", f"{stated!r} is not the arch's name, {arch.name!r}, which is its file's or table's"
    if arch.compiler_target is None:
        return None
    theirs = arch.compiler_target[1]
    fits = (
        re.search(rf"(?<!\d){theirs}(?!\d)", arch.name) is not None
        if isinstance(theirs, int)
        else _plain(theirs).startswith(_plain(arch.name))
    )
    return None if fits else ("compiler_target", f"{theirs!r} is not the compiler's name of {arch.name}")


def _plain(name: str) -> str:
    return re.sub(r"[_-]", "", name).lower()


def _sizes(arch: Arch) -> tuple[str, str] | None:
    for names, least in ((_AT_LEAST_ONE, 1), (_NOT_NEGATIVE, 0)):
        for key in names:
            if getattr(arch, key) < least:
                return key, f"{getattr(arch, key)} must be at least {least}"
    if (arch.scratchpad_bytes == 0) != (arch.scratchpad_kind == _NONE):
        return "scratchpad_bytes", f"{arch.scratchpad_bytes} bytes of scratchpad_kind {arch.scratchpad_kind!r}"
    if arch.compiler_target is not None and arch.compiler_target[2] != arch.warp_size:
        return "compiler_target", f"{arch.compiler_target[2]} lanes of a warp, and warp_size is {arch.warp_size}"
    return None


def _compilers(arch: Arch) -> tuple[str, str] | None:
    for name, text in arch.toolchain.items():
        if not compilers.is_compiler(name):
            return "toolchain", compilers.unknown(name)
        try:
            parse_range(text)
        except ValueError as error:
            return "toolchain", str(error)
    return None


def _families(arch: Arch) -> tuple[str, str] | None:
    if arch.name in arch.families:
        return "families", f"{arch.name!r} is the arch itself"
    for key in ("families", "devices", "sources"):
        if not all(text.strip() for text in getattr(arch, key)):
            return key, "one of them is empty"
    if not arch.title.strip():
        return "title", "it is empty"
    return None
