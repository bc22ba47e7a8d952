"""Two tiers of tests by measured time. tests/slow.txt lists the slow tier; all other tests are the fast one.

    python -m pytest -n 2 --durations-to=times.jsonl     # the whole suite, on an idle machine
    python tests/tiers.py times.jsonl                    # writes tests/slow.txt

The slow tests are the slowest of all, SHARE of their number. A test's time includes its part of a fixture of its module
or class that takes LIMIT seconds. Of each mutant in scripts/mutants_by_hand.toml one test stays fast, the quickest."""

import collections
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
LIST = HERE / "slow.txt"
MUTANTS = HERE.parent / "scripts" / "mutants_by_hand.toml"
LIMIT = 1.0
SHARE = 0.049
SHARED = "fixtures shared by tests"


def slow_tests() -> frozenset[str]:
    """Return the entries of tests/slow.txt: files, functions and cases."""
    return frozenset(line for line in LIST.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))


def is_slow(name: str, listed: frozenset[str]) -> bool:
    return not listed.isdisjoint(_levels(name))


def _levels(name: str) -> tuple[str, str, str]:
    """Return the file, the function and the case of a node id."""
    return name.partition("::")[0], name.partition("[")[0], name


def note_shared_fixtures(item: pytest.Item) -> None:
    """Let a test function's reports tell which fixtures of a module or class it uses, with their parameters."""
    if not isinstance(item, pytest.Function):
        return
    scopes = {name: defs[-1].scope for name, defs in item._fixtureinfo.name2fixturedefs.items() if defs}
    places = getattr(getattr(item, "callspec", None), "indices", {})
    names = sorted(name for name, scope in scopes.items() if scope in ("module", "class"))
    if names:
        key = [item.nodeid.partition("::")[0], *(f"{name}[{places.get(name, 0)}]" for name in names)]
        item.user_properties.append((SHARED, " ".join(key)))


class Recorder:
    """A plug-in that writes each test's seconds of set-up, call and teardown as a line of JSON."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        shared = dict(report.user_properties).get(SHARED, "")
        line = {"test": report.nodeid, "when": report.when, "seconds": round(report.duration, 4), "shared": shared}
        self.file.write(json.dumps(line) + "\n")

    def pytest_unconfigure(self) -> None:
        self.file.close()


def seconds_of(lines: Iterable[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Return seconds by test and by shared fixtures, whose longest set-up is no test's, and the fixtures by test."""
    tests: dict[str, float] = collections.defaultdict(float)
    fixtures: dict[str, float] = collections.defaultdict(float)
    shared = {}
    for line in lines:
        name, key = line["test"], line["shared"]
        shared[name] = key
        if line["when"] == "setup" and key and line["seconds"] >= LIMIT:
            fixtures[key] += line["seconds"]
        else:
            tests[name] += line["seconds"]
    return tests, fixtures, shared


def slow_by(
    tests: dict[str, float], fixtures: dict[str, float], shared: dict[str, str], mutants: Iterable[list[str]],
    share: float = SHARE,
) -> set[str]:  # fmt: skip
    """Return the slow tests by their measured times; `mutants` has the tests that detect each mutant."""
    users = collections.Counter(shared.values())
    times = {name: own + fixtures.get(shared[name], 0.0) / users[shared[name]] for name, own in tests.items()}
    order = sorted(times, key=times.__getitem__, reverse=True)
    cases = []
    for detecting in mutants:
        found = ([name for name in tests if test in _levels(name)] for test in detecting)
        cases.append([names for names in found if names])
        if not cases[-1]:
            raise SystemExit(f"no measured test detects the mutant of {', '.join(detecting)}")

    def cost(names: list[str]) -> float:
        return sum(tests[name] + fixtures.get(shared[name], 0.0) for name in names)

    kept: set[str] = set()
    while True:
        slow = set([name for name in order if name not in kept][: int(share * len(order))])
        lacking = [groups for groups in cases if not any(slow.isdisjoint(names) for names in groups)]
        if not lacking:
            return slow
        for groups in lacking:
            kept |= set(min(groups, key=cost))


def lines_of(slow: set[str], tests: Iterable[str]) -> Iterator[str]:
    """Yield the shortest list: a file or function whose tests are all slow is one line."""
    fast = {level for name in tests if name not in slow for level in _levels(name)}
    yield from sorted({next(level for level in _levels(name) if level not in fast) for name in slow})


def main(times: str) -> None:
    with open(times, encoding="utf-8") as file:
        tests, fixtures, shared = seconds_of(map(json.loads, file))
    lacking = {f"tests/{path.relative_to(HERE)}" for path in HERE.rglob("test_*.py")} - {
        _levels(name)[0] for name in tests
    }
    lacking = {name for name in lacking if not name.startswith(("tests/engines/", "tests/plugins/"))}
    if lacking:
        raise SystemExit(
            f"{times} lacks whole files, so that it is no run of the suite: {', '.join(sorted(lacking)[:5])}"
        )
    mutants = tomllib.loads(MUTANTS.read_text(encoding="utf-8"))["mutant"]
    slow = slow_by(tests, fixtures, shared, [mutant["tests"] for mutant in mutants])
    head = "# Written by tests/tiers.py from measured times.\n"
    LIST.write_text(head + "".join(f"{line}\n" for line in lines_of(slow, tests)), encoding="utf-8")
    for tier, names in (("fast", tests.keys() - slow), ("slow", slow)):
        seconds = sum(tests[name] for name in names) + sum(
            fixtures[key] for key in {shared[n] for n in names} & fixtures.keys()
        )
        print(f"{tier}: {len(names)} tests, {100 * len(names) / len(tests):.1f} %, {seconds:.0f} s on one core")


if __name__ == "__main__":
    main(*sys.argv[1:])
