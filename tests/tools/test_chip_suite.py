"""scripts/chip_suite.py: what it runs on a chip, on which GPU, and that an interrupted run goes on where it ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import filelock
import pytest

ROOT = Path(__file__).parent.parent.parent
MACHINE: dict[str, Any] = {
    "chip": "sm_90", "why": "", "toolchain": "triton==3.8.0", "torch": "2.11.0", "gpus": ["NVIDIA H100"] * 3,
    "variable": "CUDA_VISIBLE_DEVICES", "build": "b1",
}  # fmt: skip
IDENTITY = {"identity": MACHINE | {"source": "a1"}}
FILE = "out/sm_90-triton==3.8.0.jsonl"
TESTS = """
    import os
    from pathlib import Path
    import pytest

    @pytest.fixture
    def device():
        return "cuda"

    def test_without_a_device():
        Path("ran").open("a").write("without ")

    def test_that_fails(device):
        Path("ran").open("a").write("fails ")
        assert Path("mended").exists(), "not yet"

    def test_on_the_device(device):
        Path("ran").open("a").write("on ")
        Path("gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))

    @pytest.mark.gpu
    def test_that_is_skipped():
        Path("ran").open("a").write("skipped ")
        pytest.skip("no such chip")

    @pytest.mark.on_device
    def test_that_is_new():
        Path("ran").open("a").write("new ")
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester) -> ModuleType:
    """The script over a small suite, on a machine with three H100s by its own word."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import chip_suite

    pytester.makepyfile(test_some=TESTS)
    pytester.makeini("[pytest]\nmarkers =\n    gpu: on a device\n    on_device: too\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(chip_suite, "ROOT", pytester.path)
    monkeypatch.setattr(chip_suite, "machine_of", lambda environment: dict(MACHINE))
    monkeypatch.setattr(chip_suite, "source_digest", lambda out: "a1")
    return chip_suite


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def left_there(pytester: pytest.Pytester, *items: Any) -> Path:
    pytester.mkdir("out")
    file = pytester.path / FILE
    file.write_text("".join(item if isinstance(item, str) else json.dumps(item) + "\n" for item in items))
    return file


def test_what_failed_is_run_again_and_what_passed_is_not(script, pytester, monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 2")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
    left_there(pytester, IDENTITY, {"test": "test_some.py::test_that_fails", "outcome": "failed", "seconds": 0.1})
    assert script.main(["--out", "out", "--jobs", "1", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert (found["passed"], found["failed"], found["skipped"], found["complete"]) == (2, 1, 1, True)
    assert [bad["test"] for bad in found["failures"]] == ["test_some.py::test_that_fails"]
    assert "not yet" in found["failures"][0]["why"]
    assert (pytester.path / "ran").read_text() == "on skipped new fails ", "what has run before comes last"
    assert (pytester.path / "gpu").read_text() == "4,2"
    (pytester.path / "mended").touch()
    (pytester.path / "ran").unlink()
    assert script.main(["--out", "out", "--jobs", "1", "--all"]) == 0
    assert (pytester.path / "ran").read_text() == "fails skipped without "
    assert "4 passed, 0 failed, 1 skipped" in capfd.readouterr().out


def test_a_worker_that_dies(script: ModuleType, pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str]) -> None:
    dies = "import os\n\ndef test_first(device):\n    pass\n\ndef test_dies(device):\n    os.abort()\n"
    pytester.makepyfile(test_dies=dies)
    pytester.makeconftest("import pytest\n\n@pytest.fixture\ndef device():\n    return 'cuda'\n")
    assert script.main(["--out", "out", "--jobs", "1", "--", "test_dies.py"]) == 1
    first, ended = [line for line in lines(pytester.path / FILE) if "outcome" in line]
    assert first["outcome"] == "passed"
    assert (ended["outcome"], "crashed" in ended["why"]) == ("failed", True)
    pytester.makepyfile(test_dies="import os\n\nif 'PYTEST_XDIST_WORKER' in os.environ:\n    os.abort()\n")
    assert script.main(["--out", "other", "--jobs", "1", "--", "test_dies.py"]) == 2
    assert "no process has collected a test" in capfd.readouterr().err


def test_a_file_that_cannot_be_collected_fails_the_run_alone_and_nothing_selected_is_no_success(
    script, pytester, capfd
):
    assert script.main(["--out", "none", "--jobs", "1", "--", "-k", "no_such_test"]) == 2
    assert "no test is selected" in capfd.readouterr().err
    pytester.makepyfile(test_broken="import pathlib\n\nassert pathlib.Path('mended').exists()\n")
    assert script.main(["--out", "out", "--jobs", "1", "--", "test_broken.py"]) in (1, 3)
    assert "NOT COLLECTED test_broken.py" in capfd.readouterr().out
    (pytester.path / "mended").touch()
    assert script.main(["--out", "out", "--jobs", "1"]) == 0


def test_when_time_is_over_or_pytest_ends_early(script, pytester, monkeypatch, capfd):
    one = {"test": "a", "outcome": "failed", "seconds": 0.1, "why": "not yet"}
    file = left_there(pytester, IDENTITY)
    for status, told in ((None, []), (2, [{"selected": {"asked": 3, "left": 2}}])):
        written = "".join(json.dumps(line) + "\n" for line in [one, *told])

        def ended(command: Any, environment: Any, seconds: float, text: str = written, status: Any = status) -> Any:
            file.write_text(file.read_text() + text)
            return status

        monkeypatch.setattr(script, "until", ended)
        assert script.main(["--out", "out", "--seconds", "5"]) == 3, "also where a test failed"
        assert "not all have run" in capfd.readouterr().out


def test_all_processes_end(script: ModuleType, pytester: pytest.Pytester) -> None:
    child = "import pathlib, time; pathlib.Path('begun').touch(); time.sleep(2); pathlib.Path('late').touch()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert script.until([sys.executable, "-c", parent], dict(os.environ), 1.0) is None
    program = (
        f"import chip_suite as c, os, signal, sys\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        f"c.ROOT = {str(pytester.path)!r}; c.until([sys.executable, '-c', {parent!r}], dict(os.environ), 0)"
    )
    (pytester.path / "begun").unlink()
    running = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT / "scripts")}, stderr=subprocess.PIPE
    )
    while not (pytester.path / "begun").exists():
        time.sleep(0.05)
        assert running.poll() is None
    running.send_signal(signal.SIGTERM)
    assert b"KeyboardInterrupt" in running.communicate()[1]
    time.sleep(2.5)
    assert not (pytester.path / "late").exists()


def test_damaged_lines_are_counted_and_half_a_line_is_left_out(script: ModuleType, pytester: pytest.Pytester) -> None:
    good = {"test": "a", "outcome": "passed", "seconds": 1.0}
    file = left_there(pytester, IDENTITY, good, "{\n", '{"test": "x"}\n', "[]\n", '{"test": "b", "outcome": "pas')
    file.write_bytes(file.read_bytes().replace(b"[]", b"\xff"))
    found = script.summary(file)
    assert (found["passed"], found["damaged"]) == (1, 3)
    assert script.begun(file, MACHINE | {"source": "a1"}) == {"passed": ["a"], "others": []}
    assert file.read_bytes().endswith(b"\xff\n")


@pytest.mark.parametrize("first", ["", "[]\n", "{}\n", '{"identity": 5}\n', '{"identity": {"chip": "sm_90"}}\n'])
def test_a_file_that_is_no_result_is_named(script, pytester, capfd, first):
    file = left_there(pytester, first)
    assert script.main(["--out", "out"]) == 2
    assert "does not begin as results" in capfd.readouterr().err
    assert file.read_text() == first


@pytest.mark.parametrize("name", ["source", "torch", "build", "gpus"])
def test_results_of_another_state_are_refused(script, pytester, capfd, name):
    other: Any = ["NVIDIA H100"] if name == "gpus" else "other"
    file = left_there(pytester, {"identity": IDENTITY["identity"] | {name: other}})
    before = file.read_text()
    assert script.main(["--out", "out"]) == 2
    assert f"{name} {other}, now" in capfd.readouterr().err
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--triton", "nothing"], "no folder triton/"),
        (["--seconds", "-1"], "neither may be below 0"), ([], "another run is writing there"),
    ],
)  # fmt: skip
def test_bad_words_and_one_run_at_a_time(script, pytester, capfd, words: list[str], said: str) -> None:
    pytester.mkdir("out")
    with filelock.FileLock(pytester.path / "out" / ".lock"):
        assert script.main(["--out", "out", *words]) == 2
    assert said in capfd.readouterr().err


def test_another_triton_comes_first_and_gpus_are_those_that_the_user_chose(script, pytester) -> None:
    pytester.mkpydir("triton")
    assert script.environment_of(pytester.path)["PYTHONPATH"].split(os.pathsep)[0] == str(pytester.path)
    assert script.visible(None, 3) == script.visible("", 3) == ["0", "1", "2"]
    assert script.visible("GPU-aa, GPU-bb", 2) == ["GPU-aa", "GPU-bb"]


def test_the_digest_is_of_contents(script: ModuleType, pytester: pytest.Pytester, monkeypatch: Any) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(script, "ROOT", pytester.path)
    out = pytester.mkdir("out")
    before = script.source_digest(out)
    (out / "results").write_text("1")
    pytester.mkdir(".hidden").joinpath("file").write_text("1")
    assert script.source_digest(out) == before
    (pytester.path / "a.log").write_text("1")
    found = script.source_digest(out)
    (pytester.path / "a.log").write_text("2")
    assert before != found != script.source_digest(out)


def test_a_workers_gpu_comes_first() -> None:
    seen = [
        subprocess.run(
            [sys.executable, "-c", "import os, chip_suite_plugin; print(os.environ['CUDA_VISIBLE_DEVICES'])"],
            env={
                "PYTEST_XDIST_WORKER": worker, "CHIP_SUITE_GPUS": "0,1,2", "PYTHONPATH": str(ROOT / "scripts"),
                "CHIP_SUITE_VARIABLE": "CUDA_VISIBLE_DEVICES",
            },
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for worker in ("gw0", "gw1", "gw5")
    ]  # fmt: skip
    assert seen == ["0,1,2", "1,2,0", "2,0,1"]
