"""Where a run's figures come from: this chip, these compilers, this portattn."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import torch

import portattn
from portattn.planning.core_path import kernel_source_digest
from portattn.planning.registry import Registry
from portattn.schema.target import Target
from portattn.tools.source_commit import source_commit_text
from portattn.tools.tune.choice import Only
from portattn.tools.tune.classes import Class
from portattn.tools.tune.records import Origin


def origin(
    target: Target, measured: bool, classes: Sequence[Class], command: str, spills: int, commit: str = "",
    only: Only = MappingProxyType({}),
) -> Origin:  # fmt: skip
    """The Origin of a run that begins now.

    measured  on this machine's device, which the target then is
    commit    told by the caller; git's where that is empty
    """
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
        portattn=portattn.__version__,
        kernels=kernel_source_digest(),
        commit=commit or source_commit_text(Path(portattn.__file__).parent),
        command=command,
        date=datetime.date.today(),
        classes={one.name: tuple(load.name for load in one.workloads) for one in classes},
        spills=spills,
        only=dict(only),
    )
