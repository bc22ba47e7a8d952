"""Public calls on devices in host memory that are not CUDA's: an NPU with a torch_npu of the wheel's schemas, and the
chip of the documented example backend. What a device needs of portattn outside backends/ shows here."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import host_device
import pytest
from backend_packages import install_example
from click.testing import CliRunner
from places import TESTS

from portattn.cli import main
from portattn.planning.registry import parse_target

HERE = Path(__file__).parent
NPU_FOLDERS = (HERE / "npu", TESTS / "backends" / "ascend")


def python(folders: tuple[Path, ...], *arguments: str, **variables: str) -> str:
    """Return the last line that a Python prints, with packages of these folders."""
    if missing := host_device.missing():
        pytest.skip(missing)
    path = os.pathsep.join(map(str, (*folders, HERE, TESTS, os.environ["PYTHONPATH"])))
    command, environment = [sys.executable, *arguments], os.environ | {"PYTHONPATH": path} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def npu() -> dict[str, Any]:
    return json.loads(python(NPU_FOLDERS, str(HERE / "calls_child.py"), "npu", "torch_npu"))


@pytest.fixture(scope="module")
def example_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of docs/backends.md as an installed package, and its maker's package for torch."""
    folder = install_example(tmp_path_factory.mktemp("example"))
    (folder / "torch_acme.py").write_text('import host_device\n\nhost_device.install("acme")\n')
    return folder


@pytest.fixture(scope="module")
def acme(example_site: Path) -> dict[str, Any]:
    return json.loads(python((example_site,), str(HERE / "calls_child.py"), "acme", "torch_acme"))


# Findings that are a text of the device's own.
OWN = {
    "npu": {"planned": "ascend:ascend910b2", "timed": "Ascend910B2"},
    "acme": {"planned": "acme:acme1", "timed": "acme"},
}
BY_VENDOR = (
    "dense", "causal", "top left", "bshd", "right padding", "window", "sinks", "bias", "alibi", "varlen fp16",
    "large pages", "decode plain", "inference_mode", "side_stream", "autocast", "compiled", "vmapped", "trained",
    "trained_features",
)  # fmt: skip


@pytest.mark.parametrize("device", OWN)
def test_every_call_is_right_on_the_device(device: str, request: pytest.FixtureRequest) -> None:
    """Each op in two dtypes, dense calls of every mask and feature; a side stream, inference mode, autocast, one graph,
    vmap, gradients, dropout, writes, plans and warm-up, timers."""
    found = request.getfixturevalue(device)
    assert len(found) > 40
    assert {name: case["found"] for name, case in found.items()} == dict.fromkeys(found, "right") | OWN[device]


def test_vendors_functions_run_what_they_take(npu: dict[str, Any], acme: dict[str, Any]) -> None:
    assert [name for name in BY_VENDOR if not npu[name]["path"].startswith("npu_")] == []
    assert acme["equal heads"]["path"] == "acme_attention"
    assert acme["causal"]["path"] == acme["varlen fp16"]["path"] == "reference"


def test_no_fall_back_is_silent(npu: dict[str, Any], acme: dict[str, Any]) -> None:
    """No kernel of portattn's is compiled here: each call has another path than the best one of its backend."""
    told = {name: case["fell_back"] for name, case in npu.items() if name != "timed"}
    assert [name for name, texts in told.items() if not any("triton" in text for text in texts)] == []
    for name in ("window", "bias", "dropped", "trained", "paged fp16"):
        assert any("on the reference path, not acme_attention" in text for text in acme[name]["fell_back"]), name
    assert acme["equal heads"]["fell_back"] == []


CALL = """
import json, warnings
import torch, torch_npu
import portattn
from portattn.cli import doctor
from portattn.planning.registry import devices
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    q = torch.randn(1, 2, 5, 16, device="npu:1", dtype=torch.float16)
    out = portattn.attention(q, q, q)
    right = torch.nn.functional.scaled_dot_product_attention(*[q.cpu()] * 3)
    torch.testing.assert_close(out.cpu(), right, rtol=2e-3, atol=2e-3)
    made = portattn.last_plan()
    (npu,) = [item.value for item in doctor.backends().items if item.name == "ascend"]
    print(json.dumps({
        "target": made.target, "path": made.path, "why": [no.reason for no in made.rejected], "doctor": npu,
        "devices": [one.name for one in devices()], "told": [str(one.message) for one in caught],
        "checks": {one.name: one.outcome for one in doctor.device_checks(60) if one.name.startswith("ascend")},
    }))
"""


def called(**variables: str) -> dict[str, Any]:
    return json.loads(python(NPU_FOLDERS, "-c", CALL, **variables))


def test_a_chip_is_named_and_its_relatives_are_planned_as_it() -> None:
    """Both a chip of the vendor's newest list, and a chip that no list has."""
    listed = called(FAKE_NPU_CHIP="Ascend950PR_9579")
    assert (listed["target"], listed["devices"]) == ("ascend:ascend910_95", ["ascend:ascend910_95", "cpu:generic"])
    assert listed["doctor"].startswith("ascend910_95 (Ascend950PR_9579)")
    unlisted = called(FAKE_NPU_CHIP="Ascend910B9", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert unlisted["checks"] == {"ascend:ascend910b2, npu_fused_infer_attention_score path": "PASS"}
    assert unlisted["target"] == "ascend:ascend910b2"
    assert unlisted["path"].startswith("npu_")
    assert unlisted["doctor"].startswith("ascend910b2 (Ascend910B9)")
    told = "Ascend910B9 is no chip that portattn knows: it is planned as ascend910b2, a chip of its family"
    assert unlisted["told"].count(told) == 1


def test_one_device_of_two_that_has_no_name() -> None:
    """Its tensors are computed by the reference, whose plan has the error."""
    found = called(FAKE_NPU_FAULT="RuntimeError:1")
    assert (found["target"], found["path"]) == ("ascend:unknown", "reference")
    said = "torch_npu.npu.get_device_name(1) raised RuntimeError: the driver does not answer"
    assert any(said in reason for reason in found["why"]), found["why"]
    assert found["devices"] == ["ascend:ascend910b2", "cpu:generic"]


def test_the_matrix_has_the_examples_chip(example_site: Path, tmp_path: Path) -> None:
    line = ("-m", "portattn", "matrix", "run", "--targets", "acme", "--problems", "decode*", "--out", str(tmp_path))
    assert python((example_site,), *line).startswith("page: ")
    cells = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text().splitlines()[1:]]
    assert {(cell["target"], cell["plan"]["path"]) for cell in cells} == {("acme:acme1", "reference")}


REPORT = ("-m", "portattn", "report", "--problems", "decode*")
AUTHOR = "Ada Example <ada@example.org>"


@pytest.mark.parametrize("device", OWN)
def test_a_report_is_evidence_of_its_author(device: str, example_site: Path, tmp_path: Path) -> None:
    """The file has none of the machine's names; a merged matrix shows its cells as the author's word."""
    folders, module = {"npu": (NPU_FOLDERS, "torch_npu"), "acme": ((example_site,), "torch_acme")}[device]
    # As the vendor's wheel is loaded: by torch itself, in every process.
    (tmp_path / "site" / "stand_in-1.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "stand_in.py").write_text(f"def load():\n    import {module}\n")
    for name, text in {"METADATA": "Name: stand_in\nVersion: 1\n", "entry_points.txt": BACKEND}.items():
        (tmp_path / "site" / "stand_in-1.dist-info" / name).write_text(text)
    folders, file, run = (tmp_path / "site", *folders), tmp_path / "report.json", tmp_path / "merged"
    last = python(folders, *REPORT, "--sign-off", AUTHOR, "--out", str(file))
    assert last.endswith(f"signed by {AUTHOR}")
    found = json.loads(text := file.read_text())
    (identity,) = found["run"]["identities"]
    assert [one["target"] for one in identity["host"]["devices"]] == [OWN[device]["planned"]]
    assert [(cell["status"], cell["level"]) for cell in found["cells"]] == [("PASS", "measured")]
    assert all(cell["native"]["microseconds"] > 0.0 for cell in found["cells"])
    assert {probe["target"] for probe in found["probes"]} == ({OWN[device]["planned"]} if device == "npu" else set())
    assert [name for name in (platform.node(), str(Path.home()), str(tmp_path), "/site") if name in text] == []
    python(folders, "-m", "portattn", "matrix", "merge", str(file), "--out", str(run))
    assert f"Ada Example, {identity['date'][:10]}" in (run / "index.html").read_text()
    file.write_text(text.replace(AUTHOR, ""))
    merge = ("-c", UNSIGNED.format(file=str(file), out=str(tmp_path / "none")))
    assert "is not signed: make it with `portattn report --sign-off" in python(folders, *merge)


@pytest.mark.parametrize(("words", "status", "text"), [
    ((), 3, "nothing was reported: no device is here that a backend knows"),
    (("--sign-off", "somebody"), 2, "--sign-off is 'somebody', but must be `Name <mail>`"),
])  # fmt: skip
def test_reports_that_are_not_made(
    words: tuple[str, ...], status: int, text: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("portattn.planning.registry.devices", lambda: [parse_target("cpu:generic")])
    done = CliRunner().invoke(main, ["report", *words, "--out", str(tmp_path / "report.json")])
    assert (done.exit_code, done.output.count("\n")) == (status, 1)
    assert text in done.output
    assert not (tmp_path / "report.json").exists()


BACKEND = "[torch.backends]\nstand_in = stand_in:load\n"
UNSIGNED = """
from click.testing import CliRunner
from portattn.cli import main
done = CliRunner().invoke(main, ["matrix", "merge", {file!r}, "--out", {out!r}])
assert done.exit_code == 2
print(done.output.strip())
"""
