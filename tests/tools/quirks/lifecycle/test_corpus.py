"""Every log of the corpus gives what the file beside it says: failure, place, chip, compiler, kernel, entries."""

from __future__ import annotations

import re
from typing import Any

import pytest
from lifecycle_logs import CASES, FOLDER, NAMES, read, told

from portattn.errors import ArgumentError
from portattn.tools.quirks import failure_facts
from portattn.tools.quirks.drafts import find_known_failures
from portattn.tools.quirks.failure_log import normalise, patterns
from portattn.tools.quirks.recognise import split

_THREAD = re.compile(r"\b[\w.-]+/[\w.-]+#\d+")
_OURS = (
    "Real:", "made after", "made of", "the project's seed", "the text is that of", "what portattn keeps", "a build",
)  # fmt: skip


def expected(name: str) -> list[dict[str, Any]]:
    failures: list[dict[str, Any]] = told(name).get("failure", [])
    return failures


def test_there_are_many_and_each_has_a_source() -> None:
    assert len(NAMES) >= 80
    assert sorted(path.stem for path in FOLDER.glob("*.toml")) == NAMES
    threads = set()
    for name in NAMES:
        source = told(name)["source"]
        assert _THREAD.search(source) or source.startswith(_OURS), f"{name}: {source}"
        threads |= set(_THREAD.findall(source))
    assert len(threads) >= 40


@pytest.mark.parametrize("name", NAMES)
def test_what_is_recognised(name: str) -> None:
    found = split(normalise(read(name)))
    failures = expected(name)
    assert [one.failure.kind for one in found] == [one["kind"] for one in failures]
    for one, wanted in zip(found, failures, strict=True):
        failure = one.failure
        assert (failure.stage, failure.symptom, failure.line) == (wanted["stage"], wanted["symptom"], wanted["line"])
        assert wanted["cause"] in failure.cause
        assert failure.signature == wanted["signature"]
        assert failure.kind not in failure.also
        assert list(one.streams) == wanted.get("streams", [])
        assert (one.times, one.cut) == (wanted.get("times", 1), wanted.get("cut", False))
        if failure.symptom != "hang":
            assert re.search(failure.signature, one.text), "its own signature finds it again"
            assert any(word in one.text.splitlines()[one.at - 1] for word in failure.cause.split()[:3])


@pytest.mark.parametrize("name", NAMES)
def test_where_it_was_and_whose_it_is(name: str, registry) -> None:
    says = told(name)
    if "refused" in says or not expected(name):
        with pytest.raises(ArgumentError) as refused:
            failure_facts.from_log(read(name), name, registry, **says.get("named", {}))
        assert refused.value.argument == says.get("refused", "--from-log")
        return
    found = failure_facts.from_log(read(name), name, registry, **says.get("named", {}))
    for one, wanted in zip(found, expected(name), strict=True):
        where = f"{one.backend}:{one.arches[0] if one.arches else one.chip}"
        assert (where, one.compiler, one.function) == (wanted["target"], wanted["compiler"], wanted["kernel"])
        entries = [entry for entry in find_known_failures(one, registry) if entry.in_cause]
        shown = [f"{'is' if entry.is_it else 'looks like'} {entry.id}" for entry in entries]
        assert shown == wanted["entries"]
        assert len([entry for entry in entries if entry.is_it]) <= 1, "one failure is no two entries"


def test_every_row_of_the_table_is_tried() -> None:
    """Rows without a log of their own are tried by a line (test_recognise.py)."""
    lines = {kind for kind, _, _ in CASES["lines"]}
    kinds = {one["kind"] for name in NAMES for one in expected(name)}
    assert kinds | lines == {row.name for row in patterns().failure}
    assert not kinds & lines, "a log says more than a line"


def test_the_corpus_has_no_host_of_packages_and_no_folder_of_a_developer() -> None:
    for name in NAMES:
        text = read(name) + str(told(name))
        assert not re.search(r"pypi\.|download\.pytorch|(?<!runner)/work/|/tmp/wt-|files\.pythonhosted", text), name
