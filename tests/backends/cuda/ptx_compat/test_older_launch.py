"""PTX texts read, arguments built, and launches through a stand-in for the CUDA driver."""

import ast
import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from fake_cuda import FakeCuda

from portattn import kernels
from portattn.backends.cuda import ptx_compat
from portattn.backends.cuda.ptx_compat import BadPtx, CudaDriver, CudaError, PtxCode, arguments, fits, read, run
from portattn.errors import PortattnError
from portattn.launch import kernel_calls
from portattn.launch.kernelcall import KernelCall, signature
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.lowering import Launch
from portattn.testing import canary
from portattn.testing.executor import request_of
from portattn.testing.verdict import call_of, plan_of
from portattn.tools import lab
from portattn.worker.client import Worker

PARAMETERS = ("u64 .ptr .global .align 1", "f32", "u32", "u64", "u64 .ptr .global .align 1")
TYPES = {"x": "*fp16", "scale": "fp32", "n": "i32", "far": "i64"}
TENSOR = torch.zeros(64)
VALUES: dict[str, Any] = {"n": -7, "x": TENSOR, "far": 2**40, "scale": 0.25}  # by name: the order is the kernel's


def text(target="sm_80", parameters=PARAMETERS):
    lines = ",\n".join(f"\t.param .{kind} entry_param_{n}" for n, kind in enumerate(parameters))
    return (
        f"//\n// .version 1.0, of a comment\n.version 8.7\n.target {target}\n.address_size 64\n"
        f".extern .shared .align 16 .b8 global_smem[];\n/* .entry none( */\n"
        f".visible .entry entry(\n{lines}\n)\n.reqntid 128, 1, 1\n{{\n\tret;\n}}\n"
    )


def code(ptx, **changes):
    empty = signature(KernelCall("m", "f", (1,), {}, {}, Launch(block_m=16, block_n=16, num_warps=4, num_stages=1)))
    return PtxCode(**({"text": ptx, "shared": 0, "num_warps": 4, "scratch": 0, "signature": empty} | changes))


def test_a_text_says_what_it_needs():
    ptx = read(text())
    assert (ptx.version, ptx.target, ptx.capability, ptx.portable) == ("8.7", "sm_80", 80, True)
    assert (ptx.entry, ptx.threads) == ("entry", 128)
    assert [(one.size, one.floating) for one in ptx.parameters] == [
        (8, False), (4, True), (4, False), (8, False), (8, False)
    ]  # fmt: skip
    for target, capability in (("sm_90a", 90), ("sm_100f", 100), ("sm_120a", 120)):
        bound = read(text(target))
        assert (bound.capability, bound.portable) == (capability, False)
    assert read(text(parameters=())).parameters == ()
    assert read(text().replace(".reqntid 128, 1, 1", "")).threads == 0
    assert read(text().replace("128, 1, 1", "32, 4")).threads == 128


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("", "no .version"),
        (".version 8.7\n", "no .target"),
        (text().replace("\n{\n\tret;\n}\n", ""), "must have one whole .entry, and has none"),
        (text() + text().replace("entry(", "second("), "has entry, second"),
        (text(parameters=("align 8 .b8 s[16]",)), "is not a number or a pointer"),
        (text(parameters=("b8 s[16]",)), "is not a number or a pointer"),
    ],
)
def test_texts_that_are_not_one_kernel_are_refused(broken, said):
    with pytest.raises(BadPtx, match=said):
        read(broken)


def test_every_prefix_of_a_text_is_refused_or_whole():
    whole = text()
    body = whole.rindex("{")
    for length in range(body):
        with pytest.raises(BadPtx):
            read(whole[:length])
    assert read(whole[: body + 1]) == read(whole)  # the body is the driver's to judge


@pytest.mark.parametrize("scratch", [0, 1, 2])
def test_arguments_go_in_the_kernels_order_and_scratch_is_null(scratch):
    """Triton 3.2 appends nothing, 3.3 and 3.4 one pointer, 3.5 and later two."""
    found = arguments(read(text(parameters=PARAMETERS[:4] + PARAMETERS[4:] * scratch)), TYPES, VALUES)
    assert [one.value for one in found] == [TENSOR.data_ptr(), 0.25, -7, 2**40] + [None] * scratch
    assert [ctypes.sizeof(one) for one in found] == [8, 4, 4, 8] + [8] * scratch


@pytest.mark.parametrize(
    ("parameters", "types", "said"),
    [
        (PARAMETERS[:3], TYPES, "has 3 parameters for 4 arguments"),
        (PARAMETERS + PARAMETERS[4:] * 2, TYPES, "at most 2 pointers may follow"),
        ((*PARAMETERS[:4], "u32"), TYPES, "at most 2 pointers may follow"),
        (("u32", *PARAMETERS[1:]), TYPES, r"argument x is \*fp16, its parameter has 4 bytes"),
        ((PARAMETERS[0], "u32", *PARAMETERS[2:]), TYPES, "argument scale is fp32"),
        ((*PARAMETERS[:2], "f32", *PARAMETERS[3:]), TYPES, "argument n is i32"),
        (PARAMETERS, TYPES | {"n": "i16"}, "type i16 is not one that is passed here"),
    ],
)
def test_parameters_that_do_not_match_are_refused(parameters, types, said):
    with pytest.raises(BadPtx, match=said):
        arguments(read(text(parameters=parameters)), types, VALUES)


def test_a_launch_reaches_the_driver_as_it_was_meant():
    cuda = FakeCuda()
    function = CudaDriver(cuda).load(text(), "entry")
    function.launch((3, 2, 1), 128, 100_000, 77, arguments(read(text()), TYPES, VALUES))
    function.close()
    (seen,) = cuda.launches
    assert (seen.grid, seen.block, seen.shared, seen.stream) == ((3, 2, 1), (128, 1, 1), 100_000, 77)
    assert seen.values == [TENSOR.data_ptr(), 0.25, -7, 2**40, 0]
    assert cuda.asked == {8: 100_000}  # more than 48 KiB must be asked for
    assert (cuda.loaded, cuda.unloaded) == ([text()], 1)


def test_little_shared_memory_is_not_asked_for():
    cuda = FakeCuda()
    function = CudaDriver(cuda).load(text(parameters=()), "entry")
    function.launch((1, 1, 1), 32, 49_152, 0, [])
    assert cuda.asked == {}
    assert cuda.launches[0].values == []
    with pytest.raises(CudaError, match="cuFuncSetAttribute: CUDA error 1, CUDA_ERROR_INVALID_VALUE: invalid argument"):
        function.launch((1, 1, 1), 32, 300_000, 0, [])
    with pytest.raises(CudaError, match="cuLaunchKernel"):
        function.launch((0, 1, 1), 32, 0, 0, [])


@pytest.mark.parametrize(
    ("refuses", "kind", "said"),
    [
        (218, CudaError, "cuModuleLoadDataEx: CUDA error 218, CUDA_ERROR_INVALID_PTX: a PTX JIT failed: line 7; no"),
        (222, ptx_compat.PtxTooNew, "CUDA error 222, CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
        (999, CudaError, "CUDA error 999, which the driver has no name for"),
    ],
)
def test_a_text_that_the_driver_refuses(refuses, kind, said):
    with pytest.raises(kind, match=said) as caught:
        CudaDriver(FakeCuda(refuses=refuses, log=b"line 7; no such thing")).load(text(), "entry")
    assert type(caught.value) is kind
    assert caught.value.code == refuses


def test_an_entry_that_is_not_there_leaves_nothing_loaded():
    cuda = FakeCuda()
    with pytest.raises(CudaError, match="cuModuleGetFunction: CUDA error 500"):
        CudaDriver(cuda).load(text(), "another")
    assert cuda.unloaded == 1


def test_a_device_says_what_it_is():
    driver = CudaDriver(FakeCuda(capability=89, most=101_376, version=12_080))
    assert (driver.capability(), driver.shared_memory(), driver.version()) == (89, 101_376, "12.8")


def test_a_machine_without_a_driver_says_so(monkeypatch):
    monkeypatch.setattr(ptx_compat, "LIBRARY", "libcuda-that-is-not-there.so.1")
    ptx_compat.library.cache_clear()
    with pytest.raises(PortattnError, match="the CUDA driver cannot be loaded: libcuda-that-is-not-there"):
        ptx_compat.library()


@pytest.mark.parametrize(
    ("ptx", "capability", "device", "changes", "said"),
    [
        (text(), 80, {"capability": 80}, {}, "sm_80 code needs a newer device, and this one is sm_80"),
        (text("sm_89"), 89, {"capability": 86}, {}, "sm_89 code needs a newer device, and this one is sm_86"),
        (text("sm_90a"), 90, {"capability": 100}, {}, "sm_90a code runs on no other chip"),
        (text("sm_86"), 80, {}, {}, "compiled for sm_86, and sm_80 was asked for"),
        (
            text(), 80, {"most": 101_376}, {"shared": 110_000},
            "needs 110000 bytes of shared memory, this device has 101376",
        ),
        (text(), 80, {}, {"scratch": 128}, "wants 128 bytes of Triton's scratch memory"),
        (text(), 80, {}, {"num_warps": 8}, "demands 128 threads, and was compiled with 8 warps"),
    ],
)  # fmt: skip
def test_code_that_cannot_be_run_here_is_refused(ptx, capability, device, changes, said):
    with pytest.raises(BadPtx, match=said):
        fits(read(ptx), code(ptx, **changes), CudaDriver(FakeCuda(**device)), capability)
    fits(read(text()), code(text()), CudaDriver(FakeCuda()), 80)


# ---- what the installed Triton and those of the lab make of a real kernel


def merge():
    """A launch of the kernel that merges partial results, on this CPU's tensors."""
    target = parse_target("cuda:sm_80", "triton==3.6.0")
    made = plan(canary.CASES["decode_attention"][0], target)
    request = request_of(made, made.problem, made.path, target.name, "cpu")
    launches, _, _ = kernel_calls(plan_of(request, target), call_of(request), 108)
    return next(launch for launch in launches if launch.function == "combine")


def names_of(module, interpreted=False):
    """What stands in for a kernel's module, which this process may have for the interpreter only."""
    path = Path(next(iter(kernels.__path__))) / f"{module.rpartition('.')[2]}.py"
    found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return SimpleNamespace(**{f.name: SimpleNamespace(arg_names=[one.arg for one in f.args.args]) for f in found})


def compiled(worker, capability, launch):
    made = signature(launch)
    reply = worker.request(
        "compile", 120.0, signature=msgspec.to_builtins(made), target=["cuda", capability, 32], env={}, facts="text"
    )
    assert reply.outcome == "ok", reply
    facts = reply.facts
    return PtxCode(
        text=str(facts["ptx"]), shared=int(facts["scratchpad_bytes"]), num_warps=int(facts["num_warps"]),
        scratch=int(facts["scratch"]), signature=made,
    )  # fmt: skip


@pytest.fixture(scope="module")
def compiler():
    with Worker() as worker:
        yield worker


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [80, 86, 89])
def test_a_compiled_kernel_is_launched_with_its_arguments(compiler, monkeypatch, capability):
    """A whole run on a stand-in of sm_90: the values that arrive are the call's, in the kernel's own order."""
    launch = merge()
    made = compiled(compiler, capability, launch)
    ptx = read(made.text)
    assert (ptx.capability, ptx.portable, ptx.entry, ptx.threads) == (capability, True, "combine", 32)
    names = names_of(launch.module)
    monkeypatch.setattr(ptx_compat, "load_kernels", names_of)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cuda = FakeCuda()
    run(launch, made, CudaDriver(cuda), capability, 5)
    (seen,) = cuda.launches
    expected = [launch.arguments[name] for name in names.combine.arg_names if name in made.signature.types]
    given = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in expected]
    assert seen.values[: len(given)] == given
    assert set(seen.values[len(given) :]) <= {0}
    assert seen.grid == (*launch.grid, 1, 1)[:3]
    assert (seen.stream, cuda.unloaded) == (5, 1)


@pytest.mark.compiles
def test_a_plans_launches_all_run_and_what_writes_nothing_is_found(compiler, monkeypatch):
    """The stand-in computes nothing: the outputs stay NaN, and the oracle says so."""
    target = parse_target("cuda:sm_80", "triton==3.6.0")
    made = plan(canary.CASES["paged_attention"][0], target)
    request = request_of(made, made.problem, made.path, target.name, "cpu")
    launches, _, _ = kernel_calls(plan_of(request, target), call_of(request), target.arch.cores)
    texts = [msgspec.to_builtins(compiled(compiler, 80, launch)) for launch in launches]
    cuda, stages, devices = FakeCuda(), list[str](), list[str]()

    def on_cpu(request):
        devices.append(request["device"])
        return call_of(request | {"device": "cpu"})

    monkeypatch.setattr(ptx_compat, "library", lambda: cuda)
    monkeypatch.setattr(ptx_compat, "call_of", on_cpu)
    monkeypatch.setattr(ptx_compat, "load_kernels", names_of)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=9))
    facts = ptx_compat.compare(json.loads(json.dumps(request | {"texts": texts})), stages.append)["facts"]
    assert [read(one).entry for one in cuda.loaded] == ["decode_split", "combine"]
    assert [(one.stream, one.shared) for one in cuda.launches] == [(9, texts[0]["shared"]), (9, texts[1]["shared"])]
    assert devices == ["cuda"]
    assert stages == ["run", "run decode_split", "run combine", "oracle"]
    assert facts["wrong"] > 0
    with pytest.raises(ValueError, match="shorter"):
        ptx_compat.compare(json.loads(json.dumps(request | {"texts": texts[:1]})), stages.append)


@pytest.mark.compiles
def test_code_for_another_call_is_refused(compiler):
    launch = merge()
    made = compiled(compiler, 80, launch)
    launch.arguments["out"] = launch.arguments["out"].bfloat16()
    with pytest.raises(BadPtx, match=r"combine: compiled for .* and the call here is"):
        run(launch, made, CudaDriver(FakeCuda()), 80, 0)


@pytest.mark.compiles
def test_code_of_sm_90_is_bound_to_it(compiler):
    made = compiled(compiler, 90, merge())
    with pytest.raises(BadPtx, match="sm_90a code runs on no other chip"):
        fits(read(made.text), made, CudaDriver(FakeCuda(capability=100)), 90)


@pytest.mark.compiles
@pytest.mark.usefixtures("real_lab")
@pytest.mark.parametrize("toolchain", [t for t in lab.toolchains() if t.startswith("triton==")])
def test_every_tritons_code_says_what_it_takes(toolchain):
    if lab.find(toolchain) is None:
        pytest.skip(f"{toolchain} is not in the lab")
    launch = merge()
    with lab.worker(toolchain) as worker:
        made = compiled(worker, 80, launch)
    ptx = read(made.text)
    types = {n: made.signature.types[n] for n in names_of(launch.module).combine.arg_names if n in made.signature.types}
    found = arguments(ptx, types, launch.arguments)
    version = tuple(int(part) for part in toolchain.partition("==")[2].split(".")[:2])
    scratch = 0 if version < (3, 3) else 1 if version < (3, 5) else 2
    assert len(found) == len(types) + scratch
    fits(ptx, made, CudaDriver(FakeCuda()), 80)
