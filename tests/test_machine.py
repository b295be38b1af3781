"""Threads and cores: masks, quotas, hybrid CPUs, and a team that neither hangs nor widens what it was given."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from machines import machine

from qwenc.errors import QwencError, UsageError
from qwenc.machine.cpus import choose_cpus
from qwenc.machine.quota import cgroup_quota
from qwenc.machine.team import ThreadTeam
from qwenc.machine.topology import cpu_name
from qwenc.settings import Settings


def tree(folder, files):
    """Files below `folder`, which then stands for /."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"{content}\n")
    return folder


def cpus_of(name, values):
    return {f"sys/devices/system/cpu/cpu{cpu}/{name}": value for cpu, value in enumerate(values)}


MACHINES = {  # usable CPUs: fast ones, chosen ones, what told
    ("rk3588", range(8)): ((4, 5, 6, 7), (4, 5, 6, 7), "cpu_capacity"),
    ("rk3588", range(6)): ((4, 5), (4, 5), "cpu_capacity"),
    ("rk3588", range(4)): ((0, 1, 2, 3), (0, 1, 2, 3), "cpu_capacity"),  # taskset to the small ones: all there is
    ("raspberry-pi-5", range(4)): ((0, 1, 2, 3), (0, 1, 2, 3), "cpu_capacity"),
    ("apple-m1", range(8)): ((4, 5, 6, 7), (4, 5, 6, 7), "cpu_capacity"),
    ("alder-lake", range(20)): ((0, 2, 4, 6, 8, 10, 12, 14, 16, 17, 18, 19), (0, 2, 4, 6), "cpuinfo_max_freq"),
    ("alder-lake", range(12, 20)): ((12, 14, 16, 17, 18, 19), (12, 14, 16, 17), "cpuinfo_max_freq"),
    ("alder-lake", (1, 15, 19)): ((1, 15, 19), (1, 15, 19), "cpuinfo_max_freq"),  # a lone sibling stands for its core
    ("smt-server", range(16)): (tuple(range(8)), (0, 1, 2, 3), None),
    ("smt-server", (3, 11)): ((3,), (3,), None),
    ("single-core", (0,)): ((0,), (0,), None),
    ("no-sysfs", range(8)): ((4, 5, 6, 7), (4, 5, 6, 7), "/proc/cpuinfo"),
    ("container", (4, 5, 6, 7, 12, 13)): ((4, 5, 6, 7), (4, 5, 6), "cpuinfo_max_freq"),  # a quota of 3 CPUs
    ("container-v1", range(8)): (tuple(range(8)), (0, 1), None),  # a quota of 1.5
}


@pytest.mark.parametrize(("name", "usable"), MACHINES)
def test_recorded_machines(tmp_path, name, usable):
    fast, cores, told_by = MACHINES[name, usable]
    choice = choose_cpus(None, None, machine(tmp_path, name), set(usable))
    assert (choice.fast, choice.cores, choice.told_by) == (fast, cores, told_by)
    assert choice.usable == tuple(usable) and choice.threads == len(cores) and choice.note is None


@pytest.mark.parametrize(
    ("name", "wanted", "cores"),
    [
        ("rk3588", 2, (4, 5)),
        ("rk3588", 6, (4, 5, 6, 7, 0, 1)),
        ("alder-lake", 9, (0, 2, 4, 6, 8, 10, 12, 14, 16)),
        ("alder-lake", 14, (0, 2, 4, 6, 8, 10, 12, 14, 16, 17, 18, 19, 1, 3)),  # the second threads of cores come last
        ("smt-server", 10, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)),
    ],
)
def test_threads_asked_for(tmp_path, name, wanted, cores):
    cpus = {"rk3588": 8, "smt-server": 16, "alder-lake": 20}[name]
    choice = choose_cpus(wanted, None, machine(tmp_path, name), set(range(cpus)))
    assert choice.cores == cores and choice.note is None


def test_named_cpus(tmp_path):
    root = machine(tmp_path, "rk3588")
    assert choose_cpus(None, "4-7", root, set(range(8))).cores == (4, 5, 6, 7)
    assert choose_cpus(None, "7,0-2", root, set(range(8))).cores == (7, 0, 1, 2)
    assert choose_cpus(None, "0-7", root, set(range(8))).threads == 8
    assert choose_cpus(3, "4-7", root, set(range(8))).cores == (4, 5, 6)
    more = choose_cpus(6, "4-7", root, set(range(8)))
    assert more.cores == (4, 5, 6, 7) and "6 threads asked for, 4 usable here (CPUs named" in more.note
    with pytest.raises(UsageError, match="cpus 4-9: this process may use 0-5, not 6-9"):
        choose_cpus(None, "4-9", root, set(range(6)))


def test_named_cpus_within_a_quota(tmp_path):
    choice = choose_cpus(None, "4-7", machine(tmp_path, "container"), {4, 5, 6, 7, 12, 13})
    assert choice.cores == (4, 5, 6) and "4 threads asked for, 3 usable" in choice.note


@pytest.mark.parametrize("text", ["", "a", "7-4", "1,", "-1", "4-", "1,1", "0-2,1", "٣", "1_0", "99999", "4 - 7", None, 4])
def test_lists_of_cpus_that_are_none(text):
    with pytest.raises(UsageError, match="cpus must name CPUs as in 4-7"):
        Settings(cpus=text) if text is not None else Settings(cpus=object())


def test_the_choice_in_words(tmp_path):
    told = choose_cpus(None, None, machine(tmp_path, "rk3588"), set(range(8))).describe()
    assert told == "4 threads, cores 4-7 (usable 0-7, fast 4-7 by cpu_capacity)"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rk3588", "4 × Cortex-A55, 4 × Cortex-A76"),
        ("apple-m1", "4 × Icestorm, 4 × Firestorm"),
        ("alder-lake", "12th Gen Intel(R) Core(TM) i7-12700"),
    ],
)
def test_the_cpu_by_name(tmp_path, name, words):
    assert cpu_name(machine(tmp_path, name)) == words


def test_threads_of_a_core_without_sysfs(tmp_path):
    """The core ids of /proc/cpuinfo stand in."""
    text = (machine(tmp_path / "whole", "smt-server") / "proc/cpuinfo").read_text()
    assert choose_cpus(None, None, tree(tmp_path / "less", {"proc/cpuinfo": text}), set(range(16))).fast == tuple(range(8))


def test_half_the_speed_of_the_fastest_of_all_is_fast(tmp_path):
    """Measured by the machine's fastest CPU, also where the mask leaves it out."""
    root = tree(tmp_path, cpus_of("cpu_capacity", [400, 600, 1024]))
    assert choose_cpus(None, None, root, {0, 1}).fast == (1,)
    assert choose_cpus(None, None, root, {0}).fast == (0,)


def test_a_cpu_of_which_nothing_is_told_falls_through_to_the_next_source(tmp_path):
    files = cpus_of("cpu_capacity", [414, 414, 1024]) | cpus_of("cpufreq/cpuinfo_max_freq", [1000, 1000, 2400, 2400])
    choice = choose_cpus(None, None, tree(tmp_path, files), set(range(4)))
    assert choice.fast == (2, 3) and choice.told_by == "cpuinfo_max_freq"


@pytest.mark.parametrize("junk", ["", "junk", "-5", "0"])
def test_junk_in_sysfs_tells_nothing(tmp_path, junk):
    files = cpus_of("cpu_capacity", [junk] * 4) | cpus_of("topology/thread_siblings_list", [junk or "x"] * 4)
    assert choose_cpus(None, None, tree(tmp_path, files), set(range(4))).threads in (1, 4)


@pytest.mark.parametrize(
    ("cpu_max", "quota", "threads"),
    [("max 100000", None, 4), ("150000 100000", 1.5, 2), ("50000 100000", 0.5, 1), ("junk", None, 4), ("400000 100000", 4.0, 4)],
)
def test_cgroup_v2(tmp_path, cpu_max, quota, threads):
    root = tree(tmp_path, {"sys/fs/cgroup/cpu.max": cpu_max})
    assert cgroup_quota(root) == quota
    assert choose_cpus(None, None, root, set(range(8))).threads == threads


@pytest.mark.parametrize(("quota", "threads"), [(-1, 4), (200000, 2)])
def test_cgroup_v1(tmp_path, quota, threads):
    root = tree(tmp_path, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota, "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000})
    assert choose_cpus(None, None, root, set(range(8))).threads == threads


def test_more_threads_than_there_are(tmp_path):
    choice = choose_cpus(64, None, tree(tmp_path, {"sys/fs/cgroup/cpu.max": "150000 100000"}), {0, 1, 2})
    assert choice.threads == 2 and "64 threads asked for, 2 usable" in choice.note


def test_the_tightest_cgroup_counts(tmp_path):
    limits = {"": "max 100000", "a.slice/": "50000 100000", "a.slice/b.service/": "max 100000"}
    files = {f"sys/fs/cgroup/{path}cpu.max": limit for path, limit in limits.items()}
    assert cgroup_quota(tree(tmp_path, files | {"proc/self/cgroup": "0::/a.slice/b.service"})) == 0.5


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


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_threads_that_are_not_pinned_stay_within_the_cpus_named():
    core = min(os.sched_getaffinity(0))
    team = ThreadTeam([core, core], pin=False, within=[core])
    masks = []
    team.run(lambda rank: masks.append(os.sched_getaffinity(0)))
    team.close()
    assert masks == [{core}, {core}]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
@pytest.mark.parametrize("cores", [[4095], [4094, 4095]])
def test_cores_that_cannot_be_had_are_one_note_not_a_failure(cores):
    team = ThreadTeam(cores)
    assert "not pinned" in team.pin_error  # known as soon as the team is there
    seen = []
    team.run(seen.append)
    assert sorted(seen) == list(range(len(cores)))
    team.close()


def test_a_system_that_forbids_pinning(monkeypatch):
    """Some sandboxes answer EPERM."""

    def forbidden(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden, raising=False)
    team = ThreadTeam([0, 1])
    assert team.pin_error == "threads are not pinned: Operation not permitted"
    team.run(lambda rank: None)
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
    from qwenc.machine.memory import available_bytes

    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:      64 kB\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path / "none") == 65536
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.current").write_text("1000\n")
    for limit, wanted in (("max", 65536), ("41000", 40000), ("900", 0), ("?", 65536)):
        (group / "memory.max").write_text(limit)
        assert available_bytes(tmp_path / "meminfo", group) == wanted
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None
