"""The CUDA driver's part: assemble a PTX text for the chip that is here, and launch it. ctypes on libcuda.

Calls and constants: NVIDIA, CUDA Driver API (cuda.h): cuModuleLoadDataEx, cuFuncSetAttribute, cuLaunchKernel.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from portattn.errors import PortattnError

LIBRARY = "libcuda.so.1"
_LOG_BYTES = 16_384  # of the assembler's messages
# enum CUjit_option
_ERROR_LOG_BUFFER, _ERROR_LOG_BUFFER_SIZE_BYTES = 5, 6
# enum CUfunction_attribute
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
# enum CUdevice_attribute
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR, _MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 75, 76, 97
SHARED_WITHOUT_ASKING = 49_152  # bytes of shared memory that a block has unless its function asks for more
_TOO_NEW = 222  # CUDA_ERROR_UNSUPPORTED_PTX_VERSION


class CudaError(PortattnError):
    """A call of the driver that failed; the message names it, the driver's word for it, and the assembler's log.

    code  of the driver, enum CUresult
    """

    def __init__(self, call: str, code: int, words: str, log: str = "") -> None:
        self.code = code
        super().__init__(f"{call}: CUDA error {code}, {words}" + (f": {log}" if log else ""))


class PtxTooNew(CudaError):
    """PTX of a version that this driver does not know: a newer driver would."""


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """libcuda. Raises PortattnError where this machine has none."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise PortattnError(f"the CUDA driver cannot be loaded: {error}") from None


class Driver:
    """What is used of libcuda, in the context that is current in this thread (torch makes one).

    library  libcuda, or what stands in for it
    """

    def __init__(self, library: Any) -> None:
        self._cuda = library

    def version(self) -> str:
        """Version of CUDA that the driver is of, such as "13.0"."""
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def capability(self) -> int:
        """Compute capability of the current device: 90 for sm_90."""
        return 10 * self._attribute(_COMPUTE_CAPABILITY_MAJOR) + self._attribute(_COMPUTE_CAPABILITY_MINOR)

    def shared_memory(self) -> int:
        """Bytes of shared memory that a block of the current device can ask for."""
        return self._attribute(_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)

    def load(self, text: str, entry: str) -> Function:
        """Assemble a PTX text for the current device: its entry, ready to be launched.

        Raises PtxTooNew where the driver is too old for the text's version, CudaError on anything else it refuses.
        """
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        log = ctypes.create_string_buffer(_LOG_BYTES)
        names = (ctypes.c_int * 2)(_ERROR_LOG_BUFFER, _ERROR_LOG_BUFFER_SIZE_BYTES)
        # An option's value is a pointer, or a number in a pointer's place.
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        image = ctypes.c_char_p(text.encode() + b"\0")  # the loader knows PTX by its text, which must end in NUL
        code = self._cuda.cuModuleLoadDataEx(ctypes.byref(module), image, ctypes.c_uint(2), names, values)
        if code:
            kind = PtxTooNew if code == _TOO_NEW else CudaError
            raise kind("cuModuleLoadDataEx", code, self._words(code), log.value.decode(errors="replace").strip())
        try:
            self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(entry.encode()))
        except CudaError:
            self._call("cuModuleUnload", module)
            raise
        return Function(self, module, function)

    def _attribute(self, attribute: int) -> int:
        device, value = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise CudaError(name, code, self._words(code))

    def _words(self, code: int) -> str:
        """The driver's name for an error, and what it says of it."""
        words = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            known = getattr(self._cuda, name)(ctypes.c_int(code), ctypes.byref(text)) == 0
            words.append((text.value or b"").decode(errors="replace") if known else "")
        return ": ".join(filter(None, words)) or "which the driver has no name for"


class Function:
    """An entry of a loaded module. Close it when its launches have ended."""

    def __init__(self, driver: Driver, module: ctypes.c_void_p, function: ctypes.c_void_p) -> None:
        self._driver, self._module, self._function = driver, module, function

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, stream: int, arguments: Sequence[Any]
    ) -> None:
        """Launch: `arguments` are ctypes numbers, one a parameter; `shared` bytes of dynamic shared memory a block.

        The driver copies the arguments before it returns. Raises CudaError.
        """
        if shared > SHARED_WITHOUT_ASKING:
            self._driver._call(
                "cuFuncSetAttribute", self._function, ctypes.c_int(_MAX_DYNAMIC_SHARED_SIZE_BYTES), ctypes.c_int(shared)
            )
        places = (ctypes.c_void_p * max(len(arguments), 1))(*(ctypes.addressof(argument) for argument in arguments))
        sizes = [ctypes.c_uint(size) for size in (*grid, threads, 1, 1, shared)]
        self._driver._call("cuLaunchKernel", self._function, *sizes, ctypes.c_void_p(stream), places, None)

    def close(self) -> None:
        """Unload the module."""
        self._driver._call("cuModuleUnload", self._module)
