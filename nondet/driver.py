"""NVIDIA's libraries without torch: what a GPU says without a context on it, and a context made ahead of torch."""

from __future__ import annotations

import ctypes
import threading

__all__ = ["begin_context", "free_gpu_memory"]


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def free_gpu_memory(uuid: str) -> int | None:
    """Free bytes of the GPU whose UUID torch gives; None where the library doesn't say, as for a part of a GPU.

    Args:
        uuid: With or without "GPU-".
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            handle, memory = ctypes.c_void_p(), _Memory()
            name = f"GPU-{uuid.removeprefix('GPU-')}".encode("ascii")
            if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) != 0:
                return None
            return int(memory.free) if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 else None
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError, UnicodeEncodeError):
        return None


def begin_context() -> threading.Thread:
    """Have the first visible GPU's context made on a thread of its own, while this process loads torch.

    Both take a second or more, and neither needs the other. It is the context that torch uses, and is left to it.
    """

    def retain() -> None:
        try:
            cuda = ctypes.CDLL("libcuda.so.1")
            device, context = ctypes.c_int(), ctypes.c_void_p()
            if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0:
                cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        except (OSError, AttributeError):
            pass  # torch says what is wrong

    thread = threading.Thread(target=retain, daemon=True)
    thread.start()
    return thread
