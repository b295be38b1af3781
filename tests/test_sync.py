"""The barrier of a team: who waits long sleeps, and how long that is depends on how the last waits went."""

import numpy as np
import pytest

from qwenc.kernels.jit import jit
from qwenc.kernels.sync import HASTE, MOST_SPINS, barrier, begin_step, new_sync, now_ns
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


def run(sync, size, times, late_ns):
    begin_step(sync)
    threads = ThreadTeam([0] * size, pin=False)
    claims, timer, health = np.zeros(1, np.int64), np.zeros(TIMER_SLOTS, np.int64), np.zeros(1, np.int64)
    records = [Team(rank, size, sync, claims, timer, health) for rank in range(size)]
    threads.run(lambda rank: meet(records[rank], times, late_ns))
    threads.close()
    return int(sync[HASTE])


@pytest.mark.parametrize("size", [2, 4])
def test_long_waits_make_it_sleep_sooner_and_short_ones_later(size):
    sync = new_sync()
    run(sync, size, 20, 20_000_000)  # far longer than MOST_SPINS take
    assert sync[HASTE] > 0
    sync[HASTE] = hasty = MOST_SPINS + 7000  # what several sleepers at once make of it
    run(sync, size, 5_000, 0)
    assert sync[HASTE] < hasty
