"""A team of threads that run one compiled step together, each pinned to a core of its own.

The calling thread only waits (so Ctrl-C reaches it at once) and is never pinned: the mask that the process was given stays as it was, and
the team's masks end with its threads.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from qwenc.errors import QwencError


class _Job:
    """One call of `run`. taken: which ranks have begun; errors: one entry per rank that is done, None if all went well."""

    def __init__(self, function: Callable[[int], Any], size: int, on_error: Callable[[], None] | None):
        self.function = function
        self.on_error = on_error
        self.taken = [False] * size
        self.errors: list[BaseException | None] = []


class ThreadTeam:
    """`run(function)` calls function(rank) on every thread and returns when all are done. Close it to end the threads.

    cores: the CPU of each thread. Without `pin` the threads may move, `within` those CPUs if any are given. pin_error: why a thread could
    not be bound, None if all were."""

    def __init__(self, cores: Sequence[int], *, pin: bool = True, within: Sequence[int] = ()):
        self.size = len(cores)
        self.pin_error: str | None = None
        self._process = os.getpid()
        self._one_at_a_time = threading.Lock()  # steps meet at one barrier: two at once would mix
        self._jobs: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in cores]
        self._wake: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, {core} if pin else set(within)), name=f"qwenc-{rank}", daemon=True)
            for rank, core in enumerate(cores)
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._wake.get()  # bound, or known not to be

    def run(
        self, function: Callable[[int], Any], on_interrupt: Callable[[], None] | None = None, on_error: Callable[[], None] | None = None
    ) -> None:
        """Call function(rank) on every thread; wait for all, even through Ctrl-C (then `on_interrupt` is called, to ask the threads to
        leave early, and KeyboardInterrupt raised once they have). The first error of a thread is raised here; `on_error` is called at
        once in that thread, to free those that wait for it. Calls from several threads wait for each other. Raises QwencError once
        closed, or in a forked child, which has none of the threads."""
        if os.getpid() != self._process:
            raise QwencError("the engine was loaded before this process was forked: load it in the process that uses it")
        with self._one_at_a_time:
            if not self._jobs:
                raise QwencError("the engine is closed")
            self._run(_Job(function, self.size, on_error), on_interrupt)

    def _run(self, job: _Job, on_interrupt: Callable[[], None] | None) -> None:
        """KeyboardInterrupt may strike between any two of these instructions. So whatever it may cut off is done again without
        harm, and the wait asks what the threads have done, not what it has heard from them."""
        interrupt: KeyboardInterrupt | None = None
        while len(job.errors) < self.size:
            try:
                if interrupt is not None and on_interrupt is not None:
                    on_interrupt()
                for jobs in self._jobs:
                    jobs.put(job)  # twice, after an interrupt here: a thread takes a job only once
                while len(job.errors) < self.size:
                    with contextlib.suppress(queue.Empty):
                        self._wake.get(timeout=0.1)
            except KeyboardInterrupt as caught:
                interrupt = caught
        if interrupt is not None:
            raise interrupt
        for error in job.errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        for jobs in self._jobs:
            jobs.put(None)
        self._jobs = []

    def _serve(self, rank: int, cpus: set[int]) -> None:
        if cpus:
            self._bind(cpus)
        self._wake.put(None)
        jobs = self._jobs[rank]
        while (job := jobs.get()) is not None:
            if job.taken[rank]:
                continue
            job.taken[rank] = True
            error = None
            try:
                job.function(rank)
            except BaseException as caught:
                error = caught
                if job.on_error:
                    job.on_error()
            job.errors.append(error)
            self._wake.put(None)

    def _bind(self, cpus: set[int]) -> None:
        """Bind the calling thread (0 = itself) to these CPUs, where the system lets us."""
        if not hasattr(os, "sched_setaffinity"):
            return
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            self.pin_error = f"threads are not pinned: {error.strerror or error}"
