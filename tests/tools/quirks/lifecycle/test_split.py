"""Several failures of one log: each once, in order, with the lines that tell of it and whose they are."""

import re
import time

import pytest
from lifecycle_logs import FOLDER, read

from portattn.tools.quirks.failure_facts import from_log
from portattn.tools.quirks.failure_log import normalise
from portattn.tools.quirks.recognise import LoggedFailure, split

PTXAS = "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"
KPACK = "AssertionError: gfx950 only accepts kpack == 1"
KPACK_TRACE = f"""\
Traceback (most recent call last):
  File "/opt/triton/backends/amd/compiler.py", line 71, in parse_options
    return HIPOptions(**args)
{KPACK}
"""


def found(text: str) -> list[LoggedFailure]:
    return split(normalise(text))


def kinds(text: str) -> list[str]:
    return [one.failure.kind for one in found(text)]


def test_one_after_the_other() -> None:
    text = f"RuntimeError: Internal Triton PTX codegen error\n{PTXAS}\nexit status 1\n{KPACK_TRACE}"
    first, second = found(text)
    assert (first.failure.kind, second.failure.kind) == ("ptxas-fatal", "exception")
    assert (first.failure.line, second.failure.line) == (2, 7)
    assert [[words in one.text for words in (PTXAS, KPACK)] for one in (first, second)] == [
        [True, False],
        [False, True],
    ]
    assert (second.text.splitlines()[second.at - 1], first.failure.also) == (KPACK, ("ptxas-failed",))


def test_what_wraps_a_failure_or_passes_it_on_is_not_another_one() -> None:
    """MLIR writes to the terminal itself, which has no rank; without words of its own the exception is all."""
    error = "k.py:1:1: error: 'tt.load' op operation destroyed but still has uses\nLLVM ERROR: operation destroyed\n"
    wrapped = f"{error}RuntimeError: PassManager::run failed\n\nThe above exception was the direct cause\nAborted\n"
    [one] = found(wrapped)
    assert one.failure.kind == "mlir-op"
    assert set(one.failure.also) >= {"llvm-error", "pass-manager"}
    said = "RuntimeError: PassManager::run failed\n"
    [one] = found(f"k.py:1:1: error: 'tt.load' op is bad\n[rank0]: {said}")
    assert (one.failure.kind, one.streams) == ("mlir-op", ())
    assert kinds(f"[rank0]: {said}[rank1]: {said}") == ["pass-manager"]


def test_the_same_again_is_counted() -> None:
    [one] = found(KPACK_TRACE * 3)
    assert (one.times, one.failure.line) == (3, 4)
    [one] = found("".join(f"[rank{rank}]: {line}\n" for line in KPACK_TRACE.splitlines() for rank in (1, 0)))
    assert (one.times, one.streams) == (2, ("1", "0"))


def test_ranks_with_failures_of_their_own() -> None:
    ranks = [KPACK_TRACE.splitlines(), ["RuntimeError: x", f"  {PTXAS}", "a", "b"]]
    text = "".join(f"[rank{r}]: {lines[n]}\n" for n in range(4) for r, lines in enumerate(ranks))
    assert {(one.failure.kind, one.streams) for one in found(text)} == {("exception", ("0",)), ("ptxas-fatal", ("1",))}


def test_something_that_is_not_installed_beside_a_failure() -> None:
    text = f"{KPACK_TRACE}RuntimeError: ASCEND_HOME_PATH is not set, source set_env.sh\n"
    assert [bool(one.failure.not_a_bug) for one in found(text)] == [False, True]


@pytest.mark.parametrize("end", range(1, 8))
def test_a_log_that_ends_anywhere(end: int) -> None:
    whole = read("triton-8488")
    at = whole.index("Compile the program") - 5 * end
    [one] = found(whole[:at])
    assert (one.cut, one.failure.kind) == (True, "ptxas-code")
    assert re.search(one.failure.signature, whole), "what is left of it finds the whole one"
    assert not any(one.cut for text in (whole, whole.rstrip("\n")) for one in found(text))


def test_many_failures_take_no_time() -> None:
    text = (KPACK_TRACE + f"{PTXAS}\nexit status 1\n") * 2_000
    begun = time.process_time()
    assert [one.times for one in found(text)] == [2_000, 2_000]
    assert time.process_time() - begun < 20


# ---- pytest


def reported(heading: str, said: str, exception: str = "RuntimeError: PassManager::run failed") -> str:
    return f"__ {heading} __\nE   {exception}\n--- Captured stderr call ---\n{said}\n"


DOMINATES = "/w/dense.py:141:27: error: operand #1 does not dominate this use"
MATRIX = "/w/dense.py:99:27: error: 'tt.dot' op expected the first operand to be a matrix"
REGISTER = "error: couldn't allocate input reg for constraint 'v' at line 1"
FRONT_END = "triton.compiler.errors.CompilationError: at 12:8:\nE       acc = 1\nE             ^\nE   ValueError('no')"


def test_a_tests_heading_belongs_to_its_own_failure(registry) -> None:
    text = (
        "=== FAILURES ===\n" + reported("test_attn[gfx942]", DOMINATES) + reported("test_attn[gfx1100]", MATRIX)
        + reported("test_other[gfx950]", "3 is not 4", "AssertionError: 3 != 4") + "=== 3 failed in 12.01s ===\n"
    )  # fmt: skip
    first, second = found(text)
    assert first.text.splitlines()[0] == "__ test_attn[gfx942] __"
    assert first.text.splitlines()[first.at - 1] == DOMINATES
    assert (first.test, second.test) == ("__ test_attn[gfx942] __", "__ test_attn[gfx1100] __")
    assert "gfx950" not in first.rest
    assert [one.arches for one in from_log(text, "log", registry)] == [("gfx942",), ("gfx1100",)]


def test_the_heading_of_its_test_says_more_than_other_tests_and_the_source_that_pytest_shows(registry) -> None:
    text = reported("test_attn[gfx942]", DOMINATES) + reported("test_other[gfx950]", "", "AssertionError: 3 != 4")
    [one] = from_log(text, "log", registry)
    assert (one.arches, one.log.splitlines()[one.at - 1]) == (("gfx942",), DOMINATES)
    source = '    @pytest.mark.parametrize("chip", ["gfx942", "gfx950"])\n'
    [one] = from_log(f"__ test_attn[gfx950] __\n{source}E   RuntimeError: x\n{DOMINATES}\n", "log", registry)
    assert one.arches == ("gfx950",)


def test_failures_of_one_test_all_have_its_heading() -> None:
    text = reported("test_attn[gfx942]", f"{DOMINATES}\nRuntimeError: PassManager::run failed\n{MATRIX}")
    first, second = found(text)
    assert "tt.dot" not in first.text
    assert second.text.splitlines()[0] == "__ test_attn[gfx942] __"
    assert second.text.splitlines()[second.at - 1] == MATRIX
    [one] = found(f"__ test_attn[gfx942] __\n_ _ _ _ _ _\nE   RuntimeError: x\n_ _ _ _ _ _\n{DOMINATES}\n")
    assert one.test == "__ test_attn[gfx942] __", "a separator is no heading"


def test_the_stage_of_another_tests_failure_is_not_this_ones() -> None:
    text = reported("test_a[gfx942]", REGISTER) + reported("test_b[gfx942]", "", FRONT_END)
    assert [(one.failure.kind, one.failure.stage) for one in found(text)] == [
        ("no-such-register", "unknown"), ("compilation-error", "parse"),
    ]  # fmt: skip


# ---- the command line


def test_each_failure_is_drafted(portattn, tmp_path) -> None:
    log = FOLDER / "three-failures.log"
    called = portattn("quirks", "new", "--from-log", log, "--out", tmp_path, "--no-replay", "--json", exits=0)
    made = called.json["failures"]
    assert [(one["number"], one["failure"]["kind"], one["id"].partition("-")[0]) for one in made] == [
        (1, "ptxas-fatal", "cuda"), (2, "exception", "rocm"), (3, "out-of-resources", "cuda"),
    ]  # fmt: skip
    assert called.json["of"] == len({one["id"] for one in made if one["files"]}) == 3


def test_one_of_several_is_chosen(portattn, tmp_path) -> None:
    log = FOLDER / "three-failures.log"
    called = portattn("quirks", "new", "--from-log", log, "--failure", "2", "--out", tmp_path, "--no-replay", exits=0)
    assert "failure 2 of 3, from line 11 on" in called.out
    assert "2 other failures in the log" in called.out
    assert len(list(tmp_path.glob("*/*.toml"))) == 1
    for number in ("0", "4"):
        wrong = portattn("quirks", "new", "--from-log", log, "--failure", number, "--out", tmp_path, "--json")
        assert (wrong.status, wrong.json["error"]["argument"]) == (2, "--failure")


def test_a_known_one_among_several_is_status_1(portattn, tmp_path) -> None:
    log = tmp_path / "build.log"
    log.write_text(f"{PTXAS}\nexit status 1\n{KPACK_TRACE}triton==3.4.0 for gfx950\n")
    where = ("--target", "rocm:gfx950", "--toolchain", "triton==3.4.0", "--kernel", "decode_split")
    line = ("quirks", "new", "--from-log", log, *where, "--out", tmp_path / "out", "--no-replay")
    drafted, known = portattn(*line, "--json", exits=1).json["failures"]
    assert drafted["files"]
    assert (known["files"], known["known"][0]["id"], known["known"][0]["is_it"]) == ([], "rocm-0015-kpack", True)
    assert "this is rocm-0015-kpack" in portattn(*line, "--failure", "2", exits=1).out


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("RuntimeError: ROCm linker /opt/rocm/ld.lld not found\n", "install ROCm's LLVM"),
        ("AssertionError: num_warps must be a power of 2\n", "the compiler refuses an option of the call"),
        ("Internal Triton ZEBIN codegen error: no such instruction\n", "must be of a compiler that a backend has"),
    ],
)
def test_what_is_no_backends_failure_is_reported_and_not_drafted(portattn, tmp_path, other, why) -> None:
    log = tmp_path / "build.log"
    log.write_text(f"{KPACK_TRACE}{other}")
    called = portattn("quirks", "new", "--from-log", log, "--out", tmp_path / "out", "--no-replay", exits=0)
    assert f"not drafted: {why}" in called.out
    assert len(list((tmp_path / "out").glob("*/*.toml"))) == 1
