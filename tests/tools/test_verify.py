"""What the outcomes of several means together say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click.testing
import numpy as np
import pytest
import torch

from portattn.cli import main, verify
from portattn.cli.verify import DIFFERS, SENTENCES, Conclusion, VerificationRow, conclusion, variant_conclusion


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ({"interpreter": "pass"}, "agree"), ({"interpreter": "pass", "device": "pass"}, "agree"),
        ({"interpreter": "not_run", "device": "pass"}, "agree"), ({"interpreter": "pass", "device": "fail"}, "device"),
        ({"interpreter": "pass", "device": "crash", "emulated": "pass"}, "device"),
        ({"interpreter": "fail", "device": "fail"}, "kernel"),
        ({"interpreter": "fail", "device": "fail", "emulated": "error"}, "kernel"),
        ({"interpreter": "fail", "device": "pass"}, "interpreter"),
        ({"interpreter": "fail", "device": "pass", "emulated": "fail"}, "unclear"),
        ({"interpreter": "fail"}, "unclear"), ({"interpreter": "not_run", "device": "error"}, "unclear"),
        ({"interpreter": "not_run"}, "unseen"), ({}, "unseen"),
    ],
)  # fmt: skip
def test_conclusion(outcomes: dict[str, str], said: str) -> None:
    assert conclusion(outcomes) == said
    assert said in SENTENCES
    assert (said in DIFFERS) is (said not in ("agree", "unseen", "refused"))


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ({"compiled": "pass"}, "compiled"), ({"compiled": "fail"}, "compiler"), ({"compiled": "hang"}, "compiler"),
        ({"compiled": "not_run"}, "unseen"), ({"compiled": "pass", "device": "pass"}, "agree"),
        ({"compiled": "not_run", "device": "fail"}, "unclear"),
    ],
)  # fmt: skip
def test_conclusion_about_a_variant(outcomes: dict[str, str], said: str) -> None:
    """No interpreter runs it, and the chip may be elsewhere: that it compiles is said, and is no number."""
    assert variant_conclusion(outcomes) == said
    assert (said in DIFFERS) is (said in ("compiler", "unclear"))


ABSENT = "import sys; sys.modules['triton'] = None; from portattn.cli import main; main(prog_name='portattn')"


def test_without_triton_nothing_is_verified() -> None:
    line = ["verify", "mla_attention", "--target", "cuda:sm_90", "--toolchain", "triton==3.6.0", "--no-run-older"]
    done = subprocess.run([sys.executable, "-c", ABSENT, *line], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert ", 0 verified, 0 red\n" in done.stdout
    assert "portattn: nothing was verified: " in done.stderr
    assert "the interpreter needs community Triton, and this Python has none" in done.stderr


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        (("unseen", "refused"), 3), (("unseen", "agree"), 0), (("refused", "compiled"), 0), (("unseen", "unclear"), 1),
        ((), 3),
    ],
)  # fmt: skip
def test_status(monkeypatch: pytest.MonkeyPatch, verdicts: tuple[Conclusion, ...], status: int) -> None:
    rows = [
        VerificationRow(op="attention", problem="dense", target="cuda:sm_90", toolchain="triton==3.6.0", kernel="",
            path="", verdict=verdict, sentence=SENTENCES[verdict])
        for verdict in verdicts
    ]  # fmt: skip
    monkeypatch.setattr(verify, "verification_rows", lambda *given: rows)
    line = ["verify", "--target", "cuda:sm_90", "--toolchain", "triton==3.6.0"]
    assert click.testing.CliRunner().invoke(main, line).exit_code == status
    told = json.loads(click.testing.CliRunner().invoke(main, [*line, "--json"]).stdout)
    assert told["verified"] == sum(verdict not in ("unseen", "refused") for verdict in verdicts)


def test_the_table_names_the_form_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    row = VerificationRow(
        op="decode_attention", problem="a decode", target="cuda:sm_90", toolchain="triton==3.6.0",
        kernel="decode_split", form="warps_apart", path="triton", verdict="unseen", sentence="",
    )  # fmt: skip
    monkeypatch.setattr(verify, "verification_rows", lambda *given: [row])
    line = ["verify", "decode_attention", "--target", "cuda:sm_90", "--toolchain", "triton==3.6.0"]
    assert "decode_split, in its form warps_apart" in click.testing.CliRunner().invoke(main, line).stdout


def run(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, ["verify", *map(str, arguments)])


def test_two_machines_results_are_compared_by_the_bounds_in_them(tmp_path: Path) -> None:
    """Rows inside are passed; a row outside, misplaced numbers, other shapes and names are not."""
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    assert run("attention", "--save", ours).exit_code == 0
    saved = torch.load(ours)
    name = next(name for name in saved if name.endswith(" out") and "bf16" in name)
    for factor, outside in ((0.9, False), (1.2, True)):
        moved = saved[name].double()
        moved[..., 0] += factor * 2 * saved[f"{name}.bound"]
        torch.save(saved | {name: moved}, theirs)
        found = run("--compare", ours, theirs, "--json")
        assert (found.exit_code, name in json.loads(found.stdout)["outside"]) == (int(outside), outside)
    for changed, status in ((saved[name] * float("inf"), 1), (saved[name][:1], 2)):
        torch.save(saved | {name: changed}, theirs)
        assert run("--compare", ours, theirs).exit_code == status
    torch.save({"other": saved[name]}, theirs)
    assert run("--compare", ours, theirs).exit_code == 2


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_that_is_no_number_above_0_passes_nothing(bound: float, tmp_path: Path) -> None:
    for name, tensor in {"a": torch.ones(2, 3), "b": torch.full((2, 3), 9.0)}.items():
        torch.save({"x": tensor, "x.bound": torch.full((2,), bound)}, tmp_path / name)
    assert run("--compare", tmp_path / "a", tmp_path / "b").exit_code == 1
    assert run("--compare", tmp_path / "a", tmp_path / "a").exit_code == 0


def test_a_damaged_file_of_results_is_named(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.pt", tmp_path / "bad.pt"
    torch.save({"x": torch.ones(2, 3)}, good)
    contents = [{"x": 1}, {1: torch.ones(3)}, {"x": torch.ones(2, 3).to_sparse()}, {"x": torch.ones(2, 3) + 1j}]
    damaged = [b"", b"hi", good.read_bytes()[:99]]
    for wrong in [*contents, *damaged]:
        bad.write_bytes(wrong) if isinstance(wrong, bytes) else torch.save(wrong, bad)
        found = run("--compare", good, bad)
        assert (found.exit_code, "bad.pt" in found.output) == (2, True), found
    os.mkfifo(tmp_path / "pipe")  # which nobody writes to
    assert run("--compare", good, tmp_path / "pipe").exit_code == 2


def test_results_without_bounds_are_judged_by_their_rows(tmp_path: Path) -> None:
    rows = torch.randn(3, 8).to(torch.float16)
    np.savez(tmp_path / "a.npz", x=rows.numpy())
    for factor, status in ((1 + 2.0**-10, 0), (1.1, 1)):
        torch.save({"x": rows * factor}, tmp_path / "b.pt")
        found = run("--compare", tmp_path / "a.npz", tmp_path / "b.pt")
        assert found.exit_code == status, found.output
