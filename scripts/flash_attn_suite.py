"""Run a seeded sample of flash-attention's own tests, unmodified, with portattn's modules as `flash_attn`.

    python scripts/flash_attn_suite.py --source flash-attention --cases 2000 --seed 1 --processes 12
    python scripts/flash_attn_suite.py --source flash-attention --seconds 540 --log .flash.jsonl --json flash.json

`--source` is a checkout of Dao-AILab/flash-attention, or a folder with the files named in FILES, at their paths there.
Its tests need a GPU, pytest and einops. `flash_attn` and `flash_attn_interface` are portattn's modules in a temporary
package; `flash_attn.layers.rotary` is the source's own, and so are the helpers of the tests.

The two test files have some 700,000 cases. The sample has a share of each test function that grows with the root of
its number of cases, and at least one. A case runs in one of several processes; a process that crashes or takes longer
than `--time-limit` for a case is replaced. Cases that run out of memory run again alone, at the end. With `--log` each
result is a line of that file as it is known, and a second run of the same sample leaves out what passed or was skipped.

Exit status: 0 at least 99 % of the cases that ran have passed; 1 fewer; 2 nothing could be run; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import importlib.util
import io
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SUITES = {"fa2": "tests/test_flash_attn.py", "fa3": "hopper/test_flash_attn.py"}
# Files beside the tests -> their places in the temporary package.
BESIDE = {
    "hopper/test_util.py": "test_util.py",
    "hopper/padding.py": "padding.py",
    "flash_attn/layers/rotary.py": "flash_attn/layers/rotary.py",
    "flash_attn/ops/triton/rotary.py": "flash_attn/ops/triton/rotary.py",
}
FILES = (*SUITES.values(), *BESIDE)
OURS = "portattn.integrations"
PACKAGE = {
    "flash_attn/__init__.py": f"from {OURS}.flash_attn import *\nfrom {OURS}.flash_attn import __version__\n",
    "flash_attn_interface.py": f"import sys\nimport {OURS}.flash_attn_interface as its\nsys.modules[__name__] = its\n",
} | {
    f"flash_attn/{name}.py": f"import sys\nimport {OURS}.flash_attn.{name} as its\nsys.modules[__name__] = its\n"
    for name in ("flash_attn_interface", "bert_padding")
}
# Each case takes 70 GiB of a GPU beside its tensors, so they run one after the other, in the first process.
LARGE = "fa3:test_flash_attn_race_condition"
ENOUGH = 0.99
START_SECONDS = 300  # the longest that importing torch and the tests may take
TAIL = 1500  # characters of a failed case's output that are kept
LINE = 2**24  # bytes of an answer
GRACE = 10.0  # seconds that a case may still take when the time is up
TOLD_EVERY = 10.0  # seconds between lines of progress
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")


@dataclass(frozen=True)
class Test:
    """A test function and the values of its parameters.

    axes  (names, values) of each `parametrize`
    skip  why none of its cases runs, or None
    """

    name: str
    call: Callable[..., None]
    axes: tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...]
    skip: str | None

    @property
    def count(self) -> int:
        return math.prod(len(values) for _, values in self.axes)

    def arguments(self, index: int) -> dict[str, Any]:
        """Return the arguments of one case, in 0..count - 1."""
        found: dict[str, Any] = {}
        for names, values in self.axes:
            index, place = divmod(index, len(values))
            value = getattr(values[place], "values", values[place])
            found |= dict(zip(names, value if len(names) > 1 else (value,), strict=True))
        return found

    def title(self, index: int) -> str:
        """Return the case's name, as a call."""
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.arguments(index).items())})"


def tests_of(module: ModuleType, suite: str) -> Iterator[Test]:
    """Yield the tests of an imported file by their pytest marks."""
    for name, call in vars(module).items():
        if not name.startswith("test_") or not callable(call):
            continue
        axes, skip = [], None
        for mark in getattr(call, "pytestmark", []):
            if mark.name == "parametrize":
                names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
                axes.append((tuple(word.strip() for word in names), tuple(mark.args[1])))
            elif mark.name == "skipif" and mark.args[0]:
                skip = str(mark.kwargs.get("reason", "skipif"))
        yield Test(f"{suite}:{name}", call, tuple(axes), skip)


def sampled(tests: Sequence[Test], cases: int, seed: int) -> list[tuple[Test, int]]:
    """Return the sample: one case of each test first, then the others in random order."""
    whole = sum(math.sqrt(test.count) for test in tests)
    first, rest = [], []
    for test in tests:
        share = min(test.count, max(1, math.ceil(cases * math.sqrt(test.count) / whole)))
        drawn = random.Random(f"{seed}:{test.name}").sample(range(test.count), share)
        first += [(test, drawn[0])] if drawn else []
        rest += [(test, index) for index in drawn[1:]]
    random.Random(seed).shuffle(rest)
    return [*first, *rest][:cases]


def write_package(source: Path, folder: Path) -> None:
    """Write the package path that the tests import from."""
    for path, text in PACKAGE.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for path, place in BESIDE.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, folder / place)


# --- in a process of its own ---------------------------------------------------------------------------------------


def work(given: argparse.Namespace) -> int:
    """Run the cases whose numbers come in, a line each, and answer each by a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints to standard output does not disturb the answers
    sys.path[:0] = [given.package, str(ROOT)]
    tests: list[Test] = []
    for suite, path in SUITES.items():
        spec = importlib.util.spec_from_file_location(f"flash_attention_{suite}", given.source / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tests += tests_of(module, suite)
    sample = sampled(tests, given.cases, given.seed)
    ready = {"ready": [test.title(index) for test, index in sample], "counts": {t.name: t.count for t in tests}}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        number = int(line)
        print(json.dumps(answer(*sample[number]) | {"case": number}), file=answers, flush=True)
    return 0


def answer(test: Test, index: int) -> dict[str, Any]:
    """Run one case. `broken`: the process can run no other; `memory`: the GPU had none left."""
    import pytest
    import torch

    if test.skip:
        return {"outcome": "skipped", "reason": test.skip, "seconds": 0.0}
    said, before = io.StringIO(), time.monotonic()
    found: dict[str, Any] = {"outcome": "passed", "reason": ""}
    try:
        with contextlib.redirect_stdout(said):
            test.call(**test.arguments(index))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    except pytest.skip.Exception as why:
        found = {"outcome": "skipped", "reason": str(why)}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 (a test may raise anything, and the next one runs all the same)
        text = str(error)
        found = {
            "outcome": "failed", "reason": reason(error, test), "output": said.getvalue()[-TAIL:],
            "error": f"{type(error).__name__}: {text}"[:TAIL],
            "traceback": "".join(traceback.format_tb(error.__traceback__)[-6:]),
            "broken": "CUDA error" in text or "device-side assert" in text,
            "memory": isinstance(error, torch.OutOfMemoryError),
        }  # fmt: skip
    found["seconds"] = round(time.monotonic() - before, 2)
    if torch.cuda.is_available() and not found.get("broken"):
        torch.cuda.empty_cache()  # other processes have the same GPU
    return found


def reason(error: BaseException, test: Test) -> str:
    """Return what failures of one kind have in common: the error without its numbers, or the line of the assertion."""
    if isinstance(error, AssertionError) and not str(error):
        frames = traceback.extract_tb(error.__traceback__)
        mine = [frame for frame in frames if frame.name == test.call.__name__]
        return f"AssertionError: {(mine or frames)[-1].line}"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {_NUMBER.sub('#', lines[0])[:300]}"


# --- the processes' parent -----------------------------------------------------------------------------------------


class UnusableError(Exception):
    """Nothing can be run: the text says why."""


@dataclass
class State:
    """What is to run, and what ran."""

    given: argparse.Namespace
    package: str
    known: dict[str, dict[str, Any]]
    log: Any
    started: int = 0
    began: float = field(default_factory=time.monotonic)
    names: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    large: deque[int] = field(default_factory=deque)
    again: deque[int] = field(default_factory=deque)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def begin(self, ready: Mapping[str, Any]) -> None:
        """Fill the queues, once: a process has said which cases there are."""
        if self.names:
            return
        self.names, self.counts = ready["ready"], ready["counts"]
        failed_before = []
        for number, name in enumerate(self.names):
            if self.given.only not in name:
                continue
            before = self.known.get(name)
            if before and before["outcome"] != "failed":
                self.results[name] = before
            elif before:
                failed_before.append(number)
            else:
                (self.large if name.startswith(f"{LARGE}(") else self.waiting).append(number)
        self.waiting.extend(failed_before)

    def left(self) -> float:
        """Return the seconds that are left."""
        return float(self.began + self.given.seconds - time.monotonic())

    def take(self, lane: int) -> int | None:
        """Return the next case for a lane; None if no case or no time is left."""
        if self.left() <= 0:
            return None
        if lane == 0 and self.large:
            return self.large.popleft()
        return self.waiting.popleft() if self.waiting else None

    def note(self, number: int, found: dict[str, Any], last: bool = False) -> None:
        """Keep a result; a case that ran out of memory waits for the end."""
        if found.get("memory") and not last:
            self.again.append(number)
            return
        name = self.names[number]
        self.results[name] = found
        if self.log is not None:
            print(json.dumps({"name": name, **found}), file=self.log, flush=True)


async def lane(state: State, number: int, take: Callable[[], int | None], last: bool = False) -> None:
    """Run cases in one process after the other, until there is none left."""
    worker: asyncio.subprocess.Process | None = None
    try:
        if not state.names:
            worker = await started(state)
        while (case := take()) is not None:
            if worker is None:
                worker = await started(state)
            found = await asked(worker, case, min(state.given.time_limit, max(state.left(), 0) + GRACE))
            if found.get("broken") and state.left() <= -GRACE:  # it was stopped, which says nothing about it
                break
            state.note(case, found, last)
            if found.get("broken"):
                await ended(worker)
                worker = None
    finally:
        if worker is not None:
            await ended(worker)


async def started(state: State) -> asyncio.subprocess.Process:
    """Start a process, and wait until it has imported the tests. Raises UnusableError."""
    given = state.given
    command = [sys.executable, __file__, "--worker", "--package", state.package, "--source", str(given.source)]
    command += ["--cases", str(given.cases), "--seed", str(given.seed)]
    state.started += 1
    errors = Path(state.package) / f"errors-{state.started}"
    with errors.open("w") as said:
        worker = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=said, limit=LINE,
            env={"OMP_NUM_THREADS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ},
            start_new_session=True,
        )  # fmt: skip
    line = b""
    with contextlib.suppress(TimeoutError):
        assert worker.stdout is not None
        line = await asyncio.wait_for(worker.stdout.readline(), START_SECONDS)
    if not line:
        await ended(worker)
        last = errors.read_text(errors="replace").strip().splitlines()[-8:]
        raise UnusableError("\n".join(["a process could not import the tests:", *last]))
    state.begin(json.loads(line))
    return worker


async def asked(worker: asyncio.subprocess.Process, case: int, limit: float) -> dict[str, Any]:
    """Return a process's answer; of one that crashes or takes too long, a failure."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    before = time.monotonic()
    try:
        worker.stdin.write(f"{case}\n".encode())
        await worker.stdin.drain()
        line = await asyncio.wait_for(worker.stdout.readline(), limit)
        why = "the process ended"
    except TimeoutError:
        line, why = b"", f"took longer than {limit:g} s"
    except ConnectionError:
        line, why = b"", "the process ended"
    if line:
        found: dict[str, Any] = json.loads(line)
        return found
    seconds = round(time.monotonic() - before, 2)
    return {"outcome": "failed", "reason": why, "seconds": seconds, "broken": True}


async def ended(worker: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, 9)
    await worker.wait()


async def run(state: State) -> None:
    """Run all lanes, then what ran out of memory, alone."""
    told = asyncio.create_task(tell(state))
    try:
        lanes = [lane(state, i, lambda i=i: state.take(i)) for i in range(state.given.processes)]  # type: ignore[misc]
        await asyncio.gather(*lanes)

        def take_again() -> int | None:
            return None if state.left() <= 0 or not state.again else state.again.popleft()

        if state.again:
            await lane(state, 0, take_again, last=True)
    finally:
        told.cancel()


async def tell(state: State) -> None:
    while True:
        await asyncio.sleep(TOLD_EVERY)
        counts = Counter(found["outcome"] for found in state.results.values())
        seconds = time.monotonic() - state.began
        print(f"{seconds:5.0f} s: {len(state.results)} of {len(state.names)} cases, {dict(counts)}", flush=True)


def report(state: State) -> dict[str, Any]:
    """Return the results by test and by the reason of failures, and the share that passed."""
    by_test: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    groups: dict[str, list[str]] = defaultdict(list)
    skips: Counter[str] = Counter()
    for name, found in state.results.items():
        test = name.partition("(")[0]
        by_test[test][found["outcome"]] += 1
        seconds[test] += found["seconds"]
        if found["outcome"] == "failed":
            groups[f"{test}: {found['reason']}"].append(name)
        elif found["outcome"] == "skipped":
            skips[found["reason"]] += 1
    counts = Counter(found["outcome"] for found in state.results.values())
    ran = counts["passed"] + counts["failed"]
    return {
        "seed": state.given.seed, "cases": len(state.names), "of": sum(state.counts.values()),
        "seconds": round(time.monotonic() - state.began), "counts": dict(counts), "ran": ran,
        "passed_of_those_that_ran": counts["passed"] / ran if ran else None,
        "tests": {
            name: {"all": state.counts[name], **by_test[name], "seconds": round(seconds[name])} for name in state.counts
        },
        "failures": [
            {"reason": why, "cases": names, "first": state.results[names[0]]}
            for why, names in sorted(groups.items(), key=lambda item: -len(item[1]))
        ],
        "skips": dict(skips),
    }  # fmt: skip


def show(found: Mapping[str, Any]) -> None:
    print(f"\n{'test':45} {'of':>7} passed failed skipped seconds")
    for name, row in found["tests"].items():
        numbers = [row.get(word, 0) for word in ("passed", "failed", "skipped", "seconds")]
        print(f"{name:45} {row['all']:7} " + " ".join(f"{n:{w}}" for n, w in zip(numbers, (6, 6, 7, 7), strict=True)))
    for group in found["failures"]:
        first = group["first"]
        print(f"\n{len(group['cases'])} failed: {group['reason']}\n  {group['cases'][0]}\n  {first.get('error', '')}")
    left = found["cases"] - sum(found["counts"].values())
    share = "" if found["ran"] == 0 else f", {found['passed_of_those_that_ran']:.2%} of them passed"
    print(f"\n{found['ran']} ran{share}; {found['counts'].get('skipped', 0)} skipped; {left} did not run")


def digest(source: Path) -> str:
    return hashlib.sha256(b"".join((source / path).read_bytes() for path in FILES)).hexdigest()[:16]


def known_results(path: Path | None, head: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a log holds of the same sample. Raises UnusableError where it is of another one."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    if not lines or lines[0] != head:
        raise UnusableError(f"{path} is the log of another sample: name another file, or remove it")
    return {line.pop("name"): line for line in lines[1:]}


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of flash-attention, or its files")
    parser.add_argument("--cases", type=int, default=2000, help="size of the sample (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 4) * 3 // 4))
    parser.add_argument("--time-limit", type=float, default=180.0, help="seconds that a case may take (180)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after this many")
    parser.add_argument("--only", default="", help="cases of the sample whose name holds this text")
    parser.add_argument("--log", type=Path, help="a line for each result; what passed is not run again")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--package", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.cases < 1 or given.processes < 1:
        parser.error("--cases and --processes must be at least 1")
    given.source = given.source.resolve()
    return given


def main(words: Sequence[str] | None = None) -> int:
    given = options(words)
    if given.worker:
        return work(given)
    try:
        missing = [path for path in FILES if not (given.source / path).is_file()]
        if missing:
            raise UnusableError(f"{given.source} has no {', '.join(missing)}")
        head = {"cases": given.cases, "seed": given.seed, "source": digest(given.source)}
        known = known_results(given.log, head)
    except UnusableError as error:
        print(f"flash_attn_suite: {error}", file=sys.stderr)
        return 2
    interrupted = False
    with contextlib.ExitStack() as stack:
        package = stack.enter_context(tempfile.TemporaryDirectory())
        write_package(given.source, Path(package))
        log = None
        if given.log is not None:
            fresh = not given.log.exists()
            log = stack.enter_context(given.log.open("a"))
            if fresh:
                print(json.dumps(head), file=log, flush=True)
        state = State(given, package, known, log)
        try:
            asyncio.run(run(state))
        except KeyboardInterrupt:
            interrupted = True
        except UnusableError as error:
            print(f"flash_attn_suite: {error}", file=sys.stderr)
    found = report(state)
    show(found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if interrupted:
        return 130
    return status(found)


def status(found: Mapping[str, Any]) -> int:
    if not found["ran"]:
        return 2
    return 0 if found["passed_of_those_that_ran"] >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
