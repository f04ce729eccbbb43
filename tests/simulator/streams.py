"""Streams and events: what the host enqueued is done at synchronisation, in an order the adversary chooses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .machine import Launch, Machine


@dataclass(eq=False)
class _Item:
    """A launch, a function that is done at once, or a mark in a stream."""

    number: int  # in the order of the host's calls
    before: _Item | None  # in its stream
    run: Callable[[], None] | None = None
    launch: Launch | None = None
    may_overlap: bool = False
    early: bool = False
    event: _Item | None = None  # of another stream, to wait for
    started: bool = False

    @property
    def done(self) -> bool:
        return self.started and (self.launch is None or self.launch.done)

    @property
    def overlaps(self) -> bool:
        """Whether it starts beside the launch before it."""
        return self.before is not None and not self.before.done

    def ready(self) -> bool:
        if self.event is not None and not self.event.done:
            return False
        if not self.overlaps:
            return True
        before = self.before.launch
        if not self.may_overlap or not self.before.started or before is None:
            return False
        return before.program.lets_next_start if self.early else before.signalled == before.ctas


class Streams:
    """A queue a stream, each in order; between streams only events order."""

    def __init__(self, machine: Machine):
        self._machine = machine
        self._queues: dict[int, deque[_Item]] = {}
        self._last: dict[int, _Item] = {}
        self._events: dict[int, _Item] = {}
        self._issued = 0

    def _append(self, stream: int, **what) -> _Item:
        self._issued += 1
        item = self._last[stream] = _Item(self._issued, self._last.get(stream), **what)
        self._queues.setdefault(stream, deque()).append(item)
        return item

    def push(self, stream: int, run: Callable[[], None]) -> None:
        """Enqueues a function."""
        self._append(stream, run=run)

    def launch(self, stream: int, launch: Launch, *, may_overlap: bool = False) -> None:
        """Enqueues a grid.

        Programmatic dependent launch: one that `may_overlap` starts when every CTA of the one before it has executed
        griddepcontrol.launch_dependents or is over, and waits for it at griddepcontrol.wait. Before that instruction the
        earlier grid's stores need not be visible, which starting it even earlier stands for: always in mode late, by
        chance in mode random.
        """
        machine = self._machine
        early = machine.mode == "late" or (machine.mode == "random" and machine.rng.random() < 0.5)
        self._append(stream, launch=launch, may_overlap=may_overlap, early=early)

    def record(self, stream: int, event: int) -> None:
        """The event is what is in the stream now; of a grid that another overlaps without waiting for it, the other."""
        self._events[event] = self._append(stream)

    def wait(self, stream: int, event: int) -> None:
        """What comes in the stream waits for the event's last record; an event never recorded is over."""
        if event in self._events:
            self._append(stream, event=self._events[event])

    def clear(self) -> None:
        """Forgets what is not done yet."""
        self._machine.abort()
        for item in (item for queue in self._queues.values() for item in queue):
            if item.launch is not None:
                item.launch.on_end()
        self._queues.clear()
        self._last.clear()
        self._events.clear()

    def _choose(self) -> int | None:
        """The stream whose first item starts now.

        Eager: as issued, when nothing runs. Late: all that may, the stream used last first. Random: any, at any time.
        """
        mode, rng, running = self._machine.mode, self._machine.rng, bool(self._machine.active)
        ready = [s for s, q in self._queues.items() if q[0].ready()]
        if not ready or (running and (mode == "eager" or (mode == "random" and rng.random() < 0.5))):
            return None
        if mode == "random":
            return rng.choice(ready)
        if mode == "late":
            return max(ready, key=lambda s: self._queues[s][-1].number)
        return min(ready, key=lambda s: self._queues[s][0].number)

    def _start(self, stream: int) -> None:
        queue = self._queues[stream]
        item = queue[0]
        if item.run is not None:
            item.run()
        if item.launch is not None:
            self._machine.start(item.launch, item.before.launch if item.overlaps else None)
        item.started, item.before = True, None
        queue.popleft()
        if not queue:
            del self._queues[stream]

    def flush(self) -> None:
        """Does everything."""
        try:
            while self._queues or self._machine.active:
                stream = self._choose()
                if stream is not None:
                    self._start(stream)
                else:
                    self._machine.round()
        except BaseException:
            self.clear()
            raise
        self._last.clear()
