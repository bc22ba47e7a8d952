"""Choice: one candidate of a search, as a tuning file's entry would say it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from portattn.schema.lowering import LAUNCH_FIELDS, Lowering, OptionValue
from portattn.schema.tuning import SPLIT_THRESHOLD

Setting = bool | int | str | None
Only = Mapping[str, tuple[str, ...]]  # values that settings may have, as they are written
_DEFAULTS: dict[str, Any] = msgspec.structs.asdict(Lowering())
# How the usual settings are written in tables: 128×64 w4 s2.
_SHORT = {"num_warps": "w{}", "num_stages": "s{}"}


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a tuning entry sets.

    launch    block sizes, warps, stages and compiler options
    lowering  named choices of a core kernel
    flags     settings of a variant, by names of its own
    occupancy  programs that one core is expected to run at a time (it decides over how many programs keys are split)
    split_threshold  programs a core from which on keys are not split
    """

    launch: dict[str, OptionValue] = {}
    lowering: dict[str, str] = {}
    flags: dict[str, bool | int | str] = {}
    occupancy: int = 1
    split_threshold: float = SPLIT_THRESHOLD

    @property
    def settings(self) -> dict[str, Setting]:
        """All of it by name."""
        return {
            **self.launch,
            **self.lowering,
            "occupancy": self.occupancy,
            "split_threshold": f"{self.split_threshold:g}",
            **self.flags,
        }

    @property
    def key(self) -> str:
        """A short digest, the same for equal choices in any order of names."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:12]

    def differs(self, other: Choice) -> int:
        """Count the settings in which the two differ. An unset choice counts as its default."""
        ours, theirs = self.settings, other.settings
        return sum(
            ours.get(name, _DEFAULTS.get(name)) != theirs.get(name, _DEFAULTS.get(name))
            for name in ours.keys() | theirs.keys()
        )

    def among(self, only: Only) -> bool:
        """Return whether each of these settings has one of its values. An unset setting has the value None."""
        settings = self.settings
        return all(str(settings.get(name)).lower() in map(str.lower, values) for name, values in only.items())

    def __str__(self) -> str:
        launch: dict[str, Any] = dict(self.launch)
        tile = [str(launch.pop(name)) for name in ("block_m", "block_n") if name in launch]
        words = ["×".join(tile)] if tile else []
        words += [_SHORT[name].format(launch.pop(name)) for name in _SHORT if name in launch]
        words += [f"{name}={value}" for name, value in launch.items()]
        words += [str(value) for value in self.lowering.values()]
        words += [f"{name}={value}" for name, value in self.flags.items()]
        words += [f"occupancy={self.occupancy}"] if self.occupancy != 1 else []
        words += [f"split_threshold={self.split_threshold:g}"] if self.split_threshold != SPLIT_THRESHOLD else []
        return " ".join(words) or "defaults"


def apply_settings(base: Choice, settings: dict[str, Setting], lowering_names: tuple[str, ...]) -> Choice:
    """The base with settings put in their places. None takes a compiler option away."""
    launch, lowering, occupancy = dict(base.launch), dict(base.lowering), base.occupancy
    for name, value in settings.items():
        if name == "occupancy":
            occupancy = int(value or 1)
        elif name in lowering_names:
            lowering[name] = str(value)
        elif value is None:
            launch.pop(name, None)
        else:
            launch[name] = value
    # One order, so that equal choices are written alike.
    names = sorted(launch, key=lambda n: (LAUNCH_FIELDS.index(n) if n in LAUNCH_FIELDS else len(LAUNCH_FIELDS), n))
    made = {name: launch[name] for name in names}
    return Choice(
        launch=made, lowering=lowering, flags=base.flags, occupancy=occupancy, split_threshold=base.split_threshold
    )
