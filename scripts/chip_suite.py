"""Run the suite on a machine's GPUs, all of them at a time, in as many runs as it takes, under any release of Triton.

    python scripts/chip_suite.py --out .chip                                       # tests that run on the device
    python scripts/chip_suite.py --out .chip --triton /tmp/triton-3.8.0            # the same by another Triton
    python scripts/chip_suite.py --out .chip --seconds 560                         # stop then; run again for the rest

Each test adds a line to `.chip/<chip>-<toolchain>.jsonl`. A run leaves out what has passed by the file that lies there,
and runs what failed or was skipped after the rest. A file of other source code, torch, Triton or GPUs is refused.

`--triton` is a folder that holds `triton/` (scripts/pack_triton.py). `--all` runs tests without a device after the
others. Words after `--` are pytest's: `-- tests/kernels -k paged`.

Exit status: 0 all that were asked for have passed or were skipped; 1 a test failed, or a file could not be collected;
2 nothing could be run; 3 time ran out, or pytest ended early: the same command runs the rest, also where tests failed;
130 interrupted.
"""

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

import chip_suite_plugin as plugin
import msgspec

from portattn.errors import PortattnError
from portattn.tools.run_log import RunLog

ROOT = Path(__file__).resolve().parent.parent
# What a test process takes of a GPU is a context and small tensors: less than 1 GB. Compiling keeps a core busy.
PROCESSES_A_GPU = 16
TEST_SECONDS = 300  # the longest that one test may take
MACHINE_SECONDS = 300  # the longest that importing torch and Triton may take
SAME = ("source", "torch", "chip", "build", "gpus")
OUTCOMES = ("passed", "failed", "skipped")
MACHINE = """
import hashlib, importlib.util, json, pathlib, torch
from portattn.api.dispatch import detect_target
from portattn.schema.toolchain import installed_toolchain
if not torch.cuda.is_available():
    raise SystemExit("torch sees no accelerator")
target, why = detect_target("cuda", 0)
digest = hashlib.sha256()
for path in sorted(pathlib.Path(importlib.util.find_spec("triton").origin).parent.glob("_C/libtriton*")):
    if path.is_file():  # a wheel has a folder of stubs beside it
        digest.update(path.read_bytes())
print(json.dumps({
    "chip": target.arch.name if target else "", "why": why, "torch": torch.__version__,
    "toolchain": str(installed_toolchain()),
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    "variable": "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES",
    "build": digest.hexdigest()[:16],
}))
"""


class Failed(Exception):
    """The command failed; the text is for people."""


class Identity(msgspec.Struct):
    """The part of a file's identity that a summary needs."""

    chip: str
    toolchain: str
    torch: str
    gpus: list[str]


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], usage="chip_suite.py --out FOLDER [options] [-- PYTEST ARGS]"
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for results, made where it is not there")
    parser.add_argument("--triton", type=Path, help="a folder with another triton/ than the installed one")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so many; 0: when all have run")
    parser.add_argument("--jobs", type=int, default=0, help=f"test processes; {PROCESSES_A_GPU} a GPU, one a core")
    parser.add_argument("--all", action="store_true", help="also the tests that use no device, after the others")
    parser.add_argument("--json", action="store_true", help="the summary as JSON")
    given = parser.parse_args(words[:at])
    before = {one: signal.signal(one, signal.default_int_handler) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:  # these signals end all processes, as Ctrl-C does
        found = run(given, words[at + 1 :])
    except (Failed, PortattnError, OSError) as failed:
        print(f"chip_suite: {failed}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("chip_suite: interrupted; what has ended is kept, and the same command runs the rest", file=sys.stderr)
        return 130
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    print(json.dumps(found, indent=2) if given.json else as_text(found))
    if not found["complete"]:
        return 3
    return 1 if found["failed"] or found["collection"] else 0


def run(given: argparse.Namespace, of_pytest: list[str]) -> dict[str, Any]:
    """Run the tests that have not passed yet; return the file's summary. Raises Failed if nothing could be run."""
    if given.seconds < 0 or given.jobs < 0:
        raise Failed(f"--seconds {given.seconds:g} --jobs {given.jobs}: neither may be below 0")
    environment = environment_of(given.triton)
    machine = machine_of(environment)
    jobs = given.jobs or min(PROCESSES_A_GPU * len(machine["gpus"]), os.cpu_count() or 1)
    results = given.out / f"{machine['chip'] or 'chip'}-{machine['toolchain']}.jsonl"
    words = [*([] if given.all else ["--chip-only"]), "-n", str(jobs), "--timeout", str(TEST_SECONDS), *of_pytest]
    return run_pytest(results, machine | {"source": source_digest(given.out)}, words, environment, given.seconds)


def run_pytest(
    results: Path, identity: dict[str, Any], words: list[str], environment: dict[str, str], seconds: float,
    lock_name: str = ".lock",
) -> dict[str, Any]:  # fmt: skip
    """Run the tests that have not passed by a file of results; return its summary, with `complete`: all have run.

    identity: of the machine and the tests. Raises Failed if there was nothing to run, or it could not be run."""
    gpus = visible(environment.get(identity["variable"]), len(identity["gpus"]))
    environment |= {plugin.GPUS: ",".join(gpus), plugin.VARIABLE: identity["variable"]}
    lock = RunLog(results, results.with_name(lock_name), op="chip_suite", option="--out", shown=results.parent)
    with lock, tempfile.TemporaryDirectory(prefix="chip-suite-") as folder:
        before = begun(results, identity)
        names = Path(folder) / "before.json"
        names.write_text(json.dumps(before), encoding="utf-8")
        command = [
            sys.executable, "-m", "pytest", "-p", "chip_suite_plugin", "-q", "--chip-results", str(results.resolve()),
            "--chip-before", str(names), *words,
        ]  # fmt: skip
        said = f"{len(gpus)} × {identity['gpus'][0]}, {identity['toolchain']}, torch {identity['torch']}"
        print(f"chip_suite: {said}: {len(before['passed'])} tests have passed", file=sys.stderr)
        begin = results.stat().st_size
        status = until(command, environment, seconds)
    told = [line["selected"] for line in decoded(results.read_bytes()[begin:])[0] if "selected" in line]
    found = summary(results, begin)
    if status is not None and not found["ran"] and not found["collection"]:
        if not told:
            raise Failed(f"pytest ended with {status}, and no process has collected a test: what it printed is above")
        if not told[0]["asked"]:
            raise Failed("no test is selected: see the words after --, or --all")
    left = max((one["left"] for one in told), default=None)
    complete = status is not None and left is not None and found["ran"] >= left
    return found | {"complete": complete, "pytest": status}


def environment_of(triton: Path | None) -> dict[str, str]:
    """Return the test processes' environment: this checkout's packages, and another Triton before the installed one."""
    if triton is not None and not (triton / "triton" / "__init__.py").is_file():
        raise Failed(f"--triton {triton}: no folder triton/ with a package lies in it")
    first = [str(triton.resolve())] if triton else []
    places = [*first, str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    # Of a run of pytest that this one is inside of, or that the user has chosen for others.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CHIP_SUITE_"))}
    return kept | {"PYTHONPATH": os.pathsep.join(place for place in places if place), "PYTHONUNBUFFERED": "1"}


def machine_of(environment: dict[str, str]) -> dict[str, Any]:
    try:
        asked = subprocess.run(
            [sys.executable, "-c", MACHINE], cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
            timeout=MACHINE_SECONDS,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise Failed(error.stderr.strip()[-2000:] or str(error)) from None
    except subprocess.TimeoutExpired:
        raise Failed(f"torch and Triton were not imported within {MACHINE_SECONDS} seconds") from None
    if not asked.stdout.strip():
        raise Failed(asked.stderr.strip()[-2000:] or "a process that imports torch and Triton printed nothing")
    found: dict[str, Any] = json.loads(asked.stdout.strip().splitlines()[-1])
    return found


def visible(variable: str | None, count: int) -> list[str]:
    """Return names of the visible devices: the variable's own, or their numbers if it is not set."""
    named = [name.strip() for name in (variable or "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def source_digest(out: Path) -> str:
    """Digest the checkout's files, without hidden ones, compiled Python, and results in it."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(
            name for name in folders
            if not name.startswith(".") and name != "__pycache__" and not name.endswith(".egg-info")
            and Path(folder, name).resolve() != out.resolve()
        )  # fmt: skip
        for path in (Path(folder, name) for name in sorted(files) if not name.startswith(".")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def begun(results: Path, identity: dict[str, Any]) -> dict[str, list[str]]:
    """Return an earlier run's tests, by whether they need another run; begin a new file without one."""
    if not results.exists():
        part = results.with_suffix(".jsonl.part")
        part.write_text(json.dumps({"identity": identity}) + "\n", encoding="utf-8")
        part.replace(results)
    before, tests, _ = read(results)
    if differing := [name for name in SAME if before.get(name) != identity[name]]:
        said = ", ".join(f"{name} {before.get(name)}, now {identity[name]}" for name in differing)
        raise Failed(f"{results} is of another state ({said}): name another place")
    whole = results.read_bytes()
    os.truncate(results, whole.rfind(b"\n") + 1)  # the next line must not follow half a one
    passed = sorted(name for name, test in tests.items() if test["outcome"] == "passed")
    return {"passed": passed, "others": sorted(tests.keys() - passed)}


def decoded(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a file's lines, and the number of damaged lines; an unfinished last line is neither."""
    found, damaged = [], 0
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            found.append(msgspec.json.decode(line, type=dict[str, Any]))
        except (msgspec.DecodeError, UnicodeDecodeError):
            damaged += 1
    return found, damaged


def read(results: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]], int]:
    """Return identity, the last line of each test, and the number of damaged lines. Failed without identity."""
    lines, damaged = decoded(results.read_bytes())
    try:
        identity: dict[str, Any] = lines[0]["identity"]
        msgspec.convert(identity, Identity)
    except (IndexError, KeyError, msgspec.ValidationError):
        raise Failed(f"{results} does not begin as results of chip_suite do: name another place") from None
    tests = {}
    for line in lines[1:]:
        if isinstance(line.get("test"), str) and line.get("outcome") in OUTCOMES:
            tests[line["test"]] = line
        elif "collection" not in line and "selected" not in line:
            damaged += 1
    return identity, tests, damaged


def until(command: list[str], environment: dict[str, str], seconds: float) -> int | None:
    """Return the command's exit status, or None after a timeout; its process group has then ended."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sys.stderr, start_new_session=True)
    try:
        return process.wait(seconds or None)
    except subprocess.TimeoutExpired:
        print(f"chip_suite: {seconds:g} seconds are over", file=sys.stderr)
        return None
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave processes
        _end(process)
        signal.signal(signal.SIGINT, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    for end in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, end)
        except ProcessLookupError:
            return
        before = time.monotonic()
        while process.poll() is None and time.monotonic() - before < 5:
            time.sleep(0.05)


def summary(results: Path, begin: int = 0) -> dict[str, Any]:
    """Return the summary of a file of results: identity, counts by outcome, and the failures with reasons.

    ran, failures, collection: tests, failed tests and uncollected files of the lines from byte `begin` on"""
    identity, tests, damaged = read(results)
    lines, _ = decoded(results.read_bytes()[begin:])
    lately = {line["test"]: line for line in lines if line.get("outcome") in OUTCOMES}
    failed = [one for one in lately.values() if one["outcome"] == "failed"]
    return (
        identity
        | {outcome: sum(one["outcome"] == outcome for one in tests.values()) for outcome in OUTCOMES}
        | {"file": str(results), "damaged": damaged, "ran": len(lately), "failed": len(failed)}
        | {"seconds": round(sum(one.get("seconds", 0.0) for one in tests.values()))}
        | {"failures": [{"test": one["test"], "why": str(one.get("why", ""))} for one in failed]}
        | {"collection": [{"file": one["collection"], "why": one["why"]} for one in lines if "collection" in one]}
    )


def as_text(found: dict[str, Any]) -> str:
    damaged = f", {found['damaged']} damaged lines" if found["damaged"] else ""
    lines = [
        f"{found['chip']} {found['toolchain']}, torch {found['torch']}, {len(found['gpus'])} × {found['gpus'][0]}: "
        f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped{damaged} ({found['file']})"
    ]
    lines += [f"  NOT COLLECTED {bad['file']}: {_last(bad['why'])}" for bad in found["collection"]]
    lines += [f"  FAILED {bad['test']}: {_last(bad['why'])}" for bad in found["failures"]]
    if not found["complete"]:
        lines.append("  not all have run: the same command runs the rest")
    return "\n".join(lines)


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


if __name__ == "__main__":
    sys.exit(main())
