"""Happens-before of a CTA's shared memory and tensor memory: vector clocks and shadow state.

An *agent* is a lane, a warp, a transaction barrier (all asynchronous operations that complete on it) or a warp(group)'s
asynchronous unit. A vector has an epoch of each agent: what is known of it; of a warp, what is known of all its lanes.

Lanes of a warp are not ordered but by bar.warp.sync and by the barriers that order threads of different warps (PTX ISA 8,
9.7.13.1, 9.7.13.2; shfl, vote, match, redux and elect order no memory). Lanes mostly know the same: a warp has one table of
vectors, and one more for every lane that has learned something by itself since the last synchronisation of the warp.
"""

from __future__ import annotations

import numpy as np

from .ptx import PtxError

GRANULE = 4  # bytes
LANES = 32
SEVERAL = -1  # lanes
# Rows of a table of vectors. PROXY is the part of NOW that is also visible to the asynchronous proxy (PTX ISA 8.6 proxies,
# 9.7.13.4 fence.proxy). Of tensor memory: received but not yet fenced; published by fence::before; known to tcgen05 accesses.
NOW, PROXY, RECEIVED, PUBLISHED, KNOWN = range(5)
TOKEN = [NOW, PROXY, PUBLISHED]


def join(known: np.ndarray, token: np.ndarray) -> None:
    """Adds to what is known."""
    np.maximum(known, token, out=known)


class Clocks:
    """`warps` warps, their lanes and up to `spare` asynchronous agents over `size` bytes of shared memory."""

    def __init__(self, warps: int, size: int, spare: int = 256):
        self.warps = warps
        self.readers = warps + spare  # the agents that reads are recorded of; those of a lane count as its warp's
        self.agents = self.readers + LANES * warps
        self.common = np.zeros((warps, 5, self.agents), np.int32)  # what all lanes of a warp know
        self.alone: list[dict[int, np.ndarray]] = [{} for _ in range(warps)]  # what a lane knows that knows more
        self.epoch = np.ones(warps, np.int32)  # of a warp's next accesses
        self.fenced = np.zeros((warps, LANES), np.int32)  # up to where a lane has fenced its own accesses
        # What a warp's tcgen05.wait has seen, and published, of operations that its lanes executed together: until the
        # lanes synchronise it is of the whole warp only.
        self.waited = np.zeros((warps, self.agents), np.int32)
        self.waited_published = np.zeros((warps, self.agents), np.int32)
        self.counter = np.zeros(self.readers, np.int32)  # of asynchronous agents
        granules = -(-max(size, 1) // GRANULE)
        self.writer = np.full(granules, -1, np.int16)
        self.write_epoch = np.zeros(granules, np.int32)
        self.write_line = np.zeros(granules, np.int32)
        self.read_epoch = np.zeros((self.readers, granules), np.int32)
        self.read_line = np.zeros((self.readers, granules), np.int32)
        self.read_lane = np.zeros((warps, granules), np.int8)  # that may not have been seen by the warp's other lanes
        self.atomic = np.zeros(granules, bool)  # the last write was one; the last that was none:
        self.plain_writer = np.full(granules, -1, np.int16)
        self.plain_epoch = np.zeros(granules, np.int32)
        self.barrier = np.zeros(granules, bool)  # of a live mbarrier
        self._names: dict[object, int] = {}

    def close(self) -> None:
        """Frees the tens of megabytes that a cycle of objects would keep until it is collected."""
        del self.read_epoch, self.read_line

    def agent(self, key: object) -> int:
        """Number of an asynchronous agent."""
        if key not in self._names:
            self._names[key] = self.warps + len(self._names)
            if self._names[key] >= self.readers:
                raise PtxError(f"more than {self.readers - self.warps} mbarriers and asynchronous units of a CTA")
        return self._names[key]

    def lanes(self, warp: int) -> slice:
        """The agents of a warp's lanes."""
        first = self.readers + LANES * warp
        return slice(first, first + LANES)

    def name(self, agent: int) -> str:
        if agent >= self.readers:
            warp, lane = divmod(agent - self.readers, LANES)
            return f"warp {warp} lane {lane}"
        if agent < self.warps:
            return f"warp {agent}"
        return next(" ".join(map(str, k)) for k, v in self._names.items() if v == agent)

    # ---- what lanes know; `lanes` are their numbers, None for all of the warp

    def _tables(self, warp: int, lanes) -> list[np.ndarray]:
        """The tables to change of what the lanes know."""
        alone = self.alone[warp]
        if lanes is None:
            return [self.common[warp], *alone.values()]
        for lane in lanes:
            if lane not in alone:
                alone[int(lane)] = self.common[warp].copy()
        return [alone[int(lane)] for lane in lanes]

    def known(self, warp: int, lanes) -> np.ndarray:
        """The joined table of what the lanes know, their own accesses included."""
        alone, own = self.alone[warp], self.lanes(warp)
        table = self.common[warp].copy()
        for lane in alone if lanes is None else lanes:
            if lane in alone:
                join(table, alone[lane])
        if lanes is None:
            table[NOW, warp] = table[NOW, own] = self.epoch[warp]
            join(table[PROXY, own], self.fenced[warp])
            join(table[KNOWN], self.waited[warp])
            join(table[PUBLISHED], self.waited_published[warp])
        else:
            agents = own.start + np.asarray(lanes)
            table[NOW, agents] = self.epoch[warp]
            table[PROXY, agents] = np.maximum(table[PROXY, agents], self.fenced[warp][lanes])
        return table

    def knows(self, warp: int, agent: int, epoch: int) -> bool:
        """Whether some lane of the warp does."""
        return any(table[NOW, agent] >= epoch for table in (self.common[warp], *self.alone[warp].values()))

    def learn(self, warp: int, lanes, row: int, agent: int, epoch: int) -> None:
        for table in self._tables(warp, lanes):
            table[row, agent] = max(table[row, agent], epoch)

    def synchronise(self, warp: int, lanes) -> None:
        """The lanes wait for each other: bar.warp.sync."""
        table = self.known(warp, lanes)
        self.epoch[warp] += 1
        if lanes is None:
            self.common[warp] = table
            self.alone[warp].clear()
            return
        for lane in lanes:
            self.alone[warp][int(lane)] = table.copy()

    def token(self, warp: int, lanes) -> np.ndarray:
        """What a release by the lanes would publish."""
        return self.known(warp, lanes)[TOKEN]

    def release(self, warp: int, lanes) -> np.ndarray:
        """What the lanes publish; their later accesses belong to a new epoch."""
        token = self.token(warp, lanes)
        self.epoch[warp] += 1
        return token

    def acquire(self, warp: int, lanes, token: np.ndarray) -> None:
        for table in self._tables(warp, lanes):
            join(table[:3], token)

    def only_tensor(self, token: np.ndarray) -> np.ndarray:
        """What a relaxed arrival or wait hands over: only what the tcgen05 fences add (9.7.16.6.3)."""
        result = self.zero()
        result[2] = token[2]
        return result

    def tensor_release(self, warp: int, lanes) -> None:
        """tcgen05.fence::before_thread_sync."""
        for table in self._tables(warp, lanes):
            join(table[PUBLISHED], table[KNOWN])
        if lanes is None:
            join(self.waited_published[warp], self.waited[warp])

    def tensor_acquire(self, warp: int, lanes) -> None:
        """tcgen05.fence::after_thread_sync."""
        for table in self._tables(warp, lanes):
            join(table[KNOWN], table[RECEIVED])

    def fence_proxy(self, warp: int, lanes) -> None:
        """fence.proxy.async: of what each lane has done and what it knows."""
        for table in self._tables(warp, lanes):
            join(table[PROXY], table[NOW])
        self.fenced[warp, slice(None) if lanes is None else lanes] = self.epoch[warp]
        self.epoch[warp] += 1  # what the lanes do later is not fenced

    def zero(self) -> np.ndarray:
        return np.zeros((3, self.agents), np.int32)

    # ---- generic accesses of a warp; `g` are granule numbers, `lanes` the lane of each

    def generic_read(self, warp: int, lanes: np.ndarray, g: np.ndarray, line: int, partial: bool = False) -> str | None:
        """`partial`: of less than a granule, whose other part another thread may own."""
        writer = self.writer[g]
        bad = self._unknown(warp, lanes, writer, self.write_epoch[g])
        if partial and bad.any():
            bad &= writer < self.readers
        epoch, before = self.read_epoch[warp], self.read_lane[warp]
        several = (before[g] != lanes) & (epoch[g] > self.common[warp, NOW, warp])
        before[g] = lanes
        several |= before[g] != lanes
        if several.any():
            before[g[several]] = SEVERAL
        epoch[g] = self.epoch[warp]
        self.read_line[warp, g] = line
        return self._race("reads", bad, g) if bad.any() else self._barrier_memory(g)

    def _unknown(self, warp: int, lanes: np.ndarray, writer: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        """Which of the writes the lanes do not know of."""
        bad = (writer >= 0) & (self.common[warp, NOW][writer] < epoch)
        if bad.any():
            bad &= writer != self.lanes(warp).start + lanes
            for lane, table in self.alone[warp].items():
                bad &= (lanes != lane) | (table[NOW][writer] < epoch)
        return bad

    def generic_write(
        self, warp: int, lanes: np.ndarray, g: np.ndarray, line: int, partial: bool = False
    ) -> str | None:
        before = self.writer[g], self.write_epoch[g]
        report = self._check_write(warp, lanes, g, before, partial)
        self._written(self.lanes(warp).start + lanes, self.epoch[warp], g, line)
        return report or self._barrier_memory(g)

    def generic_atomic(
        self, warp: int, lanes: np.ndarray, g: np.ndarray, line: int, partial: bool = False
    ) -> str | None:
        """Atomics of threads do not race with each other."""
        first = g[~self.atomic[g]]
        self.plain_writer[first], self.plain_epoch[first] = self.writer[first], self.write_epoch[first]
        before = self.plain_writer[g], self.plain_epoch[g]
        report = self._check_write(warp, lanes, g, before, partial)
        self._written(self.lanes(warp).start + lanes, self.epoch[warp], g, line, atomic=True)
        return report or self._barrier_memory(g)

    def _written(self, agent, epoch: int, g: np.ndarray, line: int, atomic: bool = False) -> None:
        self.writer[g] = agent
        self.write_epoch[g] = epoch
        self.write_line[g] = line
        self.atomic[g] = atomic

    def _barrier_memory(self, g: np.ndarray) -> str | None:
        """Only mbarrier instructions may touch an mbarrier (9.7.13.15)."""
        if not self.barrier[g].any():
            return None
        return f"touches shared bytes {int(np.asarray(g)[np.argmax(self.barrier[g])]) * GRANULE:#x} of a live mbarrier"

    def _check_write(self, warp: int, lanes: np.ndarray, g: np.ndarray, before: tuple, partial: bool) -> str | None:
        """`before`: (writer, epoch) of the writes it must follow."""
        writer, epoch = before
        bad = self._unknown(warp, lanes, writer, epoch)
        if partial and bad.any():
            bad &= writer < self.readers
        if bad.any():
            return self._race("overwrites", bad, g)
        used = self.warps + len(self._names)
        late = self.read_epoch[:used, g] > self.common[warp, NOW, :used, None]
        if partial:
            late[: self.warps] = False
        if not late.any():
            return None
        late[warp] &= self.read_lane[warp, g] != lanes
        for agent, i in np.argwhere(late):
            lane = int(lanes[i])
            table = self.alone[warp].get(lane, self.common[warp])
            if self._may_read(table[NOW], int(agent), int(g[i]), warp, lane):
                return self._late(int(agent), int(g[i]))
        return None

    def _may_read(self, known: np.ndarray, agent: int, at: int, warp: int = -1, lane: int = -1) -> bool:
        """Whether the agent's last read of a granule is not known; `lane` of `warp` knows its own."""
        epoch = self.read_epoch[agent, at]
        if known[agent] >= epoch:
            return False
        if agent >= self.warps:
            return True
        reader = int(self.read_lane[agent, at])
        of_lanes = known[self.lanes(agent)]
        if reader != SEVERAL:
            return of_lanes[reader] < epoch
        others = np.arange(LANES) != (lane if agent == warp else -1)
        return bool((of_lanes[others] < epoch).any())

    def _late(self, agent: int, at: int) -> str:
        return (
            f"overwrites shared bytes {at * GRANULE:#x} that {self.name(agent)} may still read "
            f"(line {self.read_line[agent, at]})"
        )

    def _race(self, verb: str, bad: np.ndarray, g: np.ndarray) -> str:
        at = int(np.asarray(g)[np.argmax(bad)])
        return (
            f"{verb} shared bytes {at * GRANULE:#x} written by {self.name(int(self.writer[at]))} "
            f"(line {self.write_line[at]}) without an ordering between them"
        )

    # ---- asynchronous proxy; `known` is the issuer's token at issue

    def async_read(self, known: np.ndarray, agent: int, epoch: int, g: np.ndarray, line: int) -> tuple[str, str] | None:
        """(check, report) of an asynchronous read issued with what `known` says."""
        writer = self.writer[g]
        unordered = (writer >= 0) & (known[0][writer] < self.write_epoch[g])
        if unordered.any():
            result = "race", self._race("reads asynchronously", unordered, g)
        else:
            result = self._unfenced(known, g, "reads")
        self.read_epoch[agent, g] = np.maximum(self.read_epoch[agent, g], epoch)
        self.read_line[agent, g] = line
        return result

    def async_write(
        self, known: np.ndarray, agent: int, epoch: int, g: np.ndarray, line: int
    ) -> tuple[str, str] | None:
        race, writer = None, self.writer[g]
        bad = (writer >= 0) & (known[0][writer] < self.write_epoch[g])
        if bad.any():
            race = self._race("overwrites", bad, g)
        else:
            used = self.warps + len(self._names)
            late = np.argwhere(self.read_epoch[:used, g] > known[0][:used, None])
            race = next(
                (self._late(int(a), int(g[i])) for a, i in late if self._may_read(known[0], int(a), int(g[i]))), None
            )
        race = race or self._barrier_memory(g)
        unfenced = self._unfenced(known, g, "overwrites")
        self._written(agent, epoch, g, line)
        return ("race", race) if race else unfenced

    def _unfenced(self, known: np.ndarray, g: np.ndarray, what: str) -> tuple[str, str] | None:
        """Generic writes before an asynchronous access, with no fence.proxy.async between them (8.6)."""
        writer = self.writer[g]
        bad = (writer >= self.readers) & (known[1][writer] < self.write_epoch[g])
        if not bad.any():
            return None
        at = int(np.asarray(g)[np.argmax(bad)])
        return (
            "proxy_fence",
            f"the asynchronous proxy {what} shared bytes {at * GRANULE:#x} written by generic stores of "
            f"{self.name(int(self.writer[at]))} (line {self.write_line[at]}) without fence.proxy.async",
        )
