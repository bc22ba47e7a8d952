"""Run the suite on a machine's GPUs, all of them at a time, in as many runs as it takes, under any release of Triton.

    python scripts/chip_suite.py --out .chip                                       # tests that run on the device
    python scripts/chip_suite.py --out .chip --triton /tmp/triton-3.8.0            # the same by another Triton
    python scripts/chip_suite.py --out .chip --seconds 560                         # stop then; run again for the rest
    python scripts/chip_suite.py --out .chip --report                              # what ran so far, and nothing more

Each test adds a line to `.chip/<chip>-<toolchain>.jsonl` when it ends. A run leaves out what passed or was skipped in
the files that lie there already, so that an interrupted one goes on; what failed is run again. Files of other source
code are refused: `--out` another folder, or `--again` to start over.

`--triton` is a folder that holds `triton/` (scripts/pack_triton.py makes an archive of one). Tests that run on the
device come first; `--all` runs the others after them. Words after `--` are pytest's: `-- tests/kernels -k paged`.

Exit status: 0 all that were asked for passed or were skipped, 1 a test failed, 2 nothing could be run, 3 time ran out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import chip_suite_plugin

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("portattn", "backends", "quirks", "tests")
# What a test process takes of a GPU is a context and small tensors: less than 1 GB. Compiling keeps a core busy.
PROCESSES_A_GPU = 16
TEST_SECONDS = 300  # the longest that one test may take
MACHINE = """
import json, torch
from portattn.api.dispatch import detect_target
from portattn.schema.toolchain import installed
if not torch.cuda.is_available():
    raise SystemExit("torch sees no accelerator")
target, why = detect_target("cuda", 0)
print(json.dumps({
    "chip": target.arch.name if target else "", "why": why, "toolchain": str(installed()), "torch": torch.__version__,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
}))
"""


class Failed(Exception):
    """What went wrong, for people."""


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    own, _, of_pytest = _cut(words)
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], usage="chip_suite.py --out FOLDER [options] [-- PYTEST ARGS]"
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for results, made where it is not there")
    parser.add_argument("--triton", type=Path, help="a folder with another triton/ than the installed one")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so many; 0: when all have run")
    parser.add_argument(
        "--jobs", type=int, default=0, help=f"test processes; {PROCESSES_A_GPU} a GPU at most, one a core"
    )
    parser.add_argument("--all", action="store_true", help="also the tests that use no device, after the others")
    parser.add_argument("--again", action="store_true", help="forget what ran under this Triton")
    parser.add_argument("--report", action="store_true", help="only say what ran")
    parser.add_argument("--json", action="store_true", help="the summary as JSON")
    given = parser.parse_args(own)
    try:
        if given.seconds < 0 or given.jobs < 0:
            raise Failed(f"--seconds {given.seconds:g} --jobs {given.jobs}: neither may be below 0")
        given.out.mkdir(parents=True, exist_ok=True)
        ended, files = (True, sorted(given.out.glob("*.jsonl"))) if given.report else run(given, of_pytest)
        found = [summary(results) for results in files]
    except (Failed, OSError) as failed:
        print(f"chip_suite: {failed}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("chip_suite: interrupted; what has ended is kept, and the same command runs the rest", file=sys.stderr)
        return 130
    print(json.dumps(found, indent=2) if given.json else as_text(found))
    if any(one["failed"] for one in found):
        return 1
    return 0 if ended else 3


def _cut(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at : at + 1], words[at + 1 :]


def run(given: argparse.Namespace, of_pytest: list[str]) -> tuple[bool, list[Path]]:
    """Run what has not passed yet: whether it came to its end, and the file of results. Raises Failed."""
    environment = environment_of(given.triton)
    machine = machine_of(environment)
    results = given.out / f"{machine['chip'] or 'chip'}-{machine['toolchain']}.jsonl"
    if given.again:
        results.unlink(missing_ok=True)
    done = begun(results, machine | {"source": source_digest()})
    jobs = given.jobs or min(PROCESSES_A_GPU * len(machine["gpus"]), os.cpu_count() or 1)
    environment[chip_suite_plugin.GPUS] = ",".join(str(i) for i in range(len(machine["gpus"])))
    with tempfile.TemporaryDirectory(prefix="chip-suite-") as folder:
        list_of_done = Path(folder) / "done"
        list_of_done.write_text("\n".join(sorted(done)), encoding="utf-8")
        command = [
            sys.executable, "-m", "pytest", "-p", "chip_suite_plugin", "-n", str(jobs), "-q",
            "--chip-results", str(results.resolve()), "--chip-done", str(list_of_done),
            *([] if given.all else ["--chip-only"]), "--timeout", str(TEST_SECONDS), *of_pytest,
        ]  # fmt: skip
        said = f"{len(machine['gpus'])} × {machine['gpus'][0]}, {machine['toolchain']}, torch {machine['torch']}"
        print(f"chip_suite: {said}: {jobs} processes, {len(done)} tests already passed", file=sys.stderr)
        status = until(command, environment, given.seconds)
    # pytest's own: 0 passed, 1 failed, 5 none were left.
    if status is not None and status not in (0, 1, 5):
        raise Failed(f"pytest ended with {status}: what it printed is above")
    return status is not None, [results]


def environment_of(triton: Path | None) -> dict[str, str]:
    """Of the test processes: this checkout's packages, and another Triton before the installed one."""
    if triton is not None and not (triton / "triton" / "__init__.py").is_file():
        raise Failed(f"--triton {triton}: no folder triton/ with a package lies in it")
    first = [str(triton.resolve())] if triton else []
    places = [*first, str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(place for place in places if place), "PYTHONUNBUFFERED": "1"}


def machine_of(environment: dict[str, str]) -> dict[str, Any]:
    """Chip, GPUs, torch and toolchain, as the test processes will see them."""
    asked = subprocess.run(
        [sys.executable, "-c", MACHINE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if asked.returncode:
        raise Failed(asked.stderr.strip()[-2000:])
    found: dict[str, Any] = json.loads(asked.stdout)
    return found


def source_digest() -> str:
    """Of all that decides what a test finds, apart from what is installed."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in KINDS):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


KINDS = (".py", ".c", ".toml", ".json", ".mlir")


def begun(results: Path, identity: dict[str, Any]) -> set[str]:
    """The tests of an earlier run that need no other one; a new file is begun where there is none. Raises Failed."""
    if not results.exists():
        results.write_text(json.dumps({"identity": identity}) + "\n", encoding="utf-8")
        return set()
    before, tests = read(results)
    whole = results.read_bytes()
    os.truncate(results, whole.rfind(b"\n") + 1)  # the next line must not follow half a one
    differing = [name for name in ("source", "torch", "chip") if before.get(name) != identity[name]]
    if differing:
        said = ", ".join(f"{name} {before.get(name)}, now {identity[name]}" for name in differing)
        raise Failed(f"{results} is of another state ({said}): --out another folder, or --again")
    return {name for name, test in tests.items() if test["outcome"] != "failed"}


def read(results: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Identity, and the last line of each test. A last line that a kill cut short is left out."""
    lines = results.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        del lines[-1]
    try:
        found = [json.loads(line) for line in lines]
        identity = found[0]["identity"]
        return identity, {one["test"]: one for one in found[1:]}
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Failed(f"{results} cannot be read ({error!r}): --again starts over") from None


def until(command: list[str], environment: dict[str, str], seconds: float) -> int | None:
    """The command's exit status; None where its time ran out, and it was ended with all its children."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sys.stderr, start_new_session=True)
    try:
        return process.wait(seconds or None)
    except subprocess.TimeoutExpired:
        print(f"chip_suite: {seconds:g} seconds are over", file=sys.stderr)
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for end in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, end)
        except ProcessLookupError:
            return
        before = time.monotonic()
        while process.poll() is None and time.monotonic() - before < 5:
            time.sleep(0.05)


def summary(results: Path) -> dict[str, Any]:
    """Of a file of results: identity, how many tests passed, failed and were skipped, seconds, what failed and why."""
    identity, tests = read(results)
    of = {outcome: [one for one in tests.values() if one["outcome"] == outcome] for outcome in OUTCOMES}
    return (
        identity
        | {outcome: len(ones) for outcome, ones in of.items()}
        | {"file": str(results), "seconds": round(sum(one["seconds"] for one in tests.values()))}
        | {"failures": [{"test": one["test"], "why": one["why"]} for one in of["failed"]]}
    )


OUTCOMES = ("passed", "failed", "skipped")


def as_text(found: list[dict[str, Any]]) -> str:
    lines = []
    for one in found:
        lines.append(
            f"{one['chip']} {one['toolchain']}, torch {one['torch']}, {len(one['gpus'])} × {one['gpus'][0]}: "
            f"{one['passed']} passed, {one['failed']} failed, {one['skipped']} skipped ({one['file']})"
        )
        lines += [f"  FAILED {bad['test']}: {(bad['why'].strip().splitlines() or [''])[-1]}" for bad in one["failures"]]
    return "\n".join(lines) or "nothing has run"


if __name__ == "__main__":
    sys.exit(main())
