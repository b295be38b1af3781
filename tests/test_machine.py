"""Threads and cores: masks, quotas, hybrid CPUs, and a team that neither hangs nor widens what it was given."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qwenc.errors import QwencError
from qwenc.machine.cpus import cgroup_quota, choose_cpus
from qwenc.machine.team import ThreadTeam


def sysfs(folder, capacities=None, frequencies=None, cpu_max=None, v1=None):
    for name, values in (("cpu_capacity", capacities), ("cpufreq/cpuinfo_max_freq", frequencies)):
        for cpu, value in enumerate(values or ()):
            path = folder / f"devices/system/cpu/cpu{cpu}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
    if cpu_max is not None:
        (folder / "fs/cgroup").mkdir(parents=True, exist_ok=True)
        (folder / "fs/cgroup/cpu.max").write_text(cpu_max + "\n")
    if v1 is not None:
        (folder / "fs/cgroup/cpu").mkdir(parents=True, exist_ok=True)
        (folder / "fs/cgroup/cpu/cpu.cfs_quota_us").write_text(f"{v1}\n")
        (folder / "fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000\n")
    return folder


RK3588 = [414] * 4 + [1002, 1002, 1024, 1024]


@pytest.mark.parametrize(
    ("capacities", "mask", "wanted", "cores"),
    [
        (RK3588, range(8), None, (4, 5, 6, 7)),
        (RK3588, range(8), 6, (4, 5, 6, 7, 0, 1)),
        (RK3588, range(6), None, (4, 5)),
        (RK3588, [0, 1], None, (0, 1)),
        ([1024] * 4, range(4), None, (0, 1, 2, 3)),
        ([1024] * 16, range(16), None, (0, 1, 2, 3)),
        (None, [3], None, (3,)),
        (None, range(2), 1, (0,)),
    ],
)
def test_cores(tmp_path, capacities, mask, wanted, cores):
    choice = choose_cpus(wanted, sysfs(tmp_path, capacities), set(mask))
    assert choice.cores == cores and choice.threads == len(cores) and choice.note is None


def test_frequencies_stand_in_for_capacities(tmp_path):
    tree = sysfs(tmp_path, frequencies=[1800000] * 4 + [2400000] * 2 + [800000] * 2)
    assert choose_cpus(None, tree, set(range(8))).fast == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("cpu_max", "quota", "threads"),
    [("max 100000", None, 4), ("150000 100000", 1.5, 2), ("50000 100000", 0.5, 1), ("junk", None, 4), ("400000 100000", 4.0, 4)],
)
def test_cgroup_v2(tmp_path, cpu_max, quota, threads):
    tree = sysfs(tmp_path, cpu_max=cpu_max)
    assert cgroup_quota(tree / "fs/cgroup") == quota
    assert choose_cpus(None, tree, set(range(8))).threads == threads


@pytest.mark.parametrize(("quota", "threads"), [(-1, 4), (200000, 2)])
def test_cgroup_v1(tmp_path, quota, threads):
    assert choose_cpus(None, sysfs(tmp_path, v1=quota), set(range(8))).threads == threads


def test_more_threads_than_there_are(tmp_path):
    choice = choose_cpus(64, sysfs(tmp_path, cpu_max="150000 100000"), {0, 1, 2})
    assert choice.threads == 2 and "64 threads asked for, 2 usable" in choice.note


def test_the_tightest_cgroup_counts(tmp_path, monkeypatch):
    from qwenc.machine import cpus

    monkeypatch.setattr(cpus, "_own_cgroups", lambda: {"": "/a.slice/b.service"})
    for path, limit in (("", "max 100000"), ("a.slice", "50000 100000"), ("a.slice/b.service", "max 100000")):
        (tmp_path / path).mkdir(exist_ok=True)
        (tmp_path / path / "cpu.max").write_text(limit)
    assert cgroup_quota(tmp_path) == 0.5


def test_no_home_makes_no_folder_called_tilde(tmp_path, monkeypatch):
    from qwenc.machine import folders

    monkeypatch.delenv("QWENC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(folders.os.path, "expanduser", lambda path: path)
    assert folders.cache_root().is_absolute()
    with pytest.raises(OSError):
        folders.cache_root().mkdir(parents=True)


@pytest.mark.parametrize("pin", [True, False])
def test_a_team_runs_every_rank_and_leaves_the_mask(pin):
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    cores = sorted(before or {0})[:1] * 3
    team = ThreadTeam(cores, pin=pin)
    seen = []
    for _ in range(3):
        team.run(seen.append)
    assert sorted(seen) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    if before is not None:
        assert os.sched_getaffinity(0) == before
    team.close()
    team.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_threads_are_pinned_to_their_cores():
    cores = sorted(os.sched_getaffinity(0))
    team = ThreadTeam(cores)
    masks = {}
    team.run(lambda rank: masks.__setitem__(rank, os.sched_getaffinity(0)))
    assert masks == {rank: {core} for rank, core in enumerate(cores)}
    team.close()


def test_a_core_that_cannot_be_had_is_a_note_not_a_failure():
    team = ThreadTeam([4095])
    team.run(lambda rank: None)
    if hasattr(os, "sched_setaffinity"):
        assert "not pinned" in team.pin_error
    team.close()


def test_an_error_in_a_thread_reaches_the_caller():
    team = ThreadTeam([0, 0], pin=False)

    def fail(rank):
        if rank == 1:
            raise ValueError("from a thread")

    with pytest.raises(ValueError, match="from a thread"):
        team.run(fail)
    team.run(lambda rank: None)
    team.close()
    assert threading.active_count() < 50


def test_a_closed_team_and_a_forked_one_refuse():
    team = ThreadTeam([0], pin=False)
    team._process = -1  # as a forked child sees it
    with pytest.raises(QwencError, match="forked"):
        team.run(lambda rank: None)
    team._process = os.getpid()
    team.close()
    with pytest.raises(QwencError, match="closed"):
        team.run(lambda rank: None)


def test_runs_from_several_threads_do_not_mix():
    team = ThreadTeam([0, 0], pin=False)
    inside, most = [], []

    def work(rank):
        inside.append(rank)
        most.append(len(inside))
        inside.remove(rank)

    callers = [threading.Thread(target=lambda: [team.run(work) for _ in range(50)]) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(most) == 400 and max(most) <= 2
    team.close()


INTERRUPTED = """
import signal, threading, time
from qwenc.machine.team import ThreadTeam
team = ThreadTeam([0, 0], pin=False)
leave = threading.Event()
main = threading.main_thread().ident
def pester():
    while not leave.is_set():
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.0003)
both, ranks = threading.Barrier(2), []
def work(rank):  # like a step: hangs unless both ranks come exactly once
    both.wait(20)
    ranks.append(rank)
signal.signal(signal.SIGINT, lambda *_: None)
pesterer = threading.Thread(target=pester, daemon=True)
pesterer.start()
runs = 0
end = time.monotonic() + 4
while time.monotonic() < end:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        team.run(work)
    except KeyboardInterrupt:
        pass
    finally:
        for _ in range(100):
            try:
                signal.signal(signal.SIGINT, lambda *_: None)
                break
            except KeyboardInterrupt:
                pass
    runs += 1
leave.set()
pesterer.join()
team.run(lambda rank: None)
assert 10 < ranks.count(0) == ranks.count(1) <= runs, (ranks.count(0), ranks.count(1), runs)
print("ok", runs)
"""


def test_interrupts_at_any_moment_neither_hang_nor_split_a_team():
    """Ctrl-C used to hang when it came between the end of a wait and its next line."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0 and done.stdout.startswith("ok"), done.stderr


def test_available_memory(tmp_path):
    from qwenc.machine.free_memory import available_bytes

    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:      64 kB\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path / "none") == 65536
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.current").write_text("1000\n")
    for limit, wanted in (("max", 65536), ("41000", 40000), ("900", 0), ("?", 65536)):
        (group / "memory.max").write_text(limit)
        assert available_bytes(tmp_path / "meminfo", group) == wanted
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None
