"""Attention kernels of vLLM 0.33.0, fla-core 0.6.0 and AITER 0.1.20.post1, compiled by two releases of Triton and run
in the model against float64: which pass, and why the others do not.

Triton is the installed one or the lab's. vLLM is taken from its engine environment (scripts/engine_env.py), the others
from PUBLIC_KERNELS, a folder that holds `fla` and `aiter`, as wheels and source archives do; they are never committed
here."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import support
from asmkit import ARCH_NAMES
from planted import portattn as portattn

from portattn.backends.rocm import aiter
from portattn.tools import lab

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(support.TRITON is None, reason="Triton is not installed")]
PROGRAM = Path(__file__).with_name("public_kernels.py")
CASES = {"vllm": 13, "fla": 5, "aiter": 16}
FILES = {
    "vllm": "vllm/v1/attention/ops/triton_unified_attention.py", "fla": "fla/ops/attn/parallel.py",
    "aiter": "aiter/ops/triton/attention/unified_attention.py",
}  # fmt: skip
TRITONS = ("3.6.0", "3.9.0")
# (owner, words of the reason, or "NaN" among the results) -> arches, and the cases that end so in place of a pass.
EXPECTED = {
    # A tile of 64 keys reads the page table beyond the sequence's pages.
    ("aiter", "OutOfBounds"): (("gfx90a", "gfx942", "gfx950"), ("2d table as long as the sequence",)),
    # A tile as long as a page is not masked, so that NaN in unused places of the last page spreads; gfx1100's have 16.
    ("aiter", "NaN"): (ARCH_NAMES, ("2d decode",)),
    ("aiter", "NaN "): (("gfx1100",), ("2d", "2d fp16 sinks window", "2d softcap", "2d width 80",
                                       "2d table as long as the sequence")),
    # gfx90a has no fp8 conversions, and Triton 3.6 lowers one of e4m3fnuz to them.
    ("aiter", "Cannot select", "3.6.0"): (("gfx90a",), ("2d fp8 cache",)),
    # A kernel of one query head indexes a scalar.
    ("aiter", "too many indices for tensor of rank 0", "3.9.0"): (ARCH_NAMES, ("paged decode of one head",)),
    # AITER has launch configurations of its dense kernels for gfx942, gfx950, gfx1151 and gfx1250 only.
    ("aiter", "MHA-DEFAULT.json"): (
        ("gfx90a", "gfx1100", "gfx1201"), ("mha", "mha width 128", "mha sinks", "mha fp32", "mha gradients")),
}  # fmt: skip


def folder(owner: str) -> Path:
    home = Path(os.environ.get("ENGINES_HOME") or Path.home() / ".cache" / "portattn" / "engines")
    given = os.environ.get("PUBLIC_KERNELS")
    places = [Path(given)] if given else []
    places += sorted(home.glob("vllm-0.33.0/lib/python*/site-packages"))
    found = next((place for place in places if (place / FILES[owner]).is_file()), None)
    if found is None:
        pytest.skip(f"no {FILES[owner]} in PUBLIC_KERNELS or in an engine environment of vLLM 0.33.0")
    return found


def most(name: str, arch: str) -> float:
    """Return the largest error by the case's type: float32 products may be xf32 on gfx942."""
    if "fp32" in name:
        return 1e-3 if arch == "gfx942" else 1e-6
    return 1e-2


def path_of(triton: str) -> str:
    """Return a PYTHONPATH under which this Python imports a release of Triton."""
    if metadata.version("triton") == triton:
        return os.environ["PYTHONPATH"]
    made = lab.find(f"triton=={triton}")
    if made is None or made.python_version.rpartition(".")[0] != "{}.{}".format(*sys.version_info):
        pytest.skip(f"needs `portattn lab create triton=={triton}` with this Python")
    return os.pathsep.join([*map(str, made.folder.glob("lib/python*/site-packages")), os.environ["PYTHONPATH"]])


@pytest.mark.usefixtures("real_lab")
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("owner", CASES)
@pytest.mark.parametrize("triton", TRITONS)
def test_public_kernels(triton: str, owner: str, arch: str) -> None:
    command = [sys.executable, str(PROGRAM), str(folder(owner)), owner, arch]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = path_of(triton)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == CASES[owner]
    for line in lines:
        expected = [
            words.strip() for (whose, words, *of), (arches, names) in EXPECTED.items()
            if whose == owner and arch in arches and line["name"] in names and triton in (of or TRITONS)
        ]  # fmt: skip
        if expected:
            assert expected[0] in line.get("reason", "NaN" if line.get("error") is None else ""), line
        else:
            assert line.get("error") is not None, line
            assert line["error"] <= most(line["name"], arch), line


@pytest.mark.parametrize(
    ("owner", "case", "kernels"), [("fla", "gradients", 4), ("vllm", "2d softcap", 1), ("aiter", "prefill width", 1)]
)
def test_recorded_public_kernels_are_right_as_cells(owner: str, case: str, kernels: int, portattn, tmp_path) -> None:
    file, command = str(tmp_path / "kernels.toml"), [sys.executable, PROGRAM, folder(owner), owner, "gfx942", case]
    made = portattn("matrix", "record", "--out", file, "--json", "--", *command, exits=0).json
    assert (len(made["kernels"]), made["left_out"]) == (kernels, {})
    line = ("matrix", "run", "--kernels", file, "--targets", "gfx942", "--out", tmp_path / "out", "--json")
    assert portattn(*line, exits=0).json["levels"] == {"emulated": kernels}


def test_the_recorded_signatures_are_those_of_the_source() -> None:
    found = aiter.parameters_in(folder("aiter") / "aiter")
    recorded = {
        (row.function, row.file): row.parameters for row in aiter.load_signatures() if "0.1.20.post1" in row.releases
    }
    assert {key: text for key, text in found.items() if key in recorded} == recorded
