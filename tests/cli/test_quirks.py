"""`portattn quirks`."""

from pathlib import Path

import pytest

from portattn.cli.quirks import quirks
from portattn.planning.registry import Registry, shipped_quirks

KNOWN = Registry.load().quirks
ASCEND = ("ascend:ascend910b2", "--toolchain", "triton-ascend==3.1.0")


def test_list_shows_every_quirk(portattn):
    assert f"{len(KNOWN)} quirks" in portattn("quirks", "list", exits=0).out
    assert {q["id"] for q in portattn("quirks", "list", "--json").json} == set(KNOWN)


@pytest.mark.parametrize(
    ("options", "keep"),
    [
        (("--backend", "rocm"), lambda q: q.when.backend in (None, "rocm")),
        (("--kind", "limit"), lambda q: q.kind == "limit"),
        (("--symptom", "slow"), lambda q: q.symptom == "slow"),
        (
            ("--symptom", "slow", "--backend", "cuda"),
            lambda q: q.symptom == "slow" and q.when.backend in (None, "cuda"),
        ),
    ],
)
def test_list_filters(portattn, options, keep):
    expected = {quirk.id for quirk in KNOWN.values() if keep(quirk)}
    assert 0 < len(expected) < len(KNOWN)
    assert {q["id"] for q in portattn("quirks", "list", *options, "--json").json} == expected


def test_list_what_is_active_depends_on_the_toolchain(portattn):
    def active(version):
        line = (
            "quirks", "list", "--active-on", "ascend:ascend910b2", "--toolchain", f"triton-ascend=={version}", "--json",
        )  # fmt: skip
        return {q["id"] for q in portattn(*line).json}

    assert "ascend-0001-k-block-order" in active("3.1.0")
    assert active("3.1.0") != active("9.0.0")
    assert not any(name.startswith(("cuda", "rocm")) for name in active("3.1.0"))


def test_show_tells_everything(portattn):
    for quirk in list(KNOWN.values())[:5]:
        text = portattn("quirks", "show", quirk.id).out
        for part in (quirk.title, quirk.symptom, quirk.evidence.upstream, quirk.file):
            assert part in text
        assert portattn("quirks", "show", quirk.id, "--json").json["title"] == quirk.title
    text = portattn("quirks", "show", "ascend-0015").out
    for part in ("ttadapter", "error: cannot div 0!", "triton-ascend<3.2.0"):
        assert part in text


def test_every_command_has_json_and_its_exit_statuses_are_documented():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    table = page.partition("## quirks\n")[2].partition("\n## ")[0]
    for name, command in quirks.commands.items():
        assert any("--json" in parameter.opts for parameter in command.params), name
        rows = [line for line in table.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1]]
        assert len(rows) == 1, f"docs/cli.md: exit statuses of quirks {name}"


def test_why_says_what_applies_and_why_others_do_not(portattn):
    called = portattn("quirks", "why", *ASCEND, exits=0)
    assert "ascend-0001-k-block-order" in called.out
    assert "block_order = row" in called.out
    found = portattn("quirks", "why", *ASCEND, "--json").json
    applied = {use["id"]: use for use in found["applied"]}
    assert applied["ascend-0001-k-block-order"]["kernels"] == list(KNOWN["ascend-0001-k-block-order"].when.kernels)
    assert applied["ascend-0001-k-block-order"]["sets"] == {"block_order": "row"}
    assert not applied.keys() & {other["id"] for other in found["others"]}
    assert all(other["reason"] for other in found["others"])
    later = portattn("quirks", "why", "ascend:ascend910b2", "--toolchain", "triton-ascend==9.0.0", "--json").json
    reasons = {other["id"]: other["reason"] for other in later["others"]}
    assert any("and this is 9.0.0" in reason for reason in reasons.values())


def test_why_names_the_variants_that_a_quirk_is_about(portattn):
    found = portattn("quirks", "why", "cuda:sm_90", "--toolchain", "triton==3.6.0", "--json").json
    uses = {use["id"]: use["kernels"] for use in found["applied"]}
    assert uses["cuda-0018-register-a-variants"] == ["gluon_forward", "gluon_backward", "gluon_mla", "gluon_indexer"]
    assert {"gluon_forward", "dense_forward"} <= set(uses["any-0004-carried-bound"])


def test_audit_of_a_broken_folder_is_red_with_file_and_line(portattn, tmp_path):
    (tmp_path / "cuda").mkdir()
    source = next((shipped_quirks() / "cuda").glob("*.toml"))
    broken = tmp_path / "cuda" / source.name
    broken.write_text(source.read_text().replace("symptom = ", "colour  = "))
    line = next(n for n, text in enumerate(broken.read_text().splitlines(), 1) if text.startswith("colour"))
    assert f"{broken}:{line}" in portattn("quirks", "audit", "--folder", str(tmp_path), exits=1).out
    report = portattn("quirks", "audit", "--folder", str(tmp_path), "--json", exits=1)
    assert report.json["errors"] >= 1
    assert report.json["findings"][0]["line"] == line


@pytest.mark.parametrize("quirk_id", ["cuda-0012", "rocm-0321"])
def test_an_id_may_end_with_its_number(portattn, quirk_id):
    whole = portattn("quirks", "show", quirk_id, "--json").json["id"]
    assert whole.startswith(f"{quirk_id}-")
    assert portattn("quirks", "show", quirk_id).out == portattn("quirks", "show", whole).out
