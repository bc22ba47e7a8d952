"""Identity: what a run's cells depend on, as data. A change of a cell is traced to what of it differs."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

Moment = Annotated[datetime.datetime, msgspec.Meta(tz=True)]  # without a zone, two machines' do not compare


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An accelerator of the host: its target, what its driver calls it, and versions of driver and run-time library."""

    target: str
    chip: str = ""
    versions: dict[str, str] = {}

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.chip or self.target} ({versions})" if versions else self.chip or self.target


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine. name: what its owner calls it (`matrix run --host`); empty where nobody said."""

    system: str
    name: str = ""
    devices: tuple[Device, ...] = ()

    def __str__(self) -> str:
        chips = ", ".join(map(str, self.devices)) or self.system
        return f"{self.name} ({chips})" if self.name else chips


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The origin of cells: all their dependences beside problem and target.

    id          digest of the fields below, except date and command: a cell's `origin`
    commit      of the source tree; empty if portattn is installed, or without git
    dirty       whether the tree has changes that the commit lacks, also new files
    digests     kernels; code (planning, compiling, judging); and for each backend `quirks/…`, `arches/…`, `tuning/…`
                and `backends/…`. `quirks/any` covers quirks of every backend
    compiler    the toolchain of the Python that made the run
    toolchains  toolchain -> its compiler here: this Python, another, or the lab's; empty without one
    versions    of this Python and its packages
    variables   environment variables that compilers read
    executors   executors of code whose chip is not here, by target and name -> empty, or why it does not run
    seconds     the time limit of a compile, and of a check of numbers
    """

    id: str = ""
    portattn: str
    commit: str = ""
    dirty: bool = False
    digests: dict[str, str] = {}
    compiler: str = ""
    toolchains: dict[str, str] = {}
    host: Host
    versions: dict[str, str] = {}
    variables: dict[str, str] = {}
    executors: dict[str, str] = {}
    seconds: float = 0.0
    command: str = ""
    date: Moment

    def code(self) -> str:
        """The commit in short, as people say it: `1a2b3c4d5e`, with `+changes` where the tree had some."""
        return f"{self.commit[:10] or 'no commit'}{'+changes' if self.dirty else ''}"


def with_id(identity: Identity) -> Identity:
    """The identity with its id."""
    parts = msgspec.structs.asdict(identity)
    for name in ("id", "command", "date"):
        del parts[name]
    return msgspec.structs.replace(identity, id=digest(parts))


def digests_of(identity: Identity, backend: str) -> dict[str, str]:
    """The digests that a backend's cells depend on."""
    names = ("kernels", "code", *(f"{part}/{backend}" for part in ("quirks", "arches", "tuning", "backends")))
    return {name: identity.digests[name] for name in (*names, "quirks/any") if name in identity.digests}


def cell_key(identity: Identity, cell: str, target: str, toolchain: str, components: Mapping[str, str]) -> str:
    """Digest all dependences of a cell's result: results of one key were made under the same conditions.

    cell        its id
    components  versions of its compiler's other parts (ptxas, …)

    The time limit is no part of the key: it matters only for cells that ran into it (`results.Results.resume`).
    """
    backend = target.partition(":")[0]
    parts = {
        "cell": cell,
        "portattn": identity.portattn,
        "digests": digests_of(identity, backend),
        "toolchain": [toolchain, identity.toolchains.get(toolchain, ""), dict(components)],
        "compiler": identity.compiler,
        "versions": identity.versions,
        "variables": identity.variables,
        "executors": {name: lacks for name, lacks in identity.executors.items() if name.split()[0] in (target, "any")},
        # What runs on a device depends on it; all else is the same wherever it is made.
        "devices": [device for device in identity.host.devices if device.target.partition(":")[0] == backend],
    }
    return digest(parts)


def digest(value: Any) -> str:
    """16 hexadecimal digits for anything that JSON can say; the order of a mapping does not matter."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]
