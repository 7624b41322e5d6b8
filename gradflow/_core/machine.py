"""The machine's limits: cores and memory, those of a container included."""

import os
from pathlib import Path

import jax

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_OF_PROCESS = Path("/proc/self/cgroup")


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_memory() -> int:
    """Bytes that can still be allocated where JAX computes: on an accelerator what the
    device reports, else what the machine has free and what the process's container
    leaves, whichever is less."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return min([_free_on_machine(), *_free_in_containers()])


def _free_on_machine() -> int:
    # Memory that caches files can be had too; only Linux says how much that is.
    if _MEMINFO.is_file():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_in_containers() -> list[int]:
    """The memory that each control group of this process leaves (versions 2 and 1).

    A group's limit binds all groups below it, so that the whole path counts. Caches of
    files are counted as used but can be reclaimed.
    """
    found = []
    for folder, limit, used in _groups():
        try:
            most = int((folder / limit).read_text())
            taken = int((folder / used).read_text())
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
        found.append(max(0, most - max(0, taken - _reclaimable(folder))))
    return found


def _groups() -> list[tuple[Path, str, str]]:
    """The folders of this process's groups, with the names of their two files."""
    try:
        lines = _CGROUP_OF_PROCESS.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Within a container the path may be that of the host: its root is then ours.
        inside = Path(path.lstrip("/"))
        found += [(root / part, *names) for part in (inside, *inside.parents)]
    return found


def _reclaimable(folder: Path) -> int:
    """Bytes of inactive file caches in a group."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stats = dict(line.split()[:2] for line in lines if len(line.split()) >= 2)
    return int(stats.get("total_inactive_file", stats.get("inactive_file", 0)))


def readable(size: int | float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def refuse_beyond(what: str, needed: int, parts: str = "") -> None:
    """Raise a `ValueError` if `what` needs more bytes than are available. `parts` says
    which quantities make it large, or how to make it smaller."""
    available = available_memory()
    if needed > available:
        raise ValueError(
            f"{what} takes about {readable(needed)}, and {readable(available)} are "
            f"available{': ' if parts else ''}{parts}."
        )
