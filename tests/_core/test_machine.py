"""The machine's limits: what a container leaves counts too."""

import pytest

from gradflow._core import machine


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A machine with 8 GB free, whose control groups the test writes."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000000 kB\nMemAvailable:    8000000 kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", meminfo)
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_CGROUP_OF_PROCESS", tmp_path / "of_process")
    return tmp_path


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_a_container(system):
    assert machine.available_memory() == 8_192_000_000


def test_version_2_of_control_groups(system):
    (system / "of_process").write_text("0::/user.slice/job\n")
    group = system / "cgroup" / "user.slice"
    write(group / "job", memory__max="max\n", memory__current="5\n")
    write(group, memory__max="3000000000\n", memory__current="1000000000\n")
    assert machine.available_memory() == 2_000_000_000
    # Cached files can be reclaimed.
    write(group, memory__stat="anon 7\ninactive_file 400000000\n")
    assert machine.available_memory() == 2_400_000_000


def test_version_1_of_control_groups(system):
    (system / "of_process").write_text("5:cpu:/x\n4:memory:/docker/abc\n")
    group = system / "cgroup" / "memory"
    # Inside a container the path is the host's, and the root is the container's own.
    write(
        group,
        memory__limit_in_bytes="1000000000\n",
        memory__usage_in_bytes="900000000\n",
    )
    assert machine.available_memory() == 100_000_000


def test_a_container_without_a_limit(system):
    (system / "of_process").write_text("4:memory:/\n")
    write(
        system / "cgroup" / "memory",
        memory__limit_in_bytes="9223372036854771712\n",
        memory__usage_in_bytes="900000000\n",
    )
    assert machine.available_memory() == 8_192_000_000


def test_too_much_is_refused(system):
    machine.refuse_beyond("a small thing", 10**9)
    with pytest.raises(
        ValueError,
        match=r"a large thing takes about 9 GB, and 8\.19 GB are available: all of it",
    ):
        machine.refuse_beyond("a large thing", 9 * 10**9, "all of it")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2**40, "1.1 TB"), (9996, "10 kB")],
)
def test_sizes_for_people(size, text):
    assert machine.readable(size) == text
