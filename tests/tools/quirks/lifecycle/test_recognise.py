"""Kinds of failures without a log of their own, signatures, and what is no failure; and the corpus of logs."""

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lifecycle_logs import CASES, FOLDER, NAMES, read, told
from planted_records import incident

from portattn.errors import ArgumentError
from portattn.tools.quirks import failure_facts
from portattn.tools.quirks.drafts import find_known_failures
from portattn.tools.quirks.failure_facts import failure_of
from portattn.tools.quirks.failure_log import normalise, patterns
from portattn.tools.quirks.recognise import generalise, recognise, split


@pytest.mark.parametrize(("kind", "symptom", "text"), [*CASES["lines"], *CASES["quoted"]])
def test_a_line_is_recognised(kind: str, symptom: str, text: str) -> None:
    failure = recognise(f"building\n{text}\n")
    assert (failure.kind, failure.symptom) == (kind, symptom)
    assert re.search(failure.signature, text)


# What either of Triton's two assemblers for NVIDIA says, by the kind that it is.
PTXAS = {
    "ptxas-code": "fatal   : (C7602) Insufficient registers (24) to compile instruction at line 460 in function f.",
    "ptxas-line": "/tmp/tmp1.ptx, line 47; error   : Unknown modifier '.instr'",
    "ptxas-fatal": "fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
    "ptxas-warning": "info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to",
    "shared-data": "error   : Entry function 'k' uses too much shared data (0xea60 bytes, 0xc000 max)",
}


@pytest.mark.parametrize("program", ["ptxas", "ptxas-blackwell"])
@pytest.mark.parametrize("kind", PTXAS)
def test_either_assembler_of_triton(kind: str, program: str) -> None:
    failure = recognise(f"{program} {PTXAS[kind]}\n{program} fatal   : Ptx assembly aborted due to errors\n")
    assert (failure.kind, failure.stage) == (kind, "cubin")
    assert "ptxas" not in failure.signature, "it is the same failure by either of them"
    assert re.search(failure.signature, f"ptxas {PTXAS[kind]}")


@pytest.mark.parametrize("place", ["triton-amdgpu-assembler:50:2: ", ""])
def test_what_amds_assembler_rejects(place: str) -> None:
    """Releases before 3.9 say no place. Other operands, or another LLVM, are no other bug; another instruction is."""
    raised = (
        '  File "/opt/triton/backends/amd/compiler.py", line 180, in assemble_amdgcn\nRuntimeError: AMD LLVM {}: {}\n'
    )
    signatures = []
    for said, code, revision in (
        ("invalid instruction", "bogus.instr s0, s0;", "6bc4aaf66-1"),
        ("invalid instruction", "bogus.instr s1, v7;", "0d3ba5c11-2"),
        ("invalid instruction", "v_dot4 v0;", "6bc4aaf66-1"),
        ("operands are not valid for this GPU or mode", "v_dot4 v0;", "6bc4aaf66-1"),
    ):
        text = f"{place}error: {said}\n\t{code}\n\t^\n"
        failure = recognise(text + raised.format(revision, "AMD assembler rejected generated AMDGCN"))
        assert (failure.kind, failure.stage) == ("amd-assembler", "hsaco")
        assert failure.cause == f"{said} {code.partition(' ')[0]}"
        assert re.search(failure.signature, text)
        signatures.append(failure.signature)
    assert (signatures[0], len(set(signatures))) == (signatures[1], 3)


def test_no_revision_of_llvm_is_in_a_signature() -> None:
    """Also where the assembler's own words are lost, and only the exception is left."""
    for said in ("AMD assembler rejected generated AMDGCN", "failed to create AMD target machine"):
        raised = f"RuntimeError: AMD LLVM 6bc4aaf66-1: {said}\n"
        failure = recognise(f'  File "/opt/triton/backends/amd/compiler.py", line 180, in f\n{raised}')
        assert (failure.cause, failure.signature) == (said, said)


def test_an_incident_has_the_assemblers_own_words() -> None:
    said = f"ptxas-blackwell {PTXAS['ptxas-code']}"
    made = incident(
        toolchain="triton==3.9.0", stage="cubin", symptom="compile-error",
        message="PTXASError at cubin: PTXAS error: Internal Triton PTX codegen error",
        log=f"Internal Triton PTX codegen error\n`ptxas` stderr:\n{said}\n",
    )  # fmt: skip
    failure = failure_of(made)
    assert failure.kind == "ptxas-code"
    assert failure.cause.startswith("(C7602) Insufficient registers")


def test_a_build_that_worked_is_not_a_failure() -> None:
    assert recognise(read("green")) is None
    assert recognise("") is None


@pytest.mark.parametrize(("one", "other"), CASES["alike"])
def test_what_varies_is_general(one: str, other: str) -> None:
    assert re.fullmatch(generalise(one), other)


@pytest.mark.parametrize(("one", "other"), CASES["unlike"])
def test_what_tells_failures_apart_is_kept(one: str, other: str) -> None:
    assert re.fullmatch(generalise(one), one)
    assert not re.search(generalise(one), other)


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=400))
def test_a_signature_matches_what_it_was_made_of(text: str) -> None:
    assert re.search(generalise(text), text)


def test_a_compiler_that_dies_after_its_error_has_crashed() -> None:
    error = "k.py:1:1: error: 'tt.load' op operation destroyed but still has uses\n"
    dead, raised = recognise(error + "Aborted (core dumped)\n"), recognise(error)
    assert (dead.symptom, raised.symptom) == ("compiler-crash", "compile-error")
    assert dead.signature == raised.signature


def test_a_long_log_takes_no_time() -> None:
    """Patterns must not go back and forth over it: 5 MB, without an error and then with one at its end."""
    lines = '  File "/x/triton/runtime/jit.py", line 1, in run\n    error: none\nnothing to see: 12\n' * 25_000
    begun = time.process_time()
    assert recognise(lines) is None
    assert recognise(lines + "LLVM ERROR: Cannot select: t7\n").kind == "llvm-error"
    assert time.process_time() - begun < 20


# Every log of the corpus gives what the file beside it says: failure, place, chip, compiler, kernel, entries.


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
        assert [f"{'is' if entry.is_it else 'looks like'} {entry.id}" for entry in entries] == wanted["entries"]
        assert len([entry for entry in entries if entry.is_it]) <= 1, "one failure is no two entries"


def test_every_row_of_the_table_is_tried() -> None:
    lines = {kind for kind, _, _ in CASES["lines"]}
    kinds = {one["kind"] for name in NAMES for one in expected(name)}
    assert kinds | lines == {row.name for row in patterns().failure}
    assert not kinds & lines, "a log says more than a line"


def test_the_corpus_has_no_host_of_packages_and_no_folder_of_a_developer() -> None:
    for name in NAMES:
        text = read(name) + str(told(name))
        assert not re.search(r"pypi\.|download\.pytorch|(?<!runner)/work/|/tmp/wt-|files\.pythonhosted", text), name
