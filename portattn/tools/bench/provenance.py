"""Where a run's figures come from: chip, toolchain, driver, commit, clocks."""

from __future__ import annotations

import datetime
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import portattn
from portattn.planning.core_path import kernel_source_digest
from portattn.planning.detect_target import this_target
from portattn.schema.toolchain import installed_toolchain
from portattn.tools.bench.clock import Ceilings
from portattn.tools.bench.peers.availability import version
from portattn.tools.bench.results import BenchRun, DeviceState
from portattn.tools.source_commit import source_commit_text

# Distributions whose version is told where their peer is here.
_DISTRIBUTIONS = {
    "flash_attn": "flash-attn", "flash_attn_interface": "flash-attn-3", "flashinfer": "flashinfer-python",
    "xformers": "xformers", "flag_gems": "flag-gems", "sage": "sageattention",
}  # fmt: skip
_QUERY = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,driver_version"


def this_run(
    *, sets: tuple[str, ...], asked: tuple[tuple[str, str], ...], rounds: int, backend: str, core: bool,
    only_host: bool, peers: Mapping[str, str], libraries: Mapping[str, str], ceilings: Ceilings | None,
    commit: str = "",
) -> BenchRun:  # fmt: skip
    """The Run of this process. commit: told by the caller; git's where that is empty."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    state, driver = DeviceProbe().read()
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or ""),
        "rocm": str(torch.version.hip or ""),
        "cudnn": str(torch.backends.cudnn.version() or ""),
        "driver": driver,
    } | {name: version(dist) for name, dist in _DISTRIBUTIONS.items() if peers.get(name) == "here"}
    return BenchRun(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=command(sys.argv),
        commit=commit or source_commit_text(Path(portattn.__file__).parent),
        portattn=portattn.__version__,
        kernels=kernel_source_digest(),
        chip=torch.cuda.get_device_name(),
        target=str(this_target()),
        toolchain=str(installed_toolchain()),
        device={
            "multi_processors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "host": f"{platform.system()} {platform.machine()}",
        },
        versions={name: text for name, text in versions.items() if text},
        peers=dict(peers),
        libraries=dict(libraries),
        sets=sets,
        cells=len(asked),
        asked=asked,
        rounds=rounds,
        backend=backend,
        core=core,
        only_host=only_host,
        ceilings=ceilings,
        state=state,
    )


def command(argv: list[str]) -> str:
    """The command line, with places of files reduced to their names: results are read elsewhere."""
    shown = [Path(word).name if word.startswith("/") else word for word in argv[1:]]
    return shlex.join(["portattn", *shown])


class DeviceProbe:
    """Asks nvidia-smi for the current device's clocks and power, in a process of its own: the device is not kept from
    its work, so that a probe begun before the rounds tells what the clocks are during them."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        tool = shutil.which("nvidia-smi")
        if tool and torch.version.cuda:
            uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
            which = ["-i", f"GPU-{uuid}"] if uuid else []
            try:
                self._child = subprocess.Popen(
                    [tool, *which, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                )  # fmt: skip
            except OSError:
                self._child = None

    def read(self) -> tuple[DeviceState | None, str]:
        """Return the device's state and the driver's version, or (None, "")."""
        if self._child is None:
            return torch_state(), ""
        try:
            text, _ = self._child.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return torch_state(), ""
        return parse_device_state(text) or (torch_state(), "")


def parse_device_state(text: str) -> tuple[DeviceState, str] | None:
    """nvidia-smi's answer; a figure that the device does not tell is [N/A]."""
    lines = text.strip().splitlines()
    words = [word.strip() for word in lines[0].split(",")] if lines else []
    if len(words) != len(_QUERY.split(",")):
        return None
    sm, memory, power, limit, temperature = (_number(word) for word in words[:-1])
    return (
        DeviceState(sm_mhz=sm, memory_mhz=memory, power_w=power, power_limit_w=limit, temperature_c=temperature),
        words[-1],
    )


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def torch_state() -> DeviceState | None:
    """Return torch's reading of the device through NVML's or AMD SMI's Python package, or None without one."""
    asked: dict[str, Any] = {
        "sm_mhz": lambda: float(torch.cuda.clock_rate()),
        "power_w": lambda: torch.cuda.power_draw() / 1e3,
        "temperature_c": lambda: float(torch.cuda.temperature()),
    }
    found = {}
    for name, ask in asked.items():
        try:
            found[name] = ask()
        except (RuntimeError, ImportError, AssertionError, AttributeError):
            continue
    return DeviceState(**found) if found else None
