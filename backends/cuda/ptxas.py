"""Which ptxas assembles for an arch under a Triton release: ptxas.toml, or the program that a variable names."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

import msgspec

from portattn.schema import toml_reader
from portattn.schema.toolchain import Toolchain

TABLE = Path(__file__).parent / "ptxas.toml"
PTXAS_ENV = "TRITON_PTXAS_PATH"
VERSION_SECONDS = 10  # a ptxas that has not printed its version by then is taken for one that does not run


class ReleaseAssemblers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The assemblers in one release's wheel.

    triton          versions of the distribution `triton` that this holds for (PEP 440)
    ptxas           version of `ptxas`
    blackwell       version of `ptxas-blackwell`; empty where the wheel has none
    blackwell_from  first compute capability, as in sm_NN, that `ptxas-blackwell` gets
    blackwell_env   variable that replaces `ptxas-blackwell`; empty where none is known
    source          where this was read
    """

    triton: str
    ptxas: str
    blackwell: str = ""
    blackwell_from: int = 0
    blackwell_env: str = ""
    source: str


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    release: tuple[ReleaseAssemblers, ...]


@functools.lru_cache(maxsize=1)
def releases() -> tuple[ReleaseAssemblers, ...]:
    """Every listed release. Raises DataError (file, line, key) on anything outside the schema."""
    data, text = toml_reader.read(TABLE)
    return toml_reader.convert(data, _Table, TABLE, text).release


def ptxas_version(capability: int, toolchain: Toolchain) -> str | None:
    """Version of the ptxas that `toolchain` runs for sm_<capability>; None where it is not known.

    An installed toolchain honours TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH as Triton does (knobs.py:
    the named program if it runs, the wheel's own otherwise); one that is only named has the wheel's.
    """
    release = next((r for r in releases() if toolchain.within("triton", r.triton)), None)
    if release is None:
        return None
    blackwell = bool(release.blackwell) and capability >= release.blackwell_from
    variable = release.blackwell_env if blackwell else PTXAS_ENV
    named = os.environ.get(variable, "") if toolchain.path and variable else ""
    replaced = version_of(named) if named else None
    return replaced or (release.blackwell if blackwell else release.ptxas)


@functools.lru_cache(maxsize=8)
def version_of(program: str) -> str | None:
    """What `program --version` says, such as `12.8.93`; None where it does not run or says something else."""
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        # Not there, not executable, failed or hung: Triton passes over such a program too.
        return None
    found = re.search(r"\bV(\d+\.\d+\.\d+)", answer.stdout)
    return found.group(1) if found else None
