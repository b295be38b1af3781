"""The barrier of a team: who waits long sleeps, and how long that is depends on how the last waits went."""

import numpy as np

from qwenc.kernels.jit import jit
from qwenc.kernels.sync import HASTE, LEAST_SPINS, MOST_SPINS, barrier, begin_step, new_sync, now_ns
from qwenc.machine.team import ThreadTeam
from qwenc.model.records import TIMER_SLOTS, Team


@jit
def meet(team, times, late_ns):
    """`times` barriers, to each of which rank 0 comes late."""
    for _ in range(times):
        until = now_ns() + late_ns
        while team.rank == 0 and now_ns() < until:
            pass
        barrier(team)


def run(sync, times, late_ns):
    begin_step(sync)
    threads = ThreadTeam([0, 0], pin=False)
    records = [Team(rank, 2, sync, np.zeros(1, np.int64), np.zeros(TIMER_SLOTS, np.int64), np.zeros(1, np.int64)) for rank in range(2)]
    threads.run(lambda rank: meet(records[rank], times, late_ns))
    threads.close()
    return int(sync[HASTE])


def test_long_waits_make_it_sleep_sooner_and_short_ones_later():
    sync = new_sync()
    run(sync, 3, 0)
    hasty = run(sync, 20, 20_000_000)  # far longer than MOST_SPINS take
    assert 0 < hasty <= MOST_SPINS - LEAST_SPINS + 5000
    assert run(sync, 20_000, 0) < hasty  # a neighbour may make some of these long
