"""Where a run's figures come from: this chip, these compilers, this portattn."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from portattn import __version__
from portattn.corepath import kernel_source_digest
from portattn.registry import Registry
from portattn.target import Target
from portattn.tune.classes import Class
from portattn.tune.records import Origin

GIT_SECONDS = 5.0


def origin(target: Target, measured: bool, classes: Sequence[Class], command: str, spills: int) -> Origin:
    """The Origin of a run that begins now. measured: on this machine's device, which the target then is."""
    chip = torch.cuda.get_device_name() if measured else f"{target.arch.title}, not present"
    # A device's own target knows its driver, and a named one its assembler: here both are wanted.
    known = Registry.load().backends[target.backend].components(target.arch, target.toolchain)
    components = known | dict(target.toolchain.components)
    return Origin(
        target=target.name,
        chip=chip,
        measured=measured,
        toolchain=str(target.toolchain),
        ptxas=components.get("ptxas", ""),
        torch=str(torch.__version__) if measured else "",
        portattn=__version__,
        kernels=kernel_source_digest(),
        commit=commit(),
        command=command,
        date=datetime.date.today(),
        classes={one.name: tuple(load.name for load in one.workloads) for one in classes},
        spills=spills,
    )


def commit() -> str:
    """The commit of the checkout that portattn runs from, with "+" where files differ from it; empty without one."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""  # no git here: an installed package has the version alone
    return done.stdout.strip() if done.returncode == 0 else ""
