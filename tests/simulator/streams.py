"""Streams and events: what the host enqueued is done at synchronisation, in an order the adversary chooses."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class _Item:
    """Work of a stream, or a mark in it; it waits for `after` in another stream."""

    number: int  # in the order of the host's calls
    run: Callable[[], bool | None] | None = None
    after: _Item | None = None
    lets_next_start: bool = False
    may_overtake: bool = False
    done: bool = False


class Streams:
    """A queue a stream, each in order; between streams only events order. Grids of two streams do not overlap."""

    def __init__(self, mode: str, rng: random.Random):
        self._mode, self._rng = mode, rng
        self._queues: dict[int, deque[_Item]] = {}
        self._events: dict[int, _Item] = {}
        self._issued = 0

    def _append(self, stream: int, **what) -> _Item:
        self._issued += 1
        item = _Item(self._issued, **what)
        self._queues.setdefault(stream, deque()).append(item)
        return item

    def push(self, stream: int, run: Callable[[], bool | None], *, lets_next_start=False, may_overtake=False) -> None:
        """Enqueues work.

        Programmatic dependent launch: a grid that `may_overtake` one that `lets_next_start` runs beside it; here, as
        the adversary likes, after it or before it. If `run` says that it waited for the grid before, the two are over
        before what follows; else only the later one is.
        """
        self._append(stream, run=run, lets_next_start=lets_next_start, may_overtake=may_overtake)

    def record(self, stream: int, event: int) -> None:
        """The event is what is in the stream now."""
        self._events[event] = self._append(stream)

    def wait(self, stream: int, event: int) -> None:
        """What comes in the stream waits for the event's last record; an event never recorded is over."""
        if event in self._events:
            self._append(stream, after=self._events[event])

    def clear(self) -> None:
        """Forgets what is not done yet."""
        self._queues.clear()

    def _overtakes(self) -> bool:
        return self._mode == "late" or (self._mode == "random" and self._rng.random() < 0.5)

    def flush(self) -> None:
        """Does everything: as issued (eager), from the stream that was used last (late), or at random."""
        try:
            while self._queues:
                ready = [s for s, q in self._queues.items() if q[0].after is None or q[0].after.done]
                if self._mode == "random":
                    chosen = self._rng.choice(ready)
                elif self._mode == "late":
                    chosen = max(ready, key=lambda s: self._queues[s][-1].number)
                else:
                    chosen = min(ready, key=lambda s: self._queues[s][0].number)
                queue = self._queues[chosen]
                item = queue.popleft()
                if queue and item.lets_next_start and queue[0].may_overtake and self._overtakes():
                    overtaken, item = item, queue.popleft()
                    waited = item.run()
                    item.done = True
                    if not waited:
                        queue = self._queues[-overtaken.number] = deque()
                    queue.appendleft(overtaken)
                else:
                    if item.run is not None:
                        item.run()
                    item.done = True
                for stream in [s for s, q in self._queues.items() if not q]:
                    del self._queues[stream]
        except BaseException:
            self.clear()
            raise
