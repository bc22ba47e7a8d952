"""What a log says of chip, compiler and kernel is read from it; what it does not say stays unknown."""

import time

import pytest
from lifecycle_logs import CASES, facts_of, read

from portattn.errors import ArgumentError
from portattn.planning.target_names import bare_chips
from portattn.tools.quirks import failure_facts
from portattn.tools.quirks.draft_texts import title_of
from portattn.tools.quirks.failure_facts import excerpts, request_in
from portattn.tools.quirks.recognise import environment_in


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [*CASES["versions"], (f"triton=={'9' * 5000}", "triton", "")],
    ids=lambda text: text[:40],
)
def test_versions(text, name, version, registry):
    found = environment_in(text, "mlir", registry).versions.get(name)
    assert (found.value if found else "") == version


@pytest.mark.parametrize(("text", "chip"), CASES["chips"])
def test_names_of_chips(text, chip, registry):
    """By compilers, by drivers, and by texts that ask for another chip than the one that failed."""
    found = environment_in(text, "mlir", registry)
    backend, arch = (part.value if part else "" for part in (found.backend, found.arch))
    assert (f"{backend}:{arch}" if arch else f"{backend}/{found.chip}".removesuffix("/" if not backend else "")) == chip


def test_a_long_line_of_hexadecimal_digits_takes_no_time(registry):
    begun = time.process_time()
    assert not bare_chips("a100f4090" * 220_000, registry.arches)
    assert time.process_time() - begun < 0.3


def test_a_fork_is_not_taken_for_the_triton_that_it_reports(registry):
    """triton.__version__ of triton-ascend says 3.2.0 as well: alone it names no compiler of an NPU."""
    assert facts_of("ascend-3.2-tf32", registry).compiler == ""
    [with_version] = failure_facts.from_log(read("ascend-3.2-tf32") + "triton==3.2.0\n", "log", registry)
    assert with_version.compiler == ""
    [named] = failure_facts.from_log(read("ascend-3.2-tf32") + "triton-ascend==3.2.0 triton==3.2.0\n", "log", registry)
    assert named.compiler == "triton-ascend==3.2.0"


def test_what_is_named_counts_more_than_the_log(registry):
    found = facts_of("triton-3.2-sm_120", registry, target="cuda:sm_120", toolchain="triton==3.2.0,ptxas==12.4.99")
    assert (found.backend, found.arches, found.compiler) == ("cuda", ("sm_120",), "triton==3.2.0")
    assert found.components["ptxas"] == "12.4.99"


@pytest.mark.parametrize(
    ("name", "named", "argument"),
    [
        ("green", {}, "--from-log"), ("ascend-3.2-no-cann", {}, "--from-log"),
        ("triton-3.4-no-rocm-linker", {}, "--from-log"), ("triton-3.2-sm_120", {}, "--from-log"),
        ("triton-3.2-sm_120", {"backend": "tpu"}, "--backend"),
        ("triton-3.2-sm_120", {"backend": "rocm", "target": "cuda:sm_120"}, "--backend"),
        ("triton-3.2-sm_120", {"backend": "cuda", "toolchain": "gcc==14"}, "--toolchain"),
        ("triton-3.2-sm_120", {"target": "cuda:sm_1"}, "--target"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(name, named, argument, registry):
    with pytest.raises(ArgumentError) as refused:
        facts_of(name, registry, **named)
    assert refused.value.argument == argument


def test_a_log_that_names_no_chip_or_nothing_is_answered_with_what_to_give(registry):
    with pytest.raises(ArgumentError, match=r"is empty: did the compile fail\? Redirect standard error too \(2>&1\)"):
        failure_facts.from_log("\n", "build.log", registry)
    given = r"must name a chip .* give --target BACKEND:CHIP, or --backend .cuda, rocm, .*; recognised on line 1: Acc"
    with pytest.raises(ArgumentError, match=given):
        facts_of("triton-3.2-sm_120", registry)


def test_programs_in_a_log():
    text = read("triton-3.6-gfx950-stages")
    middle = text.index("tt.load") + 2000
    assert not excerpts(f"{text[:middle]}\n… 9000 bytes …\n{text[middle + 9000 :]}"), "a module that was cut is none"
    [module, *_] = excerpts(text)
    assert (module.kind, module.suffix) == ("ttgir", ".ttgir")
    assert module.text.startswith("#blocked")
    assert module.text.rstrip().endswith("#-}")
    assert "tritongpu-coalesce" in module.passes
    ptx = excerpts(read("ptxas-registers"))[0]
    assert ptx.text.startswith(".version ")
    assert "ptxas" not in ptx.text
    sources = excerpts(read("triton-3.9-block-pointers"))
    assert [(s.kind, s.compiles) for s in sources] == [("source", False)] * 2
    assert sources[0].text.startswith("def block_tile(base, rows, stride, D: tl.constexpr")


def test_a_program_that_a_log_names_is_read_where_it_is(tmp_path):
    path = tmp_path / "kernel.ttir"
    path.write_text("module {\n  tt.func public @f() {\n    tt.return\n  }\n}\n")
    [found] = excerpts(f"error: 'tt.load' op in {path}\nreproducer generated at /not/here.mlir")
    assert (found.kind, found.origin, found.text) == ("ttir", str(path), path.read_text())


def test_a_request_in_a_log():
    assert request_in(read("worker-time-out"))["target"] == ["hip", "gfx1201", 32]
    assert request_in('{"version": 1, "task": "compile", "signature": {"cut": ') is None


@pytest.mark.parametrize(
    "text",
    [
        "/usr/bin/node: Segmentation fault (core dumped)\n",
        "torch.distributed.elastic: failed (exitcode: -6) local_rank: 0 of binary: /usr/bin/python\n",
    ],
)
def test_a_process_that_ended_is_no_compiler_that_died(text, registry):
    with pytest.raises(ArgumentError, match="nothing names a compiler; give --backend"):
        failure_facts.from_log(text, "log", registry)
    [named] = failure_facts.from_log(text, "log", registry, backend="cuda")
    assert named.backend == "cuda"


def test_the_function_that_failed(registry):
    """An exception is no kernel's name; in what LLVM cannot select there is an address, which is no part of it."""
    assert environment_in("Triton compilation failed: OutOfResources: shared", "triton", registry).function is None
    assert environment_in("Triton compilation failed: my_kernel", "triton", registry).function.value == "my_kernel"
    text = (
        "LLVM ERROR: Cannot select: 0x55d0c8a3b2c0: v2f16 = fp_round 0x55d0c8a3b1f0, TargetConstant:i32<0>\n"
        "In function: dense_forward\n"
    )
    [found] = failure_facts.from_log(text, "log", registry, backend="cuda")
    assert found.function == "dense_forward"
    assert found.kernels
    assert title_of(found).startswith("the compiler dies: LLVM ERROR: Cannot select: v2f16 = fp_round")
