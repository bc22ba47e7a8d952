"""A verdict as JUnit XML, which CI systems show: a suite for each target and toolchain, a test case for each cell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from portattn.tools.matrix.cells import Cell, Run
from portattn.tools.matrix.snapshot import entry, word
from portattn.tools.matrix.verdict import RunFinding, Verdict

# What XML 1.0 cannot hold, escaped or not: a compiler's output may have it.
_ILLEGAL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
FAILURES = ("FAIL", "PASS", "NOTE", "NOT_RUN")  # any other status is an error of the compiler, not of its code
WHOLE = "whole run"  # the suite of findings about no column


def render(run: Run, cells: Sequence[Cell], verdict: Verdict) -> bytes:
    """The XML document. A case fails where the verdict has a finding about it; a NOTE or NOT_RUN is skipped."""
    found: dict[tuple[str, str, str], list[RunFinding]] = {}
    for finding in verdict.findings:
        found.setdefault((finding.target, finding.toolchain, finding.name), []).append(finding)
    suites: dict[str, list[ElementTree.Element]] = {}
    for cell in sorted(cells, key=lambda c: c.index):
        mine = found.pop((cell.target, cell.toolchain, cell.name), [])
        suites.setdefault(f"{cell.target} {cell.toolchain}", []).append(_case(cell, mine, verdict))
    for (target, toolchain, name), findings in found.items():  # cells that are gone, and the run as a whole
        column = f"{target} {toolchain}".strip() or WHOLE
        case = _element("testcase", classname=column, name=name or findings[0].kind, time="0")
        _failed(case, "failure", findings, "")
        suites.setdefault(column, []).append(case)
    root = _element("testsuites", name="portattn matrix")
    _count(root, [case for cases in suites.values() for case in cases])
    for name, cases in suites.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": name, "timestamp": run.date.isoformat()})
        _count(suite, cases)
        properties = ElementTree.SubElement(suite, "properties")
        for key, value in _properties(run).items():
            ElementTree.SubElement(properties, "property", {"name": key, "value": _clean(value)})
        suite.extend(cases)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _case(cell: Cell, findings: list[RunFinding], verdict: Verdict) -> ElementTree.Element:
    seen = entry(cell)
    case = _element(
        "testcase", classname=f"{cell.target} {cell.toolchain}", name=cell.name, time=f"{cell.seconds:.3f}"
    )  # fmt: skip
    expected = verdict.expected.get(cell.id)
    if findings:
        red = any(finding.kind == "red" for finding in findings)
        _failed(case, "failure" if not red or cell.status in FAILURES else "error", findings, cell.log)
    elif expected is not None:
        said = f"expected to fail until {expected.expires} ({expected.owner}): {expected.reason}"
        ElementTree.SubElement(case, "skipped", {"message": _clean(said)})
    elif cell.status != "PASS":
        ElementTree.SubElement(case, "skipped", {"message": _clean(f"{cell.status}: {cell.reason}")})
    output = ElementTree.SubElement(case, "system-out")
    output.text = _clean(f"{word(seen)}, path {seen.path or 'none'}, cell {cell.id}")
    return case


def _failed(case: ElementTree.Element, kind: str, findings: Sequence[RunFinding], log: str) -> None:
    first = findings[0]
    failed = ElementTree.SubElement(case, kind, {"type": first.kind, "message": _clean(first.text)})
    lines = [line for one in findings for line in (one.text, *(f"cause: {cause}" for cause in one.causes))]
    failed.text = _clean("\n".join(filter(None, (*lines, log))))


def _count(element: ElementTree.Element, cases: Sequence[ElementTree.Element]) -> None:
    element.set("tests", str(len(cases)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        element.set(name, str(sum(case.find(tag) is not None for case in cases)))
    element.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")


def _properties(run: Run) -> dict[str, str]:
    found = {"command": run.command, "portattn": run.portattn, "kernels": run.kernels}
    for number, identity in enumerate(run.identities):
        found |= {f"commit.{number}": identity.code(), f"host.{number}": str(identity.host)}
    return found


def _element(tag: str, **attributes: str) -> ElementTree.Element:
    return ElementTree.Element(tag, {name: _clean(value) for name, value in attributes.items()})


def _clean(text: str) -> str:
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)
