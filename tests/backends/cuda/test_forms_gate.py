"""The gate of the Hopper variants' forms: what it judges by, what it writes, and its exit status."""

import json
from pathlib import Path
from typing import Any

import forms_gate
import pytest

from portattn.backends.cuda import CudaBackend
from portattn.errors import DataError
from portattn.planning.registry import parse_target
from portattn.testing.findings import KernelFacts

FORM = next(form for form in forms_gate.forms() if form.name == "gluon_forward: plain D=128 none")
GOOD: dict[str, Any] = {"scratchpad_bytes": 197_000, "registers": 168, "spills": 24, "wgmma": 64}
RELEASE = "triton==3.9.0"


def kernels(**facts: int) -> tuple[KernelFacts, ...]:
    return (KernelFacts(function="scheduled_forward", facts=GOOD | facts),)


def test_every_form_has_a_name_of_its_own() -> None:
    names = [form.name for form in forms_gate.forms()]
    assert len(set(names)) == len(names)
    variants = {variant.name for variant in CudaBackend.variants}
    assert {form.variant.name for form in forms_gate.forms()} == variants


@pytest.mark.parametrize("release", ["triton==3.6.0", RELEASE])
@pytest.mark.parametrize(
    ("known", "facts", "wrong"),
    [
        ({FORM.name: {"scheduled_forward": 24}}, {}, []),
        ({FORM.name: {"scheduled_forward": 20}}, {}, ["scheduled_forward spills 24 bytes, and 20 are known"]),
        ({FORM.name: {}}, {}, ["scheduled_forward spills 24 bytes, and 0 are known"]),
        ({}, {}, []),  # this form was not compiled before
        (None, {}, []),
        ({FORM.name: {}}, {"spills": 0, "serialized_wgmma": 1}, ["serialises", "wait"]),
        ({FORM.name: {}}, {"spills": 0, "scratchpad_bytes": 240_000}, ["shared memory"]),
    ],
)
def test_what_is_red(release: str, known: Any, facts: dict[str, int], wrong: list[str]) -> None:
    seen, said = forms_gate.judged(FORM, parse_target("cuda:sm_90", release), kernels(**facts), known)
    assert seen["scheduled_forward"]["spills"] == (GOOD | facts)["spills"]
    assert len(said) == len(wrong)
    assert all(part in text for part, text in zip(wrong, said, strict=True)), said


def found(form: str, spills: int, wrong: tuple[str, ...] = ()) -> forms_gate.Found:
    facts = {"scheduled_forward": {"registers": 168, "spills": spills, "scratchpad_bytes": 1}}
    return forms_gate.Found(form=form, facts=facts, wrong=wrong, seconds=1.0)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "spills.toml"
    assert forms_gate.baseline(path) == {}
    forms_gate.written(RELEASE, [found("a: b, c", 8), found("d", 0)], path)
    forms_gate.written("triton==3.6.0", [found("d", 4)], path)
    forms_gate.written(RELEASE, [found("d", 16)], path)  # of some forms: the others stay
    assert forms_gate.baseline(path) == {
        RELEASE: {"a: b, c": {"scheduled_forward": 8}, "d": {"scheduled_forward": 16}},
        "triton==3.6.0": {"d": {"scheduled_forward": 4}},
    }
    path.write_text(path.read_text().replace("16", "true"))
    with pytest.raises(DataError, match="spills"):
        forms_gate.baseline(path)


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "spills.toml"
    monkeypatch.setattr(forms_gate, "BASELINE", file)
    monkeypatch.setattr(forms_gate.baseline, "__defaults__", (file,))
    monkeypatch.setattr(forms_gate.written, "__defaults__", (file,))
    spills = 8

    def run(chosen: Any, release: str, jobs: int, known: Any, say: Any) -> list[forms_gate.Found]:
        made = []
        for form in chosen:
            more = known is not None and spills > known.get(form.name, {}).get("scheduled_forward", spills)
            made.append(found(form.name, spills, ("more",) if more else ()))
            say(made[-1])
            if spills == 99:
                raise KeyboardInterrupt
        return made

    monkeypatch.setattr(forms_gate, "run", run)
    chosen = ["--release", "3.9.0", "--only", "gluon_forward: plain D=128"]
    assert forms_gate.main(chosen) == 0
    assert f"no figures of 3 of these forms with {RELEASE}" in capsys.readouterr().out
    assert forms_gate.main([*chosen, "--write"]) == 0
    assert forms_gate.main(chosen) == 0
    spills = 12
    capsys.readouterr()
    assert forms_gate.main([*chosen, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["release"], told["judged"], len(told["red"])) == (RELEASE, True, 3)
    spills = 99
    assert forms_gate.main([*chosen, "--write"]) == 130
    assert sorted(row["scheduled_forward"] for row in forms_gate.baseline(file)[RELEASE].values()) == [8, 8, 99]
    for bad in (["--jobs", "0"], ["--only", "nothing"]):
        with pytest.raises(SystemExit) as ended:
            forms_gate.main(bad)
        assert ended.value.code == 2


def test_the_file_names_forms_that_are_there() -> None:
    names = {form.name for form in forms_gate.forms()}
    for release, rows in forms_gate.baseline().items():
        assert release.startswith("triton==")
        assert set(rows) <= names, release


def test_a_release_that_the_lab_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PORTATTN_CACHE_DIR", str(tmp_path))
    assert forms_gate.main(["--release", "99.0.0", "--only", "plain D=128 none"]) == 2
