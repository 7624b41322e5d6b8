"""The cores and the memory that there are, and how to say how much."""

import math
import os
from pathlib import Path

import jax


def cores() -> list[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_memory() -> int:
    """Bytes that can be had where JAX computes."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    # What holds the copy of a file can be had too; only Linux says how much that is.
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def readable(size: int) -> str:
    power = 0 if size < 1 else min(int(math.log10(size) / 3), 3)
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"
