"""The vendor's own torch_npu without CANN: its schemas take portattn's calls, its autograd formulas give the gradients,
its meta functions the shapes. Its libraries load over stand-ins for CANN's, and for CUDA's if torch is a build for CUDA
(stand_in_libraries.py), and the kernels beneath its operators are tests/backends/ascend/vendor_kernels.py's. So what is
tested is the vendor's code between a call and a kernel."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from portattn.backends.ascend import AscendBackend
from portattn.planning.data_files import load_arches

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
ROOT = TESTS.parent
TOOLS = ("g++", "nm", "objdump")
VERSION = importlib.metadata.version("torch_npu").partition("+")[0]
SECONDS = 300
# Sentences of the wheel's documents that limits of backends/ascend/vendor.py rest on.
DOCUMENTED = (
    "scale*(pse+query*key^{T})", "0表示外部传入pse先mul再add, 1表示外部传入pse先add再mul",
    "输入类型全为float16、bfloat16时, D轴需16对齐", "block_size最小为128, 最大为512, 且要求是128的倍数",
    "类型为float16、bfloat16时需要16对齐", "sink: Tensor类型, 每个注意力头的偏置", "blocknum不能小于根据actual_seq_l",
    "KV_N*D超过65535时", "所有维度相乘不能超过int32的表示范围", "且该入参元素的数量等于Batch值", "pse_type为其他取值时",
    "shape均为(B, KV_N, KV_S), 数据类型固定为float32", "shape均为(blocknum, KV_N, blocksize), 数据类型固定为float32",
    "Head Dim必须满足Dq=Dk和Dk≥Dv", "该接口暂不支持图模式", "dropout_mask: Tensor类型, 外部传入的dropout mask",
)  # fmt: skip
# Of these, sentences about arguments that a release does not have, or does not document.
UNDOCUMENTED = {"2.7.1": [DOCUMENTED[place] for place in (1, 5, 10, -1)]}
# Of an older release's meta functions: the values' width, packed statistics, and arguments of its own schema
DIFFERENCES = {"2.7.1": (
    "[0]: [2, 4, 5, 8]", "[0]: [27, 4, 8]", "[1]: [27, 4, 8]", "[2]: [27, 4, 8]",
    "_grad_v2: npu_fusion_attention_backward_v2()", "_v2: npu_fusion_attention_forward_v2()",
)}  # fmt: skip
FLOAT32 = 5e-6  # largest error of a result or gradient in float32


def folder_of(package: str) -> Path:
    """Return the folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What npu_child.py found."""
    if platform.machine() != "x86_64":
        pytest.skip(f"the stand-ins for CANN's libraries are x86-64 assembly, and this machine is {platform.machine()}")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"the stand-ins for CANN's libraries are made by {', '.join(TOOLS)}; missing: {', '.join(missing)}")
    sys.path.insert(0, str(HERE))
    try:
        import stand_in_libraries
    finally:
        sys.path.remove(str(HERE))
    folder = tmp_path_factory.mktemp("cann")
    library = stand_in_libraries.make(folder, folder_of("torch_npu"), folder_of("torch"), HERE / "cann.cpp")
    paths = [ROOT, TESTS, TESTS / "backends" / "ascend"]
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(folder), "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }  # fmt: skip
    command = [sys.executable, str(HERE / "npu_child.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_chip_is_detected_by_its_name(found: dict[str, Any]) -> None:
    assert found["arch"] == "ascend910b2"


def test_the_committed_schemas_are_the_librarys(found: dict[str, Any]) -> None:
    assert found["schemas"] == (TESTS / "backends" / "ascend" / "schemas" / f"{VERSION}.txt").read_text().splitlines()


def test_the_wheels_documents_still_say_what_the_limits_rest_on() -> None:
    documents = (folder_of("torch_npu") / "_op_plugin_docs.py").read_text(encoding="utf-8")
    assert [sentence for sentence in DOCUMENTED if sentence not in documents] == UNDOCUMENTED.get(VERSION, [])


def test_the_vendors_formula_ignores_the_gradient_of_its_statistics(found: dict[str, Any]) -> None:
    """Why portattn's LSE has an autograd function of its own: with another torch_npu it may be needed no more."""
    for name in ("q",) if found["lacks"] else ("q", "sinks"):
        assert found["formulas"][f"out: {name}"] < FLOAT32, "of the output it is whole, a sink's too"
        assert found["formulas"][f"out and lse: {name}"] > 0.1


def test_the_gradient_of_a_bias_is_the_kernels_alone_and_none_by_the_meta_function(found: dict[str, Any]) -> None:
    """Why plans refuse gradients with a bias: no document says that the kernel computes what the formula passes on."""
    assert found["formulas"]["bias by the kernel alone"]
    assert found["formulas"]["bias by meta"] in ("None", "tensor(..., device='meta', size=(0,))")


def test_every_case_through_the_librarys_schemas_and_formulas(found: dict[str, Any]) -> None:
    wrong = {
        name: errors for name, errors in found["cases"].items()
        if errors.pop("out") > errors.pop("allowed") or max(errors.values()) > FLOAT32
    }  # fmt: skip
    assert wrong == {}
    assert found["refused"] == found["lacks"]
    trained = [name for name, errors in found["cases"].items() if {"grad_q", "grad_k", "grad_v"} <= errors.keys()]
    assert len(trained) >= 36
    assert len(found["cases"]) - len(trained) >= 20


def test_meta_functions_give_the_shapes_and_dtypes_of_the_results(found: dict[str, Any]) -> None:
    """Another reason to refuse gradients with a bias: the only function with `pse_type` cannot be traced backwards."""
    known = DIFFERENCES.get(VERSION, ("_grad_v2: empty_like(): argument 'input'",))
    for difference, begin in zip(found["differences"], known, strict=True):
        assert difference.startswith(f"npu::npu_fusion_attention{begin}")


def test_every_chip_of_the_vendors_list_has_an_arch() -> None:
    """Of the families that kernels are planned for, by the SoC names in the library."""
    known = {device for arch in load_arches(AscendBackend.folder).values() for device in arch.devices}
    text = (folder_of("torch_npu") / "lib" / "libtorch_npu.so").read_bytes()
    listed = {name.decode() for name in re.findall(rb"\0(Ascend(?:910B\d|910_9|950[DP])[\w-]*)(?=\0)", text)}
    assert len(listed) >= (12 if VERSION == "2.7.1" else 41)
    assert listed <= known
