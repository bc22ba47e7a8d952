"""`portattn doctor`: the report always prints."""

import json
import os
import re
import resource
import subprocess
import sys
from unittest.mock import Mock

import pytest

from portattn.cli import doctor
from portattn.planning.registry import Registry
from portattn.testing.canary import CASES
from portattn.worker.client import Reply


@pytest.fixture
def quick_calls(monkeypatch):
    check = doctor.Check(name="planted call", outcome="PASS", detail="right")
    monkeypatch.setattr(doctor, "device_checks", lambda seconds: [check])
    monkeypatch.setattr(doctor, "interpreter_check", lambda seconds: [])
    return check


@pytest.mark.usefixtures("quick_calls")
def test_the_report_has_every_part(portattn, tmp_path):
    called = portattn("doctor", exits=0)
    for part in ("versions", "toolchain", "backends", "settings", "cache", "quirks that apply here", "planted call"):
        assert part in called.out
    assert str(tmp_path) in called.out  # the cache folder, with the variable that names it
    assert "from PORTATTN_CACHE_DIR" in called.out
    report = portattn("doctor", "--json").json
    assert {item["name"] for s in report["sections"] if s["title"] == "backends" for item in s["items"]} == set(
        Registry.load().backends
    )
    (taken,) = (s["items"] for s in report["sections"] if s["title"] == "paths taken here")
    for item in taken:  # a path is of one problem, which is named
        planned = next(text for text in item["value"].splitlines() if text.startswith("planned for "))
        assert planned in called.out
        assert planned.split()[2] == item["name"].split()[1], item
    assert len(taken) >= len(CASES)


@pytest.mark.usefixtures("quick_calls")
@pytest.mark.parametrize("broken", ["versions", "toolchain", "backends", "settings", "cache", "quirks"])
def test_a_broken_part_hides_no_other(portattn, monkeypatch, broken):
    monkeypatch.setattr(doctor, broken, Mock(side_effect=OSError("planted")))
    called = portattn("doctor", exits=1)
    assert called.out.count("could not be found out: OSError: planted") == 1
    assert "planted call" in called.out
    assert portattn("doctor", "--json").status == 1


@pytest.mark.usefixtures("quick_calls")
def test_unknown_variables_are_said(portattn, monkeypatch):
    monkeypatch.setenv("PORTATTN_FALBACK", "error")
    monkeypatch.setenv("PORTATTN_PORT_8000_TCP", "tcp://10.0.0.1:8000")
    called = portattn("doctor", exits=0)
    assert called.out.count("PORTATTN_FALBACK (did you mean PORTATTN_FALLBACK?), PORTATTN_PORT_8000_TCP\n") == 1
    assert "PORTATTN_FALBACK" not in called.err
    command = [sys.executable, "-m", "portattn", "plan", "attention", "--q=1,2,5,16", "--kv=1,2,5,16", "--dtype=fp32"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert re.match("portattn: UserWarning: environment variables that set nothing in portattn: PORTATTN_FALBACK", line)


@pytest.mark.usefixtures("quick_calls")
def test_a_bad_value_is_said_once(portattn, monkeypatch):
    monkeypatch.setenv("PORTATTN_FALLBACK", "maybe")
    called = portattn("doctor", exits=1)
    assert called.out.count("environment variable PORTATTN_FALLBACK is 'maybe'") == 1, "said once, of all that need it"


def test_a_wrong_or_failing_call_is_red(portattn, monkeypatch):
    wrong = doctor.Check(name="planted call", outcome="FAIL", detail="wrong numbers")
    monkeypatch.setattr(doctor, "device_checks", lambda seconds: [wrong])
    monkeypatch.setattr(doctor, "interpreter_check", Mock(side_effect=RuntimeError("no interpreter")))
    called = portattn("doctor", exits=1)
    assert "FAIL planted call: wrong numbers" in called.out
    assert "FAIL interpreter: RuntimeError: no interpreter" in called.out


def test_two_owners_and_hidden_installs_are_warned_about(monkeypatch, tmp_path):
    import sys

    from portattn.schema import toolchain

    used, hidden = tmp_path / "used" / "triton", tmp_path / "hidden" / "triton"
    for folder in (used, hidden):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    named = toolchain.Toolchain(distribution="triton-ascend", version="3.2.0", path=str(used))
    monkeypatch.setattr(doctor, "installed_toolchain", lambda: named)
    monkeypatch.setattr(doctor, "owners", lambda folder: [("triton", "3.6.0"), ("triton-ascend", "3.2.0")])
    monkeypatch.setattr(sys, "path", [str(used.parent), str(hidden.parent)])
    section = doctor.toolchain()
    assert "2 distributions claim triton/" in section.warnings[0]
    assert "last written: triton-ascend==3.2.0" in section.warnings[0]
    assert section.warnings[1:] == (f"{hidden} is hidden by {used}",)


@pytest.mark.interpreter
def test_real_calls_pass_here():
    for check in (*doctor.device_checks(120), *doctor.interpreter_check(120)):
        assert check.outcome == "PASS", check
        assert 0 < check.error <= check.budget


def no_folder(path):
    path.write_text("")


def read_only(path):
    if os.geteuid() == 0:
        pytest.skip("nothing is read-only for root")
    path.mkdir(mode=0o500)


def full(path):
    path.mkdir()
    return {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))}


def kernels_own(path):
    path.symlink_to("/proc/self/fdinfo")  # a folder that takes no files, of root's neither


@pytest.mark.parametrize(
    ("broken", "as_json"), [(no_folder, False), (read_only, False), (full, True), (kernels_own, True)]
)
def test_a_cache_folder_that_takes_no_files_is_red(tmp_path, broken, as_json):
    folder = tmp_path / "cache"
    options = broken(folder) or {}
    done = subprocess.run(
        [sys.executable, "-m", "portattn", "doctor", *(["--json"] if as_json else [])],
        env={**os.environ, "PORTATTN_CACHE_DIR": str(folder)}, capture_output=True, text=True, timeout=300, **options,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("no file can be written there (") == 1
    assert "cannot be kept" not in done.stdout + done.stderr
    if as_json:
        (cache,) = [s for s in json.loads(done.stdout)["sections"] if s["title"] == "cache"]
        assert [error.endswith("set PORTATTN_CACHE_DIR to a folder that takes files") for error in cache["errors"]] == [
            True
        ]
    if broken is not full:
        assert "FAIL" not in done.stdout


@pytest.mark.usefixtures("quick_calls")
def test_a_cache_folder_that_takes_files_is_left_as_it_was(portattn, tmp_path, monkeypatch):
    monkeypatch.setenv("PORTATTN_CACHE_DIR", str(tmp_path / "new"))
    assert portattn("doctor").status == 0
    assert [path.name for path in (tmp_path / "new").iterdir() if path.name != "native"] == []


def test_one_cause_is_said_once(portattn, monkeypatch):
    def fails(*given):
        raise OSError("planted")

    monkeypatch.setattr(doctor, "quirks", fails)
    monkeypatch.setattr(doctor, "paths", fails)
    monkeypatch.setattr(doctor, "device_checks", fails)
    monkeypatch.setattr(doctor, "interpreter_check", lambda seconds: [])
    called = portattn("doctor", exits=1)
    assert called.out.count("OSError: planted") == 1
    assert called.out.count("the same as of `quirks that apply here`") == 2


def test_devices_are_called_in_a_child_that_compiles_kernels(monkeypatch):
    opened = []

    class Planted(doctor.Worker):
        def __init__(self, *args, **fields):
            super().__init__(*args, **fields)
            opened.append(self)

        def request(self, task, seconds, **fields):
            return Reply(outcome="crash", kind="SIGSEGV", message="planted")

    monkeypatch.setattr(doctor, "Worker", Planted)
    checks = doctor.device_checks(5.0)
    assert opened
    assert [(worker.runs, worker.environment) for worker in opened] == [("kernels", {"TRITON_INTERPRET": None})] * len(
        opened
    )
    assert {(check.outcome, check.detail) for check in checks} == {("FAIL", "FAIL: crash: SIGSEGV: planted")}
