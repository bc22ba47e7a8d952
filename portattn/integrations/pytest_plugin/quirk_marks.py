"""The marker `portattn_quirk`: a test that must fail where a quirk of the registry applies, for the quirk's reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from portattn.config import current
from portattn.errors import PortattnError
from portattn.integrations.pytest_plugin import FIXTURE, QUIRK
from portattn.integrations.pytest_plugin.targets import target_of
from portattn.planning.registry import Registry
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.tools.own_kernels import CompileError
from portattn.tools.quirks.probe.results import SEEN, Outcome, matches

KEY = pytest.StashKey[tuple[Quirk, ...]]()  # of an item: the quirks that it must fail for


def resolve(items: list[pytest.Item]) -> None:
    """Find out for each marked item which of its quirks apply.

    Raises UsageError on an id that names no quirk, and on a test without the fixture, which has no target.
    """
    try:
        registry = Registry.load()
        forced = registry.overrides(current().quirks)
    except PortattnError as error:
        raise pytest.UsageError(str(error)) from None
    for item in items:
        named = [quirk for mark in item.iter_markers(QUIRK) for quirk in _quirks(item, mark, registry)]
        if FIXTURE not in getattr(item, "fixturenames", ()):
            raise pytest.UsageError(f"{item.nodeid}: the marker {QUIRK} needs the fixture {FIXTURE}, which it lacks")
        params = getattr(getattr(item, "callspec", None), "params", {})
        target = target_of(params.get(FIXTURE))
        if target is not None:
            found = tuple(quirk for quirk in named if _applies(quirk, target, *forced))
            item.stash[KEY] = found
            item.user_properties += [("portattn_target", target.name), ("portattn_toolchain", str(target.toolchain))]
            if found:
                item.user_properties.append(("portattn_quirks", ", ".join(quirk.id for quirk in found)))


def _quirks(item: pytest.Item, mark: pytest.Mark, registry: Registry) -> Iterator[Quirk]:
    if not mark.args or mark.kwargs or not all(isinstance(text, str) for text in mark.args):
        raise pytest.UsageError(f"{item.nodeid}: the marker {QUIRK} takes ids of quirks, as in {QUIRK}('rocm-0015')")
    for text in mark.args:
        try:
            yield registry.quirk(text, item.nodeid, QUIRK)
        except PortattnError as error:
            raise pytest.UsageError(str(error)) from None


def _applies(quirk: Quirk, target: Target, on: frozenset[str], off: frozenset[str]) -> bool:
    """Whether a quirk is one of a target and its toolchain, whatever portattn's own kernels and problems."""
    if quirk.id in off or not quirk.names_chip(target):
        return False
    return quirk.id in on or quirk.in_range(target.toolchain)


def judge(item: pytest.Item, call: Any, report: pytest.TestReport) -> None:
    """Change the report of a test that must fail: xfail for its reason; red where it passes or fails otherwise."""
    quirks = item.stash.get(KEY, ())
    if not quirks or item.config.option.runxfail or call.when == "teardown":
        return
    if report.skipped or hasattr(report, "wasxfail"):
        return
    ids = ", ".join(quirk.id for quirk in quirks)
    if call.excinfo is None:
        if call.when == "call":
            report.outcome = "failed"
            report.longrepr = "\n".join(_passed(quirk, item) for quirk in quirks)
        return
    found = next((quirk for quirk in quirks if _explains(quirk, call.excinfo.value)), None)
    if found is not None:
        report.outcome = "skipped"
        report.wasxfail = f"{found.id}: {found.title}"
    else:
        wanted = "; ".join(_wanted(quirk) for quirk in quirks)
        report.sections.append((QUIRK, f"expected to fail for {ids}, and fails for another reason than {wanted}"))


def _passed(quirk: Quirk, item: pytest.Item) -> str:
    properties = dict(item.user_properties)
    target, toolchain = properties["portattn_target"], properties["portattn_toolchain"]
    return (
        f"passes, though {quirk.id} applies to {target} with {toolchain}: {quirk.title}. The quirk may be retired, or "
        f"its range narrowed: `portattn quirks probe {quirk.id} --target {target} --toolchain {toolchain}` looks."
    )


def _wanted(quirk: Quirk) -> str:
    if quirk.evidence.signature:
        return f"its signature {quirk.evidence.signature!r}"
    return {
        "hang": "a compile that does not end",
        "wrong-result": "a failed assertion",
        "slow": "a failed assertion",
    }.get(quirk.symptom, "a signature, of which the entry has none")


def _explains(quirk: Quirk, error: BaseException) -> bool:
    """Whether a failure, or what it was raised from, is the one that a quirk describes."""
    return any(matches(quirk, *said) for one in _chain(error) for said in _said(one))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _said(error: BaseException) -> Iterator[tuple[Outcome, str, str]]:
    """A failure as a probe's arm: outcome, kind, text. Of a compile that told nothing about the compiler, nothing."""
    if isinstance(error, CompileError):
        if not error.unavailable:
            yield ("hang" if error.outcome == "hang" else "fail"), error.kind, error.log
    else:
        # An assertion says what no compiler does, as a probe's own `Seen`: wrong numbers, slow code.
        kind = SEEN if isinstance(error, AssertionError) else type(error).__name__
        yield "fail", kind, f"{type(error).__name__}: {error}"
