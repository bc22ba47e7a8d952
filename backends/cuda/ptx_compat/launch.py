"""One launch of a plan as code of an older chip: what it must be, its arguments, and the launch itself.

A run-time argument is a parameter, in the kernel's order; constants have none. What follows the last one are pointers
to scratch memory of Triton's own, of which portattn's kernels use none: null, and refused where a kernel would.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from portattn.backends.cuda.ptx_compat.driver import Driver
from portattn.backends.cuda.ptx_compat.ptx import BadPtx, Ptx, read
from portattn.launch import load_kernels
from portattn.launch.kernelcall import KernelCall, Signature, signature

WARP = 32  # lanes
MOST_SCRATCH = 2  # pointers that a Triton appends: global scratch, and scratch of profiles
_CTYPES: Mapping[str, type[Any]] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """One compiled launch, as the compiler's child gives it.

    text       PTX
    shared     bytes of shared memory a block has
    num_warps  warps of a block
    scratch    bytes of Triton's own scratch memory that a program wants
    signature  what it was compiled for
    """

    text: str
    shared: int
    num_warps: int
    scratch: int
    signature: Signature


def run(launch: KernelCall, code: Code, driver: Driver, capability: int, stream: int) -> None:
    """Launch on the current device as code of sm_<capability>, and wait for it.

    Raises BadPtx where the code is not what was asked for or cannot run here, CudaError where the driver refuses it.
    """
    ptx = read(code.text)
    fits(ptx, code, driver, capability)
    if signature(launch) != code.signature:
        raise BadPtx(f"{launch.function}: compiled for {code.signature}, and the call here is {signature(launch)}")
    names = getattr(load_kernels(launch.module, interpreted=False), launch.function).arg_names
    types = {name: code.signature.types[name] for name in names if name in code.signature.types}
    given = arguments(ptx, types, launch.arguments)
    function = driver.load(code.text, ptx.entry)
    grid = (*launch.grid, 1, 1)[:3]
    function.launch((grid[0], grid[1], grid[2]), ptx.threads or WARP * code.num_warps, code.shared, stream, given)
    torch.cuda.synchronize()  # the module must outlive its launch, and a fault is this kernel's
    function.close()  # not after a fault: the context is gone then, and the parent ends this process


def fits(ptx: Ptx, code: Code, driver: Driver, capability: int) -> None:
    """Raise BadPtx unless it is portable code of sm_<capability>, and the current device newer and large enough."""
    here = driver.capability()
    if ptx.capability != capability:
        raise BadPtx(f"{ptx.entry}: compiled for {ptx.target}, and sm_{capability} was asked for")
    if not ptx.portable:
        raise BadPtx(f"{ptx.entry}: {ptx.target} code runs on no other chip; only targets without a suffix do")
    if ptx.capability >= here:
        raise BadPtx(f"{ptx.entry}: {ptx.target} code needs a newer device, and this one is sm_{here}")
    if code.shared > driver.shared_memory():
        room = driver.shared_memory()
        raise BadPtx(f"{ptx.entry}: needs {code.shared} bytes of shared memory, this device has {room} for a block")
    if code.scratch:
        raise BadPtx(f"{ptx.entry}: wants {code.scratch} bytes of Triton's scratch memory, which is not provided here")
    if ptx.threads not in (0, WARP * code.num_warps):
        raise BadPtx(f"{ptx.entry}: demands {ptx.threads} threads, and was compiled with {code.num_warps} warps")


def arguments(ptx: Ptx, types: Mapping[str, str], values: Mapping[str, Any]) -> list[Any]:
    """A ctypes number for each parameter of the entry: the run-time arguments, then null for scratch memory.

    types   Triton's type of each run-time argument, in the kernel's order
    values  the arguments by name; tensors are passed by their address

    Raises BadPtx where parameters and arguments do not match in number, size or kind.
    """
    extra = ptx.parameters[len(types) :]
    if len(ptx.parameters) < len(types) or len(extra) > MOST_SCRATCH or any(one.size != 8 for one in extra):
        raise BadPtx(
            f"{ptx.entry}: has {len(ptx.parameters)} parameters for {len(types)} arguments; "
            f"at most {MOST_SCRATCH} pointers may follow"
        )
    made: list[Any] = []
    for (name, kind), parameter in zip(types.items(), ptx.parameters, strict=False):
        number = _number(name, kind, values[name])
        if ctypes.sizeof(number) != parameter.size or parameter.floating != (kind == "fp32"):
            raise BadPtx(f"{ptx.entry}: argument {name} is {kind}, its parameter has {parameter.size} bytes")
        made.append(number)
    return made + [ctypes.c_void_p(None)] * len(extra)


def _number(name: str, kind: str, value: Any) -> Any:
    if kind.startswith("*"):
        return ctypes.c_void_p(value.data_ptr())
    if kind not in _CTYPES:
        raise BadPtx(f"argument {name}: type {kind} is not one that is passed here: {', '.join(_CTYPES)}, pointers")
    return _CTYPES[kind](value)
