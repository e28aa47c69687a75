"""The kernels, compiled by NVRTC for one GPU and launched by the CUDA driver. Both are libraries that torch comes with.

Knows: their C interfaces. Does not know: what the kernels compute.

Torch's own `torch.cuda._compile_kernel` would not do: it needs the headers of a CUDA toolkit, compiles the source anew
for each kernel, and passes integers of 32 bits and tensors alone.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from .device_kernels import THREADS, DeviceKernels, source

_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")


def kernels(device: torch.device) -> DeviceKernels:
    """Compile the kernels for a device of CUDA, and return them.

    Raises:
        OSError: a library is missing.
        RuntimeError: the source does not compile, or the driver does not take it.
    """
    library = nvrtc_library()
    binary = compiled(source(), architecture_for(torch.cuda.get_device_capability(device), library), library)
    return DeviceKernels(_Launcher(binary, device), torch.cuda.get_device_properties(device).multi_processor_count)


def nvrtc_library() -> ctypes.CDLL:
    """Return NVRTC as torch finds it: by its own library, which is linked with it, or by name."""
    version = str(torch.version.cuda).partition(".")[0]
    beside = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
    errors = []
    for name in (str(beside), f"libnvrtc.so.{version}", "libnvrtc.so"):
        try:
            library = ctypes.CDLL(name)
            if hasattr(library, "nvrtcCreateProgram"):
                return library
        except OSError as error:
            errors.append(str(error))
    raise OSError(f"there is no NVRTC: {'; '.join(errors)}")


def architecture_for(capability: tuple[int, int], library: ctypes.CDLL) -> str:
    """Return the architecture to compile for: the device's own, or if it is newer than this NVRTC, the newest older
    one as PTX, which the driver translates."""
    own, count = 10 * capability[0] + capability[1], ctypes.c_int()
    if library.nvrtcGetNumSupportedArchs(ctypes.byref(count)):
        return f"sm_{own}"
    known = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(known)
    older = [number for number in known if number <= own]
    return f"sm_{own}" if own in older or not older else f"compute_{max(older)}"


def compiled(text: str, architecture: str, library: ctypes.CDLL) -> bytes:
    """Return the code for the text of a CUDA source. ``architecture``: such as "sm_90", or "compute_90" for PTX.

    Raises:
        RuntimeError: it does not compile; the error has NVRTC's log.
    """
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(name: str, *arguments: Any) -> int:
        return int(getattr(library, name)(*arguments))

    def check(name: str, *arguments: Any) -> None:
        if failed := call(name, *arguments):
            raise RuntimeError(f"{name} returned error {failed}")

    check("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None)
    try:
        options = [option.encode() for option in (f"--gpu-architecture={architecture}", *_OPTIONS)]
        if failed := call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options)):
            check("nvrtcGetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            check("nvrtcGetProgramLog", program, log)
            raise RuntimeError(
                f"NVRTC returned error {failed} for {architecture}: {log.value.decode(errors='replace')}"
            )
        kind = "PTX" if architecture.startswith("compute_") else "CUBIN"
        check(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        check(f"nvrtcGet{kind}", program, binary)
        return binary.raw
    finally:
        call("nvrtcDestroyProgram", ctypes.byref(program))


class _Launcher:
    """Launches kernels of one device's code, from any thread. The code stays loaded while the process lives."""

    def __init__(self, binary: bytes, device: torch.device) -> None:
        self._driver, self._device = ctypes.CDLL("libcuda.so.1"), device
        self._context, self._module = ctypes.c_void_p(), ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        torch.cuda.synchronize(device)  # makes the device's primary context; host synchronisation, once a process
        number = ctypes.c_int()
        self._check("cuDeviceGet", ctypes.byref(number), device.index)
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        self._inside("cuModuleLoadData", ctypes.byref(self._module), binary)

    def __call__(self, name: str, blocks: int, arguments: ctypes.Structure) -> None:
        """See `Launch`."""
        function = self._functions.get(name)
        if function is None:
            function = ctypes.c_void_p()
            self._inside("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            self._functions[name] = function
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        self._inside("cuLaunchKernel", function, blocks, 1, 1, THREADS, 1, 1, 0, stream, pointers, None)

    def _inside(self, name: str, *arguments: Any) -> None:
        """Call the driver with the device's context, which a thread that has launched nothing yet lacks."""
        self._check("cuCtxPushCurrent_v2", self._context)
        try:
            self._check(name, *arguments)
        finally:
            self._check("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _check(self, name: str, *arguments: Any) -> None:
        if failed := getattr(self._driver, name)(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(failed, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({failed})")
