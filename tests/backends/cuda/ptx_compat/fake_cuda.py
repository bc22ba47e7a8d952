"""A stand-in for libcuda: C functions made of Python ones, so that arguments are really marshalled."""

import ctypes
import re
from dataclasses import dataclass, field
from typing import Any

from portattn.backends.cuda.ptx_compat import read

POINTER, INT, UINT, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_KINDS = {(4, True): ctypes.c_float, (4, False): ctypes.c_int32, (8, False): ctypes.c_int64}
NAMES = {1: (b"CUDA_ERROR_INVALID_VALUE", b"invalid argument"), 218: (b"CUDA_ERROR_INVALID_PTX", b"a PTX JIT failed")}
NAMES |= {222: (b"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", b"the PTX was compiled with an unsupported toolchain")}
_MAJOR, _MINOR, _OPTIN, _DYNAMIC = 75, 76, 97, 8  # of cuda.h


def _snake(name: str) -> str:
    """_cu_launch_kernel for cuLaunchKernel."""
    return "_" + re.sub("([A-Z])", lambda found: "_" + found.group(1).lower(), name)


@dataclass
class Launched:
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int | None
    values: list[Any]


@dataclass
class FakeCuda:
    """A device. refuses: what cuModuleLoadDataEx returns, with `log`; most: bytes of shared memory a block can have."""

    capability: int = 90
    most: int = 232_448
    version: int = 13_000
    refuses: int = 0
    log: bytes = b""
    launches: list[Launched] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    unloaded: int = 0
    asked: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._kept: list[Any] = []
        signatures = {
            "cuDriverGetVersion": (POINTER,), "cuCtxGetDevice": (POINTER,), "cuDeviceGetAttribute": (POINTER, INT, INT),
            "cuModuleLoadDataEx": (POINTER, ctypes.c_char_p, UINT, POINTER, POINTER),
            "cuModuleGetFunction": (POINTER, POINTER, ctypes.c_char_p), "cuModuleUnload": (POINTER,),
            "cuFuncSetAttribute": (POINTER, INT, INT),
            "cuLaunchKernel": (POINTER, *(UINT,) * 7, POINTER, POINTER, POINTER), "cuGetErrorName": (INT, POINTER),
            "cuGetErrorString": (INT, POINTER),
        }  # fmt: skip
        for name, types in signatures.items():
            setattr(self, name, ctypes.CFUNCTYPE(INT, *types)(getattr(self, _snake(name))))

    def _cu_driver_get_version(self, out: int) -> int:
        INT.from_address(out).value = self.version
        return 0

    def _cu_ctx_get_device(self, out: int) -> int:
        INT.from_address(out).value = 0
        return 0

    def _cu_device_get_attribute(self, out: int, attribute: int, device: int) -> int:
        known = {_MAJOR: self.capability // 10, _MINOR: self.capability % 10, _OPTIN: self.most}
        if attribute not in known:
            return 1
        INT.from_address(out).value = known[attribute]
        return 0

    def _cu_module_load_data_ex(self, out: int, text: bytes, count: int, names: int, values: int) -> int:
        options = dict(zip((INT * count).from_address(names), (POINTER * count).from_address(values), strict=True))
        if self.refuses:
            assert len(self.log) < options[6]
            ctypes.memmove(options[5], self.log + b"\0", len(self.log) + 1)
            return self.refuses
        handle = 100 + len(self._texts)
        self._texts[handle] = text.decode()
        self.loaded.append(text.decode())
        POINTER.from_address(out).value = handle
        return 0

    def _cu_module_get_function(self, out: int, module: int, name: bytes) -> int:
        if read(self._texts[module]).entry != name.decode():
            return 500
        POINTER.from_address(out).value = module
        return 0

    def _cu_module_unload(self, module: int) -> int:
        self.unloaded += 1
        return 0

    def _cu_func_set_attribute(self, function: int, attribute: int, value: int) -> int:
        self.asked[attribute] = value
        return 0 if attribute == _DYNAMIC and value <= self.most else 1

    def _cu_launch_kernel(
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int,
        shared: int, stream: int | None, places: int, extra: int | None,
    ) -> int:  # fmt: skip
        if shared > max(49_152, self.asked.get(_DYNAMIC, 0)) or min(gx, gy, gz) < 1:
            return 1
        parameters = read(self._texts[function]).parameters
        pointers = (POINTER * len(parameters)).from_address(places)
        values = [
            _KINDS[one.size, one.floating].from_address(place).value
            for one, place in zip(parameters, pointers, strict=True)
        ]
        self.launches.append(Launched((gx, gy, gz), (bx, by, bz), shared, stream, values))
        return 0

    def _cu_get_error_name(self, code: int, out: int) -> int:
        return self._word(code, out, 0)

    def _cu_get_error_string(self, code: int, out: int) -> int:
        return self._word(code, out, 1)

    def _word(self, code: int, out: int, which: int) -> int:
        if code not in NAMES:
            return 1
        self._kept.append(ctypes.create_string_buffer(NAMES[code][which]))
        POINTER.from_address(out).value = ctypes.addressof(self._kept[-1])
        return 0
