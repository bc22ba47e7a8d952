"""The Hopper forward as a tunable: which schedules are tried."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from portattn.backends.cuda.gluon import described_by
from portattn.backends.cuda.hopper_forward import variant
from portattn.launch import meta_call
from portattn.launch.described import signatures
from portattn.schema.plan import Plan
from portattn.schema.toolchain import installed
from portattn.tools.tune.choice import Choice
from portattn.tools.tune.core import compiled
from portattn.tools.tune.tunable import Built, Compiled, NotBuilt, Started, started

if TYPE_CHECKING:
    from portattn.schema.call import Call
    from portattn.schema.problem import Problem
    from portattn.schema.steps import StepLauncher
    from portattn.schema.target import Target
    from portattn.worker.client import Worker

# Of each width the tiles to try: (consumer groups, keys of a tile, stages, buffers for Q, parts of the output).
TILES = {
    64: (
        (3, 128, 4, 2, 1),
        (3, 128, 4, 1, 1),
        (2, 128, 4, 2, 1),
        (2, 64, 4, 2, 1),
        (2, 128, 4, 1, 1),
        (2, 128, 2, 2, 1),
    ),
    128: ((2, 128, 2, 2, 1), (2, 64, 4, 2, 1), (2, 128, 2, 1, 1)),
    256: ((2, 64, 2, 1, 1), (2, 64, 2, 1, 2)),
}
_OF_NARROW = ("halved",)  # of e4m3 operands alone, whose schedules are not searched
FLAGS = tuple(
    field.name
    for field in msgspec.structs.fields(variant.Schedule)
    if field.type in (bool, "bool") and field.name not in _OF_NARROW
)


class ForwardTunable:
    name = variant.ForwardVariant.name
    ops: tuple[str, ...] = variant.ForwardVariant.ops

    def space(self, problem: Problem, target: Target, base: Choice) -> Iterator[Choice]:
        """Every tile of the width with every combination of flags that goes together, nearest to the base first."""
        found, ordered = [], variant.uneven(problem)
        for groups, keys, stages, queries, parts in TILES.get(variant.width(problem.head_dim), ()):
            tile = {"groups": groups, "keys": keys, "stages": stages, "queries": queries, "parts": parts}
            for values in itertools.product((True, False), repeat=len(FLAGS)):
                flags = {**base.flags, **tile, **dict(zip(FLAGS, values, strict=True))}
                if not ordered and flags["in_turn"] != base.flags.get("in_turn", True):
                    continue
                with contextlib.suppress(msgspec.ValidationError):  # flags that do not go together
                    msgspec.convert(flags, variant.Schedule)
                    found.append(Choice(flags=flags))
        yield from sorted(found, key=lambda choice: choice.differs(base))

    def today(self, problem: Problem, target: Target) -> Choice | None:
        chosen = variant.choice(problem, target.toolchain)
        return None if chosen is None else Choice(flags=msgspec.structs.asdict(chosen.schedule))

    def build(self, problem: Problem, choice: Choice, target: Target) -> Built:
        no = variant.ForwardVariant().rejects(problem, target)
        if no is not None:
            raise NotBuilt(f"it {no.reason}")
        try:
            schedule = msgspec.convert(choice.flags, variant.Schedule)
        except msgspec.ValidationError as error:
            raise NotBuilt(str(error)) from None

        def start(call: Call) -> Started:
            return started(variant.launcher(call, schedule), call)

        identity = _digest(f"{self.name} {problem} {schedule}".encode())
        if not described_by(installed()):
            return Built(identity, start)
        seen = signatures(_Scheduled(schedule), meta_call(problem))
        made = Plan(
            problem=problem, target=target.name, toolchain=str(target.toolchain), requested=self.name, path=self.name
        )

        def compile_it(worker: Worker, seconds: float) -> Compiled:
            return compiled(made, seen, target, worker, seconds)

        return Built(identity, start, _digest(msgspec.json.encode(seen, order="deterministic")), compile_it)


class _Scheduled:
    """The variant with this schedule, whatever its tuning data says."""

    def __init__(self, schedule: variant.Schedule) -> None:
        self._schedule = schedule

    def described(self, call: Call) -> StepLauncher:
        return variant.steps_of(call, self._schedule)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
