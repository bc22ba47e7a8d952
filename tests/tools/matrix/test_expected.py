"""An expected failure must fail for its reason, until its day: anything else is red."""

import datetime

import pytest

from portattn.errors import DataError
from portattn.tools.compare.verdict import judge, read
from portattn.tools.matrix.problems import decode

ENTRY = """\
[[expected]]
target    = "cuda:sm_*"
toolchain = "triton==3.6.*"
problem   = "dense*"
signature = "refused: .* layout"
reason    = "Triton refuses the layout"
owner     = "kernels"
expires   = 2026-12-31
"""
TODAY = datetime.date(2026, 12, 31)


def entries(tmp_path, text=ENTRY):
    path = tmp_path / "expected.toml"
    path.write_text(text)
    return read(path)


@pytest.fixture
def failing(cell):
    return cell(status="ERROR", level="declared", reason="refused: no layout")


def kinds(outcome):
    return [kind for kind, _, _ in outcome.complaints]


def test_a_failure_for_its_reason_is_expected(tmp_path, failing, cell):
    (entry,) = listed = entries(tmp_path)
    outcome = judge([failing, cell(target="rocm:gfx942")], listed, TODAY)
    assert (outcome.explained, outcome.complaints, entry.line) == ({failing.id: entry}, (), 1)


@pytest.mark.parametrize(("changes", "kind"), [
    ({"reason": "another"}, "other_reason"), ({"status": "PASS", "reason": ""}, "unexpected_pass"),
    ({"status": "NOTE", "reason": "spills"}, "unexpected_pass"), ({"status": "CRASH"}, None),
    ({"status": "NOT_RUN", "reason": "nobody looked"}, None),
    ({"reason": "failed", "log": "refused: a layout"}, None),
])  # fmt: skip
def test_anything_else_is_red(tmp_path, cell, changes, kind):
    made = cell(**({"status": "ERROR", "level": "declared", "reason": "refused: no layout"} | changes))
    outcome = judge([made], entries(tmp_path), TODAY)
    assert kinds(outcome) == ([kind] if kind else [])
    assert (made.id in outcome.explained) == (kind is None and made.status != "NOT_RUN")
    if kind:
        assert "line 1, kernels: Triton refuses the layout" in outcome.complaints[0][2]


def test_past_its_day_it_is_red_and_about_no_cell_it_is_idle(tmp_path, failing, cell):
    outcome = judge([failing], listed := entries(tmp_path), TODAY + datetime.timedelta(days=1))
    assert (kinds(outcome), outcome.explained) == (["expired"], {})
    assert "until 2026-12-31" in outcome.complaints[0][2]
    outcome = judge([cell(named=decode("GQA", dtype="bf16", head_dim=128))], listed, TODAY)
    assert (outcome.idle, outcome.complaints) == (listed, ())


def test_a_status_of_its_own(tmp_path, cell):
    listed = entries(tmp_path, ENTRY.replace('"refused: .* layout"', '"spilled"') + 'status = "NOTE"\n')
    assert judge([cell(status="NOTE", level="declared", reason="96 bytes spilled")], listed, TODAY).explained
    assert kinds(judge([cell(status="FAIL", reason="96 bytes spilled")], listed, TODAY)) == ["other_reason"]
    assert kinds(judge([cell()], listed, TODAY)) == ["unexpected_pass"]


def test_what_one_entry_explains_another_need_not(tmp_path, failing):
    second = ENTRY.replace("refused: .* layout", "something else")
    outcome = judge([failing], entries(tmp_path, second + ENTRY), TODAY)
    assert (outcome.complaints, outcome.explained[failing.id].signature) == ((), "refused: .* layout")


@pytest.mark.parametrize(("old", "new", "complaint"), [
    ('owner     = "kernels"\n', "", "lacks the key `owner`"),
    ("expires   = 2026-12-31\n", "", "lacks the key `expires`"),
    ("2026-12-31", '"soon"', "key 'expected.0.expires'"),
    ('"kernels"', '" "', r"expected.toml:7: key 'owner': is empty"),
    ("refused: .* layout", "refused: (", r"expected.toml:5: key 'signature': not a regular expression"),
    ("refused: .* layout", ".*", r"expected.toml:5: key 'signature': matches every failure"),
    ("reason ", "raeson ", "unknown key `raeson`"), ("[[expected]]", "[[expcted]]", "unknown key `expcted`"),
    ("[[expected]]", "[[expected", r"expected.toml:1: not TOML"), ("expires ", "line = 3\nexpires ", "unknown key"),
])  # fmt: skip
def test_a_list_outside_its_schema_is_refused_with_its_line(tmp_path, old, new, complaint):
    assert old in ENTRY
    with pytest.raises(DataError, match=complaint):
        entries(tmp_path, ENTRY.replace(old, new, 1))


def test_an_empty_list_expects_nothing_and_one_that_is_not_there_is_an_error(tmp_path):
    assert entries(tmp_path, "") == ()
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "no.toml")
