"""Mutation testing: small faults are put into a copy of the tree, and tests must fail because of each.

    python scripts/mutants.py [--group kernels] [--name …]    mutants made by hand (mutants_by_hand.toml)

It exits with 1 where a mutant survived, and with 2 where nothing can be said: tests that fail without any mutant, or an
entry of the data that is stale. docs/testing.md explains the routine.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import click
import msgspec

ROOT = Path(__file__).resolve().parents[1]
BY_HAND = Path(__file__).with_name("mutants_by_hand.toml")

Outcome = Literal["killed", "timeout", "survived", "stale", "broken"]
CAUGHT = ("killed", "timeout")


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault made by hand: `old` occurs once in `file`, and becomes `new`; `tests` must then fail."""

    name: str
    group: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str | None:
        """Return the file's text with the fault in it; None if the old text does not occur exactly once."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


class Finding(msgspec.Struct, frozen=True):
    """One mutant's outcome; detail: the change, or why it counts so."""

    name: str
    outcome: Outcome
    detail: str = ""


class NothingLearnt(Exception):
    """The run says nothing about the tests: they fail without a mutant."""


def by_hand(path: Path = BY_HAND) -> tuple[Mutant, ...]:
    return msgspec.toml.decode(path.read_bytes(), type=dict[str, tuple[Mutant, ...]])["mutant"]


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """Copy all files that git tracks or would add to a temporary folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="portattn-mutants-") as folder:
        copy = Path(folder) / "tree"
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():  # and not deleted since it was added
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        yield copy


def environment(copy: Path) -> dict[str, str]:
    """Return this process's environment with the copy on PYTHONPATH, and without compiled files of mutants."""
    own = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "PORTATTN_CACHE_DIR": str(copy.parent / "cache")}
    return {**os.environ, **own}


def run_tests(copy: Path, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Return pytest's exit status (None: it timed out, and was killed with its children), and the end of its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environment(copy), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # workers that a mutant left behind, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()[-2000:]


def run_by_hand(root: Path, mutants: Sequence[Mutant], seconds: float) -> Iterator[Finding]:
    """Yield each mutant's outcome. Raises NothingLearnt if the tests fail without a mutant."""
    with copied(root) as copy:
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        status, output = run_tests(copy, tests, seconds * max(len(mutants), 1))
        if status != 0:
            raise NothingLearnt(f"without any mutant the tests do not pass:\n{output}")
        for mutant in mutants:
            file = copy / mutant.file
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            changed = mutant.applied(text)
            if changed is None:
                times = text.count(mutant.old)
                yield Finding(mutant.name, "stale", f"{mutant.file} has the old text {times} times")
                continue
            file.write_text(changed, encoding="utf-8")
            try:
                status, output = run_tests(copy, mutant.tests, seconds)
            finally:
                file.write_text(text, encoding="utf-8")
            yield Finding(mutant.name, *_ended(status, output, mutant))


def _ended(status: int | None, output: str, mutant: Mutant) -> tuple[Outcome, str]:
    if status is None:
        return "timeout", ""
    if status < 0:  # memory that is not there was read, and no test was left to say so
        return "killed", f"pytest died of {signal.Signals(-status).name}"
    if status in (0, 1):
        return ("killed", "") if status else ("survived", f"{mutant.file}: {mutant.old!r} -> {mutant.new!r}")
    return "broken", f"pytest ended with {status}, and no test failed:\n{output}"  # 1 is failing tests'


def report(findings: Sequence[Finding]) -> int:
    left = [found for found in findings if found.outcome not in CAUGHT]
    for found in left:
        print(f"{found.outcome:10} {found.name}\n           {found.detail}")
    print(", ".join(f"{name} {count}" for name, count in Counter(found.outcome for found in findings).items()))
    if any(found.outcome in ("stale", "broken") for found in left):
        return 2
    return 1 if left else 0


def _finish(findings: Iterator[Finding], total: int) -> None:
    done: list[Finding] = []
    try:
        for found in findings:
            done.append(found)
            print(f"{len(done)}/{total} {found.outcome:9} {found.name}", file=sys.stderr, flush=True)
    except NothingLearnt as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    if not done:
        print("no mutant is in the selection: nothing was tested", file=sys.stderr)
        raise SystemExit(2)
    raise SystemExit(report(done))


@click.command()
@click.option("--group", "wanted", multiple=True, help="only the mutants of this group")
@click.option("--name", "names", multiple=True, help="only the mutants of this name")
@click.option("--seconds", default=120.0, show_default=True, help="time limit for the tests of one mutant")
def cli(wanted: tuple[str, ...], names: tuple[str, ...], seconds: float) -> None:
    """Run the mutants that were made by hand."""
    known = by_hand()
    for option, asked, there in (
        ("--group", wanted, {m.group for m in known}), ("--name", names, {m.name for m in known}),
    ):  # fmt: skip
        for name in set(asked) - there:
            raise click.BadParameter(f"{name!r} is none of {', '.join(sorted(there))}", param_hint=option)
    chosen = [m for m in known if (not wanted or m.group in wanted) and (not names or m.name in names)]
    _finish(run_by_hand(ROOT, chosen, seconds), len(chosen))


if __name__ == "__main__":
    cli()
