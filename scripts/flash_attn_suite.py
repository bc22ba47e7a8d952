"""Run a seeded sample of flash-attention's own tests, unmodified, with portattn's modules as `flash_attn`.

    python scripts/flash_attn_suite.py --source flash-attention --cases 2000 --seed 1 --processes 12
    python scripts/flash_attn_suite.py --source flash-attention --seconds 540 --log .flash.jsonl --json flash.json

`--source` is a checkout of Dao-AILab/flash-attention, or a folder with the files named in FILES, at their paths there.
Its tests need a GPU, pytest and einops. `flash_attn` and `flash_attn_interface` are portattn's modules in a temporary
package; `flash_attn.layers.rotary` is the source's own, and so are the helpers of the tests.

The two test files have some 700,000 cases. The sample has a share of each test function that grows with the root of
its number of cases, and at least one. pytest runs it in several processes, with this file as a plug-in; a process that
crashes or takes longer than `--time-limit` for a case is replaced. Cases that run out of memory run again alone, at the
end. With `--log` each result is a line of that file as it is known (scripts/chip_suite.py), and a second run of the
same sample leaves out what passed.

Exit status: 0 at least 99 % of the cases that ran have passed; 1 fewer; 2 nothing could be run; 130 interrupted.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import chip_suite
import pytest

from portattn.errors import PortattnError

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
SAMPLE = "FLASH_ATTN_SUITE"  # the variable that tells the plug-in source, cases and seed
# Each case takes 70 GiB of a GPU beside its tensors, so they run at the end, one after the other.
LARGE = "test_flash_attn_race_condition"
ENOUGH = 0.99
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
_MEMORY = "OutOfMemoryError"


@dataclass(frozen=True)
class Test:
    """A test function and the values of its parameters."""

    name: str
    axes: tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...]  # (names, values) of each `parametrize`

    @property
    def count(self) -> int:
        return math.prod(len(values) for _, values in self.axes)

    def arguments(self, index: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for names, values in self.axes:
            index, place = divmod(index, len(values))
            value = getattr(values[place], "values", values[place])
            found |= dict(zip(names, value if len(names) > 1 else (value,), strict=True))
        return found


def tests_of(module: ModuleType, suite: str) -> Iterator[Test]:
    """Yield the tests of an imported file by their pytest marks."""
    for name, call in vars(module).items():
        if name.startswith("test_") and callable(call):
            marks = [mark.args for mark in getattr(call, "pytestmark", []) if mark.name == "parametrize"]
            words = [names.split(",") if isinstance(names, str) else names for names, *_ in marks]
            axes = [(tuple(map(str.strip, some)), tuple(args[1])) for some, args in zip(words, marks, strict=True)]
            yield Test(f"{suite}:{name}", tuple(axes))


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


# --- as a plug-in of pytest ------------------------------------------------------------------------------------------


class Sample:
    """Parametrizes each test function with its cases of the sample, and orders them; `alone`: only these, and LARGE."""

    def __init__(self, source: str, cases: int, seed: int, alone: list[str] | None) -> None:
        self.alone = alone
        tests: list[Test] = []
        for suite, path in SUITES.items():
            spec = importlib.util.spec_from_file_location(f"flash_attention_{suite}", Path(source, path))
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            tests += tests_of(module, suite)
        self.sample = sampled(tests, cases, seed)
        self.order: dict[str, int] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        name = f"{_suite(metafunc.definition.nodeid)}:{metafunc.function.__name__}"
        metafunc.definition.own_markers[:] = [m for m in metafunc.definition.own_markers if m.name != "parametrize"]
        cases = [(place, test.arguments(i)) for place, (test, i) in enumerate(self.sample) if test.name == name]
        if cases and not cases[0][1]:  # without parameters
            self.order[name] = cases[0][0]
            return
        names = list(cases[0][1]) if cases else ["unused"]
        ids = [",".join(f"{key}={value}" for key, value in given.items()) for _, given in cases]
        metafunc.fixturenames += [] if cases else names  # a function of which the sample has no case is skipped
        metafunc.parametrize(",".join(names) + ",", [tuple(given.values()) for _, given in cases], ids=ids)
        self.order |= {f"{name}[{title}]": place for (place, _), title in zip(cases, ids, strict=True)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.order.get(f"{_suite(item.nodeid)}:{item.name}", -1))
        large = {item for item in items if item.name.startswith(LARGE)}
        items[:] = [
            i for i in items if (i not in large if self.alone is None else i in large or i.nodeid in self.alone)
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        if report.failed and ("CUDA error" in report.longreprtext or "device-side assert" in report.longreprtext):
            print(f"{item.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)
            os._exit(1)  # the process can run no other case, and xdist starts another one
        return report  # type: ignore[return-value]


def _suite(nodeid: str) -> str:
    return next(suite for suite, path in SUITES.items() if path in nodeid)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Sample(**json.loads(os.environ[SAMPLE])), SAMPLE)


# --- the command -----------------------------------------------------------------------------------------------------


def run(given: argparse.Namespace, results: Path, package: Path) -> dict[str, Any]:
    """Run the sample, then the cases that ran out of memory, alone. Raises Failed if nothing could be run."""
    if missing := [path for path in FILES if not (given.source / path).is_file()]:
        raise chip_suite.Failed(f"{given.source} has no {', '.join(missing)}")
    texts = PACKAGE | {place: (given.source / path).read_text() for path, place in BESIDE.items()}
    for path, text in texts.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    environment = chip_suite.environment_of(None)
    identity = chip_suite.machine_of(environment)
    sample = {"source": str(given.source), "cases": given.cases, "seed": given.seed, "alone": None}
    contents = b"".join((given.source / path).read_bytes() for path in FILES)
    digest = hashlib.sha256(contents + json.dumps([given.cases, given.seed]).encode()).hexdigest()[:16]
    environment["PYTHONPATH"] = os.pathsep.join([str(package), environment["PYTHONPATH"]])
    environment = {"OMP_NUM_THREADS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | environment
    (package / "pytest.ini").write_text("[pytest]\n")
    words = [
        "-p", "flash_attn_suite", "-p", "no:cacheprovider", "-c", str(package / "pytest.ini"), "--rootdir",
        str(given.source), "--import-mode=importlib", "--timeout", str(given.time_limit),
        "-o", "timeout_method=thread", "--max-worker-restart", str(given.cases), "-k", given.only,
        *(str(given.source / path) for path in SUITES.values()),
    ]  # fmt: skip
    begun, identity = time.monotonic(), identity | {"source": digest}
    for jobs in (given.processes, 1):
        environment[SAMPLE] = json.dumps(sample)
        left = given.seconds and max(begun + given.seconds - time.monotonic(), 1.0)
        try:
            found = chip_suite.run_pytest(
                results, identity, ["-n", str(jobs), *words], environment, left, lock_name=f".{results.name}.lock"
            )
        except chip_suite.Failed:
            if sample["alone"] is None:
                raise
            break  # no case is to run alone
        sample["alone"] = [one["test"] for one in found["failures"] if _MEMORY in one["why"]]
    return report(given, results)


def report(given: argparse.Namespace, results: Path) -> dict[str, Any]:
    by_test: dict[str, Counter[str]] = defaultdict(Counter)
    groups: dict[str, list[str]] = defaultdict(list)
    skips: Counter[str] = Counter()
    _, ended, _ = chip_suite.read(results)
    ended = {name: one for name, one in ended.items() if given.only in name}
    for name, one in ended.items():
        test = f"{_suite(name)}:{name.partition('::')[2].partition('[')[0]}"
        by_test[test].update({one["outcome"]: 1, "seconds": one["seconds"]})
        if one["outcome"] == "failed":
            groups[f"{test}: {reason(one['why'])}"].append(name)
        elif one["outcome"] == "skipped":
            skips[one["why"].removeprefix("Skipped: ")] += 1
    counts = Counter(one["outcome"] for one in ended.values())
    ran = counts["passed"] + counts["failed"]
    return {
        "seed": given.seed, "cases": given.cases, "counts": dict(counts), "ran": ran,
        "passed_of_those_that_ran": counts["passed"] / ran if ran else None,
        "tests": {name: dict(row) | {"seconds": round(row["seconds"])} for name, row in sorted(by_test.items())},
        "failures": [
            {"reason": why, "cases": names, "first": ended[names[0]]}
            for why, names in sorted(groups.items(), key=lambda item: -len(item[1]))
        ],
        "skips": dict(skips),
    }  # fmt: skip


def reason(why: str) -> str:
    """Return a failure's common text: the error's first line without its numbers, or the last line."""
    lines = why.strip().splitlines() or [""]
    error = next((line.removeprefix("E").strip() for line in lines if line.startswith("E  ")), lines[-1])
    return _NUMBER.sub("#", error)[:300]


def show(found: Mapping[str, Any]) -> None:
    print(f"\n{'test':45} passed failed skipped seconds")
    for name, row in found["tests"].items():
        numbers = [row.get(word, 0) for word in ("passed", "failed", "skipped", "seconds")]
        print(f"{name:45} " + " ".join(f"{n:{w}}" for n, w in zip(numbers, (6, 6, 7, 7), strict=True)))
    for group in found["failures"]:
        print(f"\n{len(group['cases'])} failed: {group['reason']}\n  {group['cases'][0]}")
    share = "" if found["ran"] == 0 else f", {found['passed_of_those_that_ran']:.2%} of them passed"
    print(f"\n{found['ran']} ran{share}; {found['counts'].get('skipped', 0)} skipped")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=lambda text: Path(text).resolve(), required=True, help="flash-attention")
    parser.add_argument("--cases", type=int, default=2000, help="size of the sample (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 4) * 3 // 4))
    parser.add_argument("--time-limit", type=float, default=180.0, help="seconds that a case may take (180)")
    parser.add_argument("--seconds", type=float, default=0.0, help="start no case after this many")
    parser.add_argument("--only", default="", help="cases of the sample whose name holds this text")
    parser.add_argument("--log", type=Path, help="a line for each result; what passed is not run again")
    parser.add_argument("--json", type=Path, help="write the report here")
    given = parser.parse_args(words)
    if given.cases < 1 or given.processes < 1:
        parser.error("--cases and --processes must be at least 1")
    package = Path(tempfile.mkdtemp(prefix="flash-attn-suite-"))
    try:
        found = run(given, given.log or package / "results.jsonl", package)
    except (chip_suite.Failed, PortattnError, OSError) as error:
        print(f"flash_attn_suite: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(package)
    show(found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return status(found)


def status(found: Mapping[str, Any]) -> int:
    if not found["ran"]:
        return 2
    return 0 if found["passed_of_those_that_ran"] >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
