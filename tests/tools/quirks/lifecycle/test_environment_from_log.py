"""What a log says of chip, compiler and kernel is read from it; what it does not say stays unknown."""

from __future__ import annotations

from typing import Any

import pytest
from lifecycle_logs import facts_of, read

from portattn.errors import ArgumentError
from portattn.tools.quirks.lifecycle import failure_report
from portattn.tools.quirks.lifecycle.entry import title_of
from portattn.tools.quirks.lifecycle.environment_from_log import surroundings
from portattn.tools.quirks.lifecycle.failure_report import excerpts, request_in


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [
        ("[pip3] triton==3.3.1", "triton", "3.3.1"),
        ("pytorch-triton-rocm==3.2.0+git0", "triton", "3.2.0+git0"),
        ("Triton version: 3.7.1", "triton", "3.7.1"),
        ("Found triton-3.4.0.dist-info", "triton", "3.4.0"),
        ("triton_ascend 3.2.1rc1", "triton-ascend", "3.2.1rc1"),
        ("Cuda compilation tools, release 12.8, V12.8.93", "ptxas", "12.8.93"),
        ("ROCM used to build PyTorch: 6.4.43482", "rocm", "6.4.43482"),
        ("CANN version: 8.2.RC1", "cann", "8.2rc1"),
        ("| NVIDIA-SMI 550.54 Driver Version: 550.54.15 |", "driver", "550.54.15"),
        ("PyTorch version: 2.9.0+cu126", "torch", "2.9.0+cu126"),
        ("triton==3.3.1 and later triton==3.4.0", "triton", None),
        ("triton==banana", "triton", None),
        ("triton                            3.5.0+gitd2aec542", "triton", "3.5.0+gitd2aec542"),
        ("- `triton`: 3.7.0", "triton", "3.7.0"),
        ("triton_kernels                    1.0.0", "triton", None),
        pytest.param(f"triton=={'9' * 5000}", "triton", None, id="more digits than Python reads"),
    ],
)
def test_versions(text: str, name: str, version: str | None, registry: Any) -> None:
    told = surroundings(text, "mlir", registry).versions.get(name)
    assert (told.value if told else None) == version


def test_a_fork_is_not_taken_for_the_triton_that_it_reports(registry) -> None:
    """triton.__version__ of triton-ascend says 3.2.0 as well: alone it names no compiler of an NPU."""
    found = facts_of("ascend-3.2-tf32", registry)
    assert found.compiler == ""
    [with_version] = failure_report.from_log(read("ascend-3.2-tf32") + "triton==3.2.0\n", "log", registry)
    assert with_version.compiler == ""
    [named] = failure_report.from_log(read("ascend-3.2-tf32") + "triton-ascend==3.2.0 triton==3.2.0\n", "log", registry)
    assert named.compiler == "triton-ascend==3.2.0"


def test_two_chips_in_a_log_are_no_chip(registry) -> None:
    found = surroundings("built for gfx942 and gfx950", "mlir", registry)
    assert found.arch is None
    assert surroundings("built for gfx942, gfx942", "mlir", registry).arch.value == "gfx942"


def test_a_chip_that_portattn_does_not_know_is_said(registry) -> None:
    found = surroundings('module attributes {ttg.target = "hip:gfx1153"} {', "mlir", registry)
    assert (found.backend.value, found.arch, found.chip) == ("rocm", None, "gfx1153")


def test_what_is_named_counts_more_than_the_log(registry) -> None:
    found = facts_of("triton-3.2-sm_120", registry, target="cuda:sm_120", toolchain="triton==3.2.0,ptxas==12.4.99")
    assert (found.backend, found.arches, found.compiler) == ("cuda", ("sm_120",), "triton==3.2.0")
    assert found.components["ptxas"] == "12.4.99"


@pytest.mark.parametrize(
    ("name", "named", "argument"),
    [
        ("green", {}, "--from-log"),
        ("ascend-3.2-no-cann", {}, "--from-log"),
        ("triton-3.4-no-rocm-linker", {}, "--from-log"),
        ("triton-3.2-sm_120", {}, "--from-log"),
        ("triton-3.2-sm_120", {"backend": "tpu"}, "--backend"),
        ("triton-3.2-sm_120", {"backend": "rocm", "target": "cuda:sm_120"}, "--backend"),
        ("triton-3.2-sm_120", {"backend": "cuda", "toolchain": "gcc==14"}, "--toolchain"),
        ("triton-3.2-sm_120", {"target": "cuda:sm_1"}, "--target"),
    ],
)
def test_what_cannot_be_used_is_refused(name: str, named: dict[str, str], argument: str, registry) -> None:
    with pytest.raises(ArgumentError) as refused:
        facts_of(name, registry, **named)
    assert refused.value.argument == argument


def test_a_log_that_names_no_chip_is_answered_with_what_to_give(registry) -> None:
    with pytest.raises(
        ArgumentError, match=r"must name a chip .* give --target BACKEND:CHIP, or --backend .cuda, rocm, "
    ):
        facts_of("triton-3.2-sm_120", registry)


def test_programs_in_a_log() -> None:
    [module, *_] = excerpts(read("triton-3.6-gfx950-stages"))
    assert (module.kind, module.suffix) == ("ttgir", ".ttir")
    assert module.text.startswith("#blocked")
    assert module.text.rstrip().endswith("#-}")
    assert "tritongpu-coalesce" in module.passes
    ptx = excerpts(read("ptxas-registers"))[0]
    assert ptx.text.startswith(".version ")
    assert "ptxas" not in ptx.text
    sources = excerpts(read("triton-3.9-block-pointers"))
    assert [(s.kind, s.compiles) for s in sources] == [("source", False)] * 2
    assert sources[0].text.startswith("def block_tile(base, rows, stride, D: tl.constexpr")


def test_a_program_that_a_log_names_is_read_where_it_is(tmp_path) -> None:
    path = tmp_path / "kernel.ttir"
    path.write_text("module {\n  tt.func public @f() {\n    tt.return\n  }\n}\n")
    [found] = excerpts(f"error: 'tt.load' op in {path}\nreproducer generated at /not/here.mlir")
    assert (found.kind, found.origin, found.text) == ("ttir", str(path), path.read_text())


def test_a_module_that_was_cut_is_no_program() -> None:
    text = read("triton-3.6-gfx950-stages")
    middle = text.index("tt.load") + 2000
    assert not excerpts(f"{text[:middle]}\n… 9000 bytes …\n{text[middle + 9000 :]}")


def test_a_request_in_a_log() -> None:
    request = request_in(read("worker-time-out"))
    assert request is not None
    assert request["target"] == ["hip", "gfx1201", 32]
    assert request_in('{"version": 1, "task": "compile", "signature": {"cut": ') is None


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("error   : Feature '.tile::gather4' requires .target sm_100 or higher", None),
        ("this kernel needs gfx950", None),
        ("is only supported on sm_90", None),
        ("on sm_90+ it is fast", None),
        ("use wgmma instead of sm_80's mma", None),
        ("on gfx942: needs gfx950", "gfx942"),
        ("requires .target sm_100 or higher\nbuilt for sm_90", "sm_90"),
        ("Feature 'x' is not supported on .target sm_80", "sm_80"),
        ("AssertionError: gfx950 only accepts kpack == 1", "gfx950"),
    ],
)
def test_a_chip_that_something_asks_for_is_not_the_one_that_it_failed_on(registry, text: str, arch: str | None) -> None:
    told = surroundings(text, "mlir", registry).arch
    assert (told.value if told else None) == arch


@pytest.mark.parametrize(
    ("text", "backend", "arch", "chip"),
    [
        ('ttg.target = "hip:gfx90c"', "rocm", None, "gfx90c"),  # another chip than gfx90a, and no variant of one
        ('ttg.target = "cuda:75"', "cuda", "sm_75", ""),  # known, though no kernel is planned for it
        ('ttg.target = "cuda:52"', "cuda", None, "sm_52"),
        (".target sm_121a, debug", "cuda", "sm_121", ""),
        ("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", "cuda", "sm_121", ""),
        ("error: unsupported target: 'gfx906'", "rocm", "gfx906", ""),
        (".target sm_88a", None, None, "sm_88"),
        ("GPUTarget('npu', 'Ascend910B3', 0)", "ascend", "ascend910b3", ""),
        ("on an Ascend910B2C of ours", "ascend", "ascend910b2", ""),
        ("on an Ascend910_9362 of ours", "ascend", "ascend910_93", ""),
        ("clang -mcpu=native -mcpu=gfx1200", "rocm", "gfx1200", ""),  # what begins like no arch is no chip
        ('{"name": "x86", "version": "3"}', None, None, ""),
    ],
)
def test_other_names_of_chips(registry, text: str, backend: str | None, arch: str | None, chip: str) -> None:
    found = surroundings(text, "mlir", registry)
    told = [part.value if part else None for part in (found.backend, found.arch)]
    assert (*told, found.chip) == (backend, arch, chip)


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("NVIDIA H100 80GB HBM3, triton==3.6.0", "cuda:sm_90"),
        ("| 0  NVIDIA A100-SXM4-80GB          On |", "cuda:sm_80"),
        ("| 0  NVIDIA A100-SXM...             On |", "cuda:sm_80"),  # as nvidia-smi cuts it
        ("INFO: device Ascend 910B2, triton-ascend 3.2.0", "ascend:ascend910b2"),
        ("AMD Radeon RX 7900 XTX gfx1100", "rocm:gfx1100"),
        ("rank 0: NVIDIA H100, rank 1: NVIDIA H200", "cuda:sm_90"),
        ("GPU: NVIDIA A100-SXM4-80GB\nerror: requires .target sm_90 or higher", "cuda:sm_80"),
        ("NVIDIA H100 and NVIDIA A100", None),
        ("NVIDIA H100; AMD Instinct MI300X in the next rack", None),
        ("an Ascend 910B of ours", None),  # a family of several chips
        ("this needs an NVIDIA H100", None),
        ("GPU 3080 MB, max 395, NVIDIA-SMI 550.54, AMD EPYC 7402, AMD LLVM 6bc4aaf66", None),
    ],
)
def test_what_a_driver_calls_a_chip(registry, text: str, arch: str | None) -> None:
    found = surroundings(text, "mlir", registry)
    told = f"{found.backend.value}:{found.arch.value}" if found.backend and found.arch else None
    assert told == arch


def test_of_two_makers_the_one_whose_compiler_failed(registry) -> None:
    text = (
        'NVIDIA H100; AMD Instinct MI300X in the next rack\n  File "/opt/triton/backends/nvidia/compiler.py", line 1\n'
    )
    found = surroundings(text, "mlir", registry)
    assert (found.backend.value, found.arch.value) == ("cuda", "sm_90")
    assert found.arch.words == "NVIDIA H100"


@pytest.mark.parametrize(
    "text",
    [
        "/usr/bin/node: Segmentation fault (core dumped)\n",
        "torch.distributed.elastic: failed (exitcode: -6) local_rank: 0 of binary: /usr/bin/python\n",
    ],
)
def test_a_process_that_ended_is_no_compiler_that_died(text: str, registry: Any) -> None:
    with pytest.raises(ArgumentError, match="nothing names a compiler; give --backend"):
        failure_report.from_log(text, "log", registry)
    [named] = failure_report.from_log(text, "log", registry, backend="cuda")
    assert named.backend == "cuda"


def test_an_exception_is_no_kernels_name(registry: Any) -> None:
    assert surroundings("Triton compilation failed: OutOfResources: shared", "triton", registry).function is None
    told = surroundings("Triton compilation failed: my_kernel", "triton", registry).function
    assert told is not None
    assert told.value == "my_kernel"


def test_the_function_and_the_address_in_what_llvm_cannot_select(registry: Any) -> None:
    text = (
        "LLVM ERROR: Cannot select: 0x55d0c8a3b2c0: v2f16 = fp_round 0x55d0c8a3b1f0, TargetConstant:i32<0>\n"
        "In function: dense_forward\n"
    )
    [found] = failure_report.from_log(text, "log", registry, backend="cuda")
    assert found.function == "dense_forward"
    assert found.kernels
    assert title_of(found).startswith("the compiler dies: LLVM ERROR: Cannot select: v2f16 = fp_round")
