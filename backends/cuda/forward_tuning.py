"""The Hopper forward as a tunable: which schedules are tried."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from portattn.backends.cuda import forward
from portattn.tune.choice import Choice
from portattn.tune.tunable import Built, NotBuilt, Started, started

if TYPE_CHECKING:
    from portattn.call import Call
    from portattn.problem import Problem
    from portattn.target import Target

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
FLAGS = tuple(field.name for field in msgspec.structs.fields(forward.Schedule) if field.type in (bool, "bool"))


class ForwardTunable:
    name = forward.ForwardVariant.name
    ops: tuple[str, ...] = forward.ForwardVariant.ops

    def space(self, problem: Problem, target: Target, base: Choice) -> Iterator[Choice]:
        """Every tile of the width with every combination of flags that goes together, nearest to the base first."""
        found, ordered = [], forward.uneven(problem)
        for groups, keys, stages, queries, parts in TILES.get(forward.width(problem.head_dim), ()):
            tile = {"groups": groups, "keys": keys, "stages": stages, "queries": queries, "parts": parts}
            for values in itertools.product((True, False), repeat=len(FLAGS)):
                flags = dict(zip(FLAGS, values, strict=True))
                together = flags["own_out"] or (not flags["reg_q"] and parts == 1)
                if together and (ordered or flags["in_turn"] == base.flags.get("in_turn", True)):
                    found.append(Choice(flags={**base.flags, **tile, **flags}))
        yield from sorted(found, key=lambda choice: choice.differs(base))

    def today(self, problem: Problem, target: Target) -> Choice | None:
        chosen = forward.choice(problem)
        return None if chosen is None else Choice(flags=msgspec.structs.asdict(chosen.schedule))

    def build(self, problem: Problem, choice: Choice, target: Target) -> Built:
        no = forward.ForwardVariant().rejects(problem, target)
        if no is not None:
            raise NotBuilt(f"it {no.reason}")
        try:
            schedule = msgspec.convert(choice.flags, forward.Schedule)
        except msgspec.ValidationError as error:
            raise NotBuilt(str(error)) from None

        def start(call: Call) -> Started:
            return started(forward.launcher(call, schedule), call)

        told = f"{self.name} {problem} {choice.key}"
        return Built(hashlib.sha256(told.encode()).hexdigest()[:32], start)
