"""Many shapes of a few kinds, in turn in one process: each computes what it does where nothing came before. On a device
the results are compared, byte for byte; without one the launches of an H100 (recorded.py)."""

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

import portattn
from portattn.api import dispatch
from portattn.errors import PortattnError
from portattn.testing import tolerance

from .kinds import KINDS, Kind, Pool, Shape, arguments, following, kind_of
from .running import Failure, Found

ROUND = 300  # shapes in turn, before each is made by itself
# Kinds that are at work together, for so many rounds: each has some kernels, of seconds to compile.
TOGETHER, ROUNDS = 5, 6
AGAIN = 0.25  # share of shapes that were there before
FRESH_ROUNDS = 8  # rounds from one comparison with a process of its own to the next
FRESH_S = 300.0  # such a process's limit
SEARCHED = 60  # earlier shapes that a failure is tried after, each alone
MOST = 20  # failures after which a process ends
RAISED = "raised"
SHOWN = 600  # characters of each of two outcomes that differ
Turn = tuple[str, Shape]


class Outcome(msgspec.Struct):
    """What a call did: the path it took, and its results or launches; or what it raised."""

    path: str
    tensors: list[Any] = []
    said: list[Any] = []

    def same(self, other: "Outcome") -> bool:
        if (self.path, self.said, len(self.tensors)) != (other.path, other.said, len(other.tensors)):
            return False
        return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(self.tensors, other.tensors, strict=True))

    def digest(self) -> str:
        found = hashlib.sha256(repr((self.path, self.said)).encode())
        for tensor in self.tensors:
            found.update(_bits(tensor).cpu().numpy().tobytes())
        return found.hexdigest()

    def differs(self, other: "Outcome") -> str:
        if self.path == RAISED:
            return f"raised: {self.said[0]}"
        if self.path != other.path:
            return f"path {self.path}, alone {other.path}"
        for index, (a, b) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            if not torch.equal(_bits(a), _bits(b)):
                wrong = int((_bits(a) != _bits(b)).sum())
                far = (a.float() - b.float()).abs().max().item()
                return f"{wrong} of {a.numel()} elements of result {index} differ, by up to {far:.3g}"
        pairs = [(a, b) for a, b in zip(self.said, other.said, strict=False) if a != b]
        if not pairs:
            return f"{len(self.said)} parts, alone {len(other.said)}"
        return f"{str(pairs[0][0])[:SHOWN]}, alone {str(pairs[0][1])[:SHOWN]}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


class Here:
    """Performs turns on this process's device."""

    def __init__(self, device: str) -> None:
        self.recorder = None
        if device == "cpu":
            from .recorded import Recorder

            self.recorder = Recorder()
        self.pool = Pool(device, large=self.recorder is not None)

    def perform(self, turn: Turn) -> Outcome | None:
        kind, shape = kind_of(turn[0]), turn[1]
        given = arguments(kind, shape, self.pool)
        if given is None:
            return None
        modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        try:
            with modes.get(shape.grad, contextlib.nullcontext)(), tolerance.nan_filled_memory():
                result = getattr(portattn, kind.op)(**given)
        except PortattnError as error:  # an argument's type, or a path that does not have it
            return Outcome(type(error).__name__, said=[str(error), *self._launched(given, ())])
        except Exception:  # noqa: BLE001  # whatever it is, it is a failure, alone too
            self._launched(given, ())
            return Outcome(RAISED, said=[traceback.format_exc(limit=-3)])
        made = portattn.last_plan()
        results = [t.detach() for t in (result if isinstance(result, tuple) else (result,))]
        said: list[Any] = [[list(t.shape), list(t.stride()), str(t.dtype)] for t in results]
        path = "" if made is None else made.path
        if self.recorder is not None:
            return Outcome(path, said=said + self._launched(given, results))
        return Outcome(path, tensors=results, said=said)

    def _launched(self, given: dict[str, Any], results: Sequence[torch.Tensor]) -> list[Any]:
        if self.recorder is None:
            return []
        tensors = [(name, t) for name, t in given.items() if isinstance(t, torch.Tensor) and t.numel()]
        return self.recorder.launches(tensors, [t for t in results if t.numel()])


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """What a process of turns needs: no children, and no warnings of paths that fall back."""
    with warnings.catch_warnings(), portattn.settings(isolate="never", canary="never", fallback="silent"):
        warnings.simplefilter("ignore")
        yield


def alone(here: Here, turn: Turn) -> Outcome | None:
    dispatch.forget_plans()
    return here.perform(turn)


def work(seed: int, device: str, seconds: float, stopped: Callable[[], bool], kinds: Sequence[Kind] = KINDS,
        length: int = ROUND, fresh: bool = True) -> Iterator[Found | int]:  # fmt: skip
    """Rounds of turns until the time is over. What is kept stays from round to round but for what `alone` forgets."""
    end = time.monotonic() + seconds
    r, here = random.Random(f"{seed} {device}"), Here(device)
    last: dict[str, Shape] = {}
    number, round_, failures = 0, 0, 0

    def over() -> bool:
        return time.monotonic() > end or stopped() or failures >= MOST

    with prepared():
        while not over():
            if round_ % ROUNDS == 0:
                chosen = r.sample(list(kinds), min(TOGETHER, len(kinds)))
            turns: list[Turn] = []
            outcomes: list[Outcome] = []
            while len(turns) < length and not over():
                yield number
                number += 1
                turn = _next(turns, chosen, last, r)
                outcome = here.perform(turn)
                if outcome is not None:
                    turns.append(turn)
                    outcomes.append(outcome)
            found = _compared(here, seed, number - len(turns), turns, outcomes)
            failures += len(found.failures)
            yield found
            if fresh and turns and round_ % FRESH_ROUNDS == 0 and not over():
                yield _compared_with_a_process(here, seed, number, r.choice(turns), device)
            round_ += 1


def _next(turns: Sequence[Turn], kinds: Sequence[Kind], last: dict[str, Shape], r: random.Random) -> Turn:
    if turns and r.random() < AGAIN:
        return r.choice(turns)
    kind = r.choice(kinds)
    last[kind.name] = following(kind, last.get(kind.name, Shape()), r)
    return kind.name, last[kind.name]


def _compared(here: Here, seed: int, first: int, turns: Sequence[Turn], outcomes: Sequence[Outcome]) -> Found:
    found = Found(counts={}, failures=[])
    expected: dict[Turn, Outcome] = {}
    for index, (turn, outcome) in enumerate(zip(turns, outcomes, strict=True)):
        if turn not in expected:
            made = alone(here, turn)
            assert made is not None
            expected[turn] = made
        found.cases += 1
        name = f"{turn[0]}: {outcome.path}"
        found.counts[name] = found.counts.get(name, 0) + 1
        if outcome.path == RAISED or not outcome.same(expected[turn]):
            enough = _enough(here, turns[:index], turn) if not found.failures else turns[: index + 1]
            why = f"{turn}: {outcome.differs(expected[turn])}"
            found.failures.append(Failure(seed=seed, case=first + index, why=why, snippet=command(enough)))
    return found


def _enough(here: Here, before: Sequence[Turn], turn: Turn) -> list[Turn]:
    """The shortest history found after which a turn goes wrong: one earlier turn, or all of them."""
    same_op = [t for t in reversed(before) if kind_of(t[0]).op == kind_of(turn[0]).op]
    for earlier in list(dict.fromkeys(same_op))[:SEARCHED]:
        if _wrong_after(here, [earlier, turn]):
            return [earlier, turn]
    return [*before, turn]


def _wrong_after(here: Here, turns: Sequence[Turn]) -> str:
    """How the last of some turns differs from the same alone; "" where it does not."""
    expected = alone(here, turns[-1])
    dispatch.forget_plans()
    outcomes = [here.perform(turn) for turn in turns]
    if expected is None or outcomes[-1] is None:
        return ""
    if outcomes[-1].path != RAISED and outcomes[-1].same(expected):
        return ""
    return outcomes[-1].differs(expected)


def command(turns: Sequence[Turn]) -> str:
    text = json.dumps([[name, _fields(shape)] for name, shape in turns])
    return f"PYTHONPATH=.:tests python -m fuzz shapes --turns '{text}'"


def _fields(shape: Shape) -> dict[str, Any]:
    defaults = {f.name: f.default for f in msgspec.structs.fields(Shape)}
    return {name: value for name, value in msgspec.to_builtins(shape).items() if value != defaults[name]}


def turns_of(text: str) -> list[Turn]:
    return msgspec.json.decode(text, type=list[tuple[str, Shape]])


def again(seed: int, device: str, seconds: float, stopped: Callable[[], bool], text: str) -> Iterator[Found | int]:
    here, turns = Here(device), turns_of(text)
    with prepared():
        yield 0
        why = _wrong_after(here, turns)
        failures = [Failure(seed=seed, case=0, why=why, snippet=command(turns))] if why else []
        yield Found(cases=len(turns), counts={}, failures=failures)


def _compared_with_a_process(here: Here, seed: int, number: int, turn: Turn, device: str) -> Found:
    """The turn here, now, against a process that makes nothing else."""
    ours = here.perform(turn)
    assert ours is not None
    program = "import sys; from fuzz import shapes; shapes.fresh(*sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", program, device, json.dumps([[turn[0], _fields(turn[1])]])],
        env=os.environ, capture_output=True, text=True, timeout=FRESH_S, check=False)  # fmt: skip
    theirs = done.stdout.splitlines()[-1] if done.returncode == 0 else done.stderr[-2000:]
    failures = []
    if theirs != ours.digest():
        failures.append(Failure(seed=seed, case=number, why=f"{turn} differs from a new process: {theirs}"))
    return Found(cases=1, counts={"compared with a new process": 1}, failures=failures)


def fresh(device: str, text: str) -> None:
    torch.set_num_threads(1)
    with prepared():
        outcome = Here(device).perform(turns_of(text)[0])
    print(outcome.digest())
