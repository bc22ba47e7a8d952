"""scripts/chip_suite.py: what it runs on a chip, on which GPU, and that an interrupted run goes on where it ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
MACHINE = {
    "chip": "sm_90", "why": "", "toolchain": "triton==3.8.0", "torch": "2.11.0", "gpus": ["NVIDIA H100", "NVIDIA H100"]
}  # fmt: skip
TESTS = """
    import os
    from pathlib import Path
    import pytest

    @pytest.fixture
    def device():
        return "cuda"

    def test_without_a_device():
        Path("ran").open("a").write("without ")

    def test_on_the_device(device):
        Path("ran").open("a").write("on ")
        Path("gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))

    def test_that_fails(device):
        Path("ran").open("a").write("fails ")
        assert Path("mended").exists(), "not yet"

    @pytest.mark.gpu
    def test_that_is_skipped():
        pytest.skip("no such chip")
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester) -> ModuleType:
    """The script over a suite of four tests, on a machine with two H100s by its own word."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of the run that this test is in
    import chip_suite

    pytester.makepyfile(test_some=TESTS)
    pytester.makeini("[pytest]\nmarkers =\n    gpu: on a device\n")
    monkeypatch.setattr(chip_suite, "ROOT", pytester.path)
    monkeypatch.setattr(chip_suite, "machine_of", lambda environment: dict(MACHINE))
    monkeypatch.setattr(chip_suite, "source_digest", lambda: "a1")
    return chip_suite


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_what_failed_is_run_again_and_what_passed_is_not(
    script: ModuleType, pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--out", "out", "--jobs", "1", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)[0]
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["failures"][0]["test"] == "test_some.py::test_that_fails"
    assert "not yet" in found["failures"][0]["why"]
    assert (pytester.path / "ran").read_text() == "on fails "
    assert (pytester.path / "gpu").read_text() == "0,1"
    (pytester.path / "mended").touch()
    (pytester.path / "ran").unlink()
    assert script.main(["--out", "out", "--jobs", "1", "--all"]) == 0
    assert (pytester.path / "ran").read_text() == "fails without "
    assert "3 passed, 0 failed, 1 skipped" in capfd.readouterr().out
    assert script.main(["--out", "out", "--jobs", "1"]) == 0  # none is left, and pytest's status of that is 5
    assert script.main(["--out", "out", "--report"]) == 0


def test_when_time_is_over_all_processes_end(script: ModuleType, pytester: pytest.Pytester) -> None:
    child = "import pathlib, time; pathlib.Path('begun').touch(); time.sleep(2); pathlib.Path('late').touch()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert script.until([sys.executable, "-c", parent], dict(os.environ), 1.0) is None
    time.sleep(2.5)
    assert (pytester.path / "begun").exists()
    assert not (pytester.path / "late").exists()


def test_when_time_is_over_it_says_so(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "until", lambda command, environment, seconds: None)
    assert script.main(["--out", "out", "--seconds", "5", "--jobs", "1"]) == 3
    assert "0 passed, 0 failed, 0 skipped" in capfd.readouterr().out


def test_a_worker_that_dies_is_a_failure(script: ModuleType, pytester: pytest.Pytester) -> None:
    dies = "import os\n\ndef test_first(device):\n    pass\n\ndef test_dies(device):\n    os.abort()\n"
    pytester.makepyfile(test_dies=dies)
    pytester.makeconftest("import pytest\n\n@pytest.fixture\ndef device():\n    return 'cuda'\n")
    assert script.main(["--out", "out", "--jobs", "1", "--", "test_dies.py"]) == 1
    first, ended = lines(pytester.path / "out" / "sm_90-triton==3.8.0.jsonl")[1:]
    assert first["outcome"] == "passed"
    assert (ended["outcome"], "crashed" in ended["why"]) == ("failed", True)


def test_half_a_line_is_left_out(script: ModuleType, pytester: pytest.Pytester) -> None:
    out = pytester.mkdir("out")
    file = out / "sm_90-triton==3.8.0.jsonl"
    whole = json.dumps({"identity": MACHINE | {"source": "a1"}})
    file.write_text(whole + '\n{"test": "test_some.py::test_on_th')
    assert script.main(["--out", "out", "--jobs", "1", "--", "-k", "on_the_device"]) == 0
    assert [one["test"] for one in lines(file)[1:]] == ["test_some.py::test_on_the_device"]


def test_results_of_another_state_are_refused(
    script: ModuleType, pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str]
) -> None:
    file = pytester.mkdir("out") / "sm_90-triton==3.8.0.jsonl"
    for change, said in (({"source": "b2"}, "source b2, now a1"), ({"torch": "2.9.0"}, "torch 2.9.0, now 2.11.0")):
        file.write_text(json.dumps({"identity": MACHINE | {"source": "a1"} | change}) + "\n")
        before = file.read_text()
        assert script.main(["--out", "out", "--jobs", "1"]) == 2
        assert said in capfd.readouterr().err
        assert file.read_text() == before
    assert script.main(["--out", "out", "--jobs", "1", "--again", "--", "-k", "on_the_device"]) == 0


def test_a_damaged_file_is_named(
    script: ModuleType, pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str]
) -> None:
    (pytester.mkdir("out") / "sm_90-triton==3.8.0.jsonl").write_text("[]\n{}\n")
    assert script.main(["--out", "out", "--report"]) == 2
    assert "cannot be read" in capfd.readouterr().err


def test_a_folder_without_triton_is_refused(script: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--out", "out", "--triton", "nothing"]) == 2
    assert "no folder triton/" in capfd.readouterr().err


def test_without_an_accelerator_it_says_so(tmp_path: Path) -> None:
    asked = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "chip_suite.py"), "--out", str(tmp_path)],
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (asked.returncode, asked.stderr) == (2, "chip_suite: torch sees no accelerator\n")
    assert not list(tmp_path.iterdir())


def test_a_workers_gpu_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [
        subprocess.run(
            [sys.executable, "-c", "import os, chip_suite_plugin; print(os.environ['CUDA_VISIBLE_DEVICES'])"],
            env={"PYTEST_XDIST_WORKER": worker, "CHIP_SUITE_GPUS": "0,1,2", "PYTHONPATH": str(ROOT / "scripts")},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for worker in ("gw0", "gw1", "gw5")
    ]  # fmt: skip
    assert seen == ["0,1,2", "1,2,0", "2,0,1"]
