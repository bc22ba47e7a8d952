"""A failure is an entry's where everything agrees; where anything differs, or is not known, it only looks like one."""

import datetime

import msgspec
import planted_records
import pytest
from lifecycle_logs import facts_of, read

from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem
from portattn.schema.quirk import Retirement
from portattn.tools.quirks import failure_facts
from portattn.tools.quirks.drafts import KnownFailure, find_known_failures

STAGES = {"toolchain": "triton==3.6.0", "kernel": "dense_forward"}


def entry(found: list[KnownFailure], quirk_id: str) -> KnownFailure:
    return next(one for one in found if one.id == quirk_id)


def test_a_failure_is_an_entrys_where_all_agrees(registry) -> None:
    first, *others = find_known_failures(facts_of("triton-3.6-gfx950-stages", registry, **STAGES), registry)
    assert (first.id, first.is_it, first.in_range) == ("rocm-0001-four-stages", True, True)
    assert str(first).startswith("this is rocm-0001-four-stages: ")
    assert "its work-around should have been applied where num_stages = 4" in first.says
    assert [(one.id, one.is_it, one.but, one.says) for one in others] == [
        (name, False, f"its chips are {chips}, and this is gfx950", "if it is, add the chip to its file")
        for name, chips in (("rocm-0101-four-stages-rdna3", "rdna3"), ("rocm-0201-four-stages-rdna4", "gfx1200"))
    ]


@pytest.mark.parametrize(
    ("named", "in_range", "but"),
    [
        ({"toolchain": "triton==3.6.0"}, False, "its kernels are dense_forward, decode_split"),
        ({"toolchain": "triton==3.6.0", "kernel": "sparse_split"}, False, "and this is sparse_split"),
        ({"kernel": "dense_forward"}, None, "the log names no version: give --toolchain"),
        (STAGES | {"toolchain": "triton==3.7.1"}, False, "its range is triton >=3.5.1,<3.7, and this is 3.7.1"),
        (STAGES | {"target": "rocm:gfx942"}, False, "its chips are gfx950, and this is gfx942"),
    ],
)
def test_what_differs_is_said(registry, named: dict[str, str], in_range: bool | None, but: str) -> None:
    known = find_known_failures(facts_of("triton-3.6-gfx950-stages", registry, **named), registry)
    found = entry(known, "rocm-0001-four-stages")
    assert (found.is_it, found.in_range, but in found.but) == (False, in_range, True)
    assert str(found).startswith("this looks like rocm-0001-four-stages: ")
    assert f"(because {found.because}; but {found.but})" in str(found)


def test_another_stage_is_another_failure(registry) -> None:
    found = facts_of("triton-3.6-gfx950-stages", registry, **STAGES)
    for stage, said in (("llir", "this is llir"), ("unknown", "the log does not tell in which this was")):
        later = msgspec.structs.replace(found, failure=msgspec.structs.replace(found.failure, stage=stage))
        one = entry(find_known_failures(later, registry), "rocm-0001-four-stages")
        assert (one.is_it, one.but) == (False, f"its stage is ttgir, and {said}")
    # An entry without a stage is only looked like.
    quirk = registry.quirks["rocm-0015-kpack"]
    silent = msgspec.structs.replace(quirk, evidence=msgspec.structs.replace(quirk.evidence, stage=""))
    now = msgspec.structs.replace(registry, quirks={quirk.id: silent})
    found = facts_of("triton-3.4-kpack", registry, toolchain="triton==3.4.0", kernel="decode_split")
    [one] = find_known_failures(found, now)
    assert (one.is_it, one.but) == (False, "its file does not say in which stage of the compiler it is seen")
    [one] = find_known_failures(found, registry)
    assert one.is_it


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("ascend-histogram", "paged_split"), ("ascend-histogram", "mla_split"),  # MLIR: an operation is not legal
        ("adapter-dies-wordless", "sparse_split"),
        # triton-ascend says "AddPtrOp produced by unsupported operation" of the seed's crash, too.
        ("ascend-3.2-pointer-if", "sparse_split"),
    ],
)  # fmt: skip
def test_what_only_shares_words_with_an_entry_is_no_entrys(registry, name: str, kernel: str) -> None:
    found = facts_of(name, registry, toolchain="triton-ascend==3.1.0", kernel=kernel)
    assert find_known_failures(found, registry) == []


def test_a_full_buffer_is_no_score_tiles(registry) -> None:
    for name in ("triton-ascend-302", "ascend-pytorch-102", "vllm-ascend-8037"):
        named = {"target": "ascend:ascend910b2", "toolchain": "triton-ascend==3.2.0", "kernel": "dense_forward"}
        assert find_known_failures(facts_of(name, registry, **named), registry) == []


@pytest.mark.parametrize(
    ("log", "quirk_id"),
    [
        ("seed-ascend-sparse", "ascend-0014-sparse-reshape-crash"),
        ("seed-ascend-sparse-paged", "ascend-0015-sparse-paged-div-0"),
    ],
)
def test_the_seeds_ascend_logs_are_known(registry, log: str, quirk_id: str) -> None:
    (old, *others), (new, *_) = (
        find_known_failures(facts_of(log, registry, toolchain=f"triton-ascend=={v}", kernel="sparse_split"), registry)
        for v in ("3.1.0", "3.2.0")
    )
    assert (old.id, old.is_it, old.in_range, others) == (quirk_id, True, True, [])
    assert (new.is_it, new.in_range) == (False, False)
    assert "its range is triton-ascend <3.2.0, and this is 3.2.0" in new.but
    assert new.says.startswith("if it is, its range is too narrow")
    unknown, *_ = find_known_failures(facts_of(log, registry), registry)
    assert (unknown.is_it, unknown.in_range) == (False, None)


def test_amounts_are_told_apart_by_conditions_only(registry) -> None:
    """Every kernel that is too large has the words: four entries have them, and a log does not say which it is."""
    named = {"toolchain": "triton==3.6.0", "kernel": "dense_forward", "target": "cuda:sm_86"}
    found = find_known_failures(facts_of("out-of-resources", registry, **named), registry)
    fitting = [one for one in found if one.in_range]
    assert len(fitting) > 1
    assert not any(one.is_it for one in found)
    assert all("which the log does not tell" in one.but for one in fitting)


def incident(registry, num_stages: int, **changed) -> failure_facts.Facts:
    fields = {
        "target": "rocm:gfx950", "symptom": "compile-error",
        "message": "RuntimeError at ttgir: PassManager::run failed",
        "log": read("triton-3.6-gfx950-stages"), "lowering": Lowering(), "launch": Launch(num_stages=num_stages),
        "problem": Problem(batch=2, heads_q=8, heads_k=8, seq_q=64, seq_k=64, head_dim=64),
    }  # fmt: skip
    return failure_facts.from_incident(planted_records.incident(**(fields | changed)), [], registry)


def test_an_incident_knows_its_conditions(registry) -> None:
    four = entry(find_known_failures(incident(registry, 4), registry), "rocm-0001-four-stages")
    assert four.is_it
    assert "where num_stages" not in four.says, "it is known to be so"
    five = entry(find_known_failures(incident(registry, 5), registry), "rocm-0001-four-stages")
    assert (five.is_it, five.in_range) == (False, False)
    assert five.but == "it holds only where num_stages = 4, which is not so here"


def test_words_elsewhere_in_a_log_are_not_its_cause(registry) -> None:
    text = "rocm: gfx950 only accepts kpack == 1\n" + read("triton-3.6-gfx950-stages")
    [found] = failure_facts.from_log(text, "log", registry, **STAGES)
    one = entry(find_known_failures(found, registry), "rocm-0015-kpack")
    assert (one.is_it, one.in_cause) == (False, False)
    assert "its signature is in the log, and not in what went wrong" in one.but


@pytest.mark.parametrize("name", ["MLIRCompilationError", "triton.compiler.errors.CompilationError"])
@pytest.mark.parametrize("said", ["something unheard of", "failed to legalize operation 'x'"])
def test_an_exceptions_name_alone_says_nothing(registry, name: str, said: str) -> None:
    found = incident(
        registry, 1, kernel="decode_split", target="ascend:ascend910b2", toolchain="triton-ascend==3.1.0",
        stage="ttadapter", message=f"{name}: {said}",
        log=f'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n{name}: {said}\n',
    )  # fmt: skip
    assert find_known_failures(found, registry) == []


def test_a_tombstone_is_looked_like(registry) -> None:
    old = registry.quirks["rocm-0015-kpack"]
    buried = msgspec.structs.replace(
        old, retired=Retirement(date=datetime.date(2026, 11, 1), reason="gone", fixed_in="triton==3.5.1")
    )
    now = msgspec.structs.replace(registry, quirks={}, retired={old.id: buried})
    [found] = find_known_failures(facts_of("triton-3.4-kpack", registry, toolchain="triton==3.6.0"), now)
    assert (found.is_it, found.in_range) == (False, False)
    assert "it was retired on 2026-11-01, fixed in triton==3.5.1" in found.but
    assert found.says == "if it is, it is back: the draft logs it anew"
