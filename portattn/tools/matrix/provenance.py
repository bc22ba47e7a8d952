"""Where a run's cells come from: this portattn, these kernels, this machine and its compilers."""

from __future__ import annotations

import datetime
import importlib.metadata as metadata
import platform
from collections.abc import Sequence

from portattn.planning.core_path import kernel_source_digest
from portattn.schema.target import Target
from portattn.schema.toolchain import installed
from portattn.tools import lab
from portattn.tools.matrix.cells import Run
from portattn.tools.matrix.select import Spec
from portattn.version import __version__


def this_run(
    specs: Sequence[Spec], problems: str, command: str, here: Sequence[Target], elsewhere: Sequence[str] = ()
) -> Run:
    """The Run that these cells would make here and now; `elsewhere` are toolchains not compiled in the lab."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    toolchains = tuple(dict.fromkeys(str(s.target.toolchain) for s in specs))
    made = [
        e for e in lab.environments() if e.toolchain in toolchains and e.toolchain not in (str(installed()), *elsewhere)
    ]
    return Run(
        portattn=__version__,
        kernels=kernel_source_digest(),
        toolchains=toolchains,
        compiler=str(installed()),
        machine=f"{platform.system()} {platform.machine()}",
        devices=tuple(str(t) for t in here),
        versions=versions,
        command=command,
        problems=problems,
        targets=tuple(dict.fromkeys(s.target.name for s in specs)),
        cells=tuple(s.id for s in specs),
        environments={e.toolchain: f"Python {e.python_version}, made {e.created}" for e in made},
        date=datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0),
    )
