"""Plans that are not the same under two compilers: another path, kernel, lowering, launch or schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from portattn.errors import PortattnError
from portattn.schema.plan import Plan
from portattn.tools.matrix.problems import NamedProblem
from portattn.tools.upgrade.toolchain_pair import Pair, Plans

NO_PLAN = "no plan"
_OF_PATHS = ("path", "kernel", "why")


class PlanChange(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that is not the same. lost: it leaves the core kernel, or there is none any more."""

    problem: str
    targets: tuple[str, ...]
    before: str
    after: str
    differs: tuple[str, ...]
    lost: bool


def plan_change(named: NamedProblem, pair: Pair, plans: Plans) -> PlanChange | None:
    """How the plan of a problem changes; None where it does not."""
    was, is_ = (_told(plans.of(named, side)) for side in pair)
    if was["path"] != is_["path"]:  # another kernel's choices and launch are no differences of one
        was, is_ = ({name: told[name] for name in _OF_PATHS if name in told} for told in (was, is_))
    differs = tuple(
        f"{name}: {was.get(name)} -> {is_.get(name)}" for name in {**was, **is_} if was.get(name) != is_.get(name)
    )
    if not differs:
        return None
    cores = {backend.core_path for backend in pair.new.registry.backends.values() if backend.core_path}
    return PlanChange(
        problem=named.name,
        targets=(pair.new.target.name,),
        before=str(was["path"]),
        after=str(is_["path"]),
        differs=differs,
        lost=(was["path"] in cores and is_["path"] not in cores) or (is_["path"] == NO_PLAN != was["path"]),
    )


def together(found: Iterable[PlanChange]) -> Iterator[PlanChange]:
    """Targets on which a problem's plan changes in the same way, in one line."""
    groups: dict[tuple[str, tuple[str, ...]], list[PlanChange]] = {}
    for one in found:
        groups.setdefault((one.problem, one.differs), []).append(one)
    for same in groups.values():
        yield msgspec.structs.replace(same[0], targets=tuple(t for one in same for t in one.targets))


def _told(made: Plan | PortattnError) -> dict[str, Any]:
    """What of a plan is compared: path, kernel, choices, launch, schedule, environment."""
    if isinstance(made, PortattnError):
        return {"path": NO_PLAN, "why": str(made)}
    told: dict[str, Any] = {"path": made.path, "kernel": made.kernel or "none"}
    if made.lowering is not None and made.launch is not None:
        told |= msgspec.structs.asdict(made.lowering) | made.launch.values()
    elif made.rejected:
        told["why"] = made.rejected[0].reason
    return told | made.schedule | made.env
