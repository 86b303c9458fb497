"""What NVIDIA's management library says of a GPU, asked without a context on it."""

from __future__ import annotations

import ctypes

__all__ = ["free_gpu_memory"]


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
