"""What the machine can do: its device, its precision, its peak, and the memory of its C library."""
import ctypes
import os
import platform
import time
from pathlib import Path

import torch

from lib.console import stop

PEAK_TFLOPS = {"A100": 312, "H100": 989, "H200": 989, "L40S": 362, "RTX 4090": 165, "RTX 3090": 71}    # dense bf16


def keep_freed_memory():
    """Tell glibc to keep freed memory instead of returning it to the system. Otherwise every large activation is mapped
    and page-faulted anew in each step, a tenth of its time on CPU (results/bench.md). No effect elsewhere."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2 ** 30)                     # M_MMAP_THRESHOLD: serve blocks up to 1 GiB from the heap
        mallopt(-1, 2 ** 31 - 1)                 # M_TRIM_THRESHOLD: and do not shrink the heap
    except (OSError, AttributeError, TypeError):
        pass


def is_amd():
    """Is the CPU one of AMD's? MKL, torch's library of matrix products, has other code for them."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:                              # not Linux
        return "AuthenticAMD" in platform.processor()


def pick_device(name=""):
    """The device that is named, if it works, else the first of cuda, mps and cpu that is there."""
    if name:
        try:
            torch.zeros(1, device=name).item()
        except (RuntimeError, AssertionError) as e:
            stop(f"--device={name}: not usable on this machine ({str(e).splitlines()[0][:120]})")
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def pick_dtype(device, name=""):
    """bfloat16 where the hardware computes in it (AVX512-BF16 and AMX among CPUs), float32 elsewhere."""
    if name:
        return name
    if device.startswith("cuda"):
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        probe = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        has_bf16 = device == "cpu" and probe()
    return "bfloat16" if has_bf16 else "float32"


def read_clock(device):
    """Seconds, once the work given to the device so far is done: a GPU works later than the program that feeds it."""
    if str(device).startswith("cuda"):
        torch.cuda.synchronize(device)
    elif str(device).startswith("mps"):
        torch.mps.synchronize()
    return time.perf_counter()


def default_jobs():
    """Runs side by side on this machine: one per core, or one where they would share a GPU."""
    return (os.cpu_count() or 1) if pick_device() == "cpu" else 1


def peak_flops(peak_tflops, device):
    """FLOP/s that the device can reach: as given in TFLOP/s, or that of a known GPU, or 0."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else ""
    known = next((tflops for key, tflops in PEAK_TFLOPS.items() if key in name), 0)
    return 1e12 * (peak_tflops or known)
