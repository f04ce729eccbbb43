"""Happens-before of a CTA's shared memory and tensor memory: vector clocks and shadow state.

An *agent* is a warp, a transaction barrier (all asynchronous operations that complete on it) or a warp(group)'s
asynchronous unit. `now[a]` is what agent `a` knows of each agent; `proxy[a]` the part of it that is also visible to
the asynchronous proxy (PTX ISA 8.6 proxies, 9.7.13.4 fence.proxy).
"""

from __future__ import annotations

import numpy as np

from .ptx import PtxError

GRANULE = 4  # bytes


def join(known: tuple, token: tuple) -> None:
    """Adds to what is known."""
    for mine, other in zip(known, token):
        np.maximum(mine, other, out=mine)


class Clocks:
    """`warps` warps and up to `spare` asynchronous agents over `size` bytes of shared memory."""

    def __init__(self, warps: int, size: int, spare: int = 256):
        self.warps = warps
        self.agents = warps + spare
        self.now = np.zeros((warps, self.agents), np.int32)
        self.proxy = np.zeros((warps, self.agents), np.int32)
        # Of tensor memory: known to a warp's tcgen05 accesses; published by fence::before; received but not yet fenced.
        self.tensor_known = np.zeros((warps, self.agents), np.int32)
        self.tensor_published = np.zeros((warps, self.agents), np.int32)
        self.tensor_received = np.zeros((warps, self.agents), np.int32)
        for w in range(warps):
            self.now[w, w] = 1
        self.counter = np.zeros(self.agents, np.int32)  # of asynchronous agents
        granules = -(-max(size, 1) // GRANULE)
        self.writer = np.full(granules, -1, np.int16)
        self.write_epoch = np.zeros(granules, np.int32)
        self.write_line = np.zeros(granules, np.int32)
        self.read_epoch = np.zeros((self.agents, granules), np.int32)
        self.read_line = np.zeros((self.agents, granules), np.int32)
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
            if self._names[key] >= self.agents:
                raise PtxError(f"more than {self.agents - self.warps} mbarriers and asynchronous units of a CTA")
        return self._names[key]

    def name(self, agent: int) -> str:
        if agent < self.warps:
            return f"warp {agent}"
        return next(" ".join(map(str, k)) for k, v in self._names.items() if v == agent)

    # ---- release and acquire

    def token(self, warp: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What a release by the warp would publish."""
        return self.now[warp], self.proxy[warp], self.tensor_published[warp]

    def release(self, warp: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the warp publishes; its later accesses belong to a new epoch."""
        token = tuple(v.copy() for v in self.token(warp))
        self.now[warp, warp] += 1
        return token

    def acquire(self, warp: int, token) -> None:
        join((self.now[warp], self.proxy[warp], self.tensor_received[warp]), token)

    def only_tensor(self, token) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What a relaxed arrival or wait hands over: only what the tcgen05 fences add (9.7.16.6.3)."""
        return *self.zero()[:2], token[2]

    def tensor_release(self, warp: int) -> None:
        """tcgen05.fence::before_thread_sync."""
        np.maximum(self.tensor_published[warp], self.tensor_known[warp], out=self.tensor_published[warp])

    def tensor_acquire(self, warp: int) -> None:
        """tcgen05.fence::after_thread_sync."""
        np.maximum(self.tensor_known[warp], self.tensor_received[warp], out=self.tensor_known[warp])

    def fence_proxy(self, warp: int) -> None:
        np.maximum(self.proxy[warp], self.now[warp], out=self.proxy[warp])
        self.now[warp, warp] += 1  # what the warp does later is not fenced

    def zero(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return tuple(np.zeros(self.agents, np.int32) for _ in range(3))

    # ---- generic accesses of a warp; `g` are granule numbers

    def generic_read(self, warp: int, g: np.ndarray, line: int, partial: bool = False) -> str | None:
        """`partial`: of less than a granule, whose other part another warp may own."""
        writer = self.writer[g]
        bad = (
            (writer >= (self.warps if partial else 0))
            & (writer != warp)
            & (self.now[warp][writer] < self.write_epoch[g])
        )
        self.read_epoch[warp, g] = self.now[warp, warp]
        self.read_line[warp, g] = line
        return self._race("reads", bad, g) if bad.any() else self._barrier_memory(g)

    def generic_write(self, warp: int, g: np.ndarray, line: int, partial: bool = False) -> str | None:
        before = self.writer[g], self.write_epoch[g]
        report = self._check_write(self.now[warp], warp, g, before, self.warps if partial else 0)
        self._written(warp, self.now[warp, warp], g, line)
        return report or self._barrier_memory(g)

    def generic_atomic(self, warp: int, g: np.ndarray, line: int, partial: bool = False) -> str | None:
        """Atomics of warps do not race with each other."""
        first = g[~self.atomic[g]]
        self.plain_writer[first], self.plain_epoch[first] = self.writer[first], self.write_epoch[first]
        before = self.plain_writer[g], self.plain_epoch[g]
        report = self._check_write(self.now[warp], warp, g, before, self.warps if partial else 0)
        self._written(warp, self.now[warp, warp], g, line, atomic=True)
        return report or self._barrier_memory(g)

    def _written(self, agent: int, epoch: int, g: np.ndarray, line: int, atomic: bool = False) -> None:
        self.writer[g] = agent
        self.write_epoch[g] = epoch
        self.write_line[g] = line
        self.atomic[g] = atomic

    def _barrier_memory(self, g: np.ndarray) -> str | None:
        """Only mbarrier instructions may touch an mbarrier (9.7.13.15)."""
        if not self.barrier[g].any():
            return None
        return f"touches shared bytes {int(np.asarray(g)[np.argmax(self.barrier[g])]) * GRANULE:#x} of a live mbarrier"

    def _check_write(self, known: np.ndarray, warp: int, g: np.ndarray, before: tuple, first: int = 0) -> str | None:
        """`before`: (writer, epoch) of the writes it must follow; `first`: agents below it are not looked at."""
        writer, epoch = before
        bad = (writer >= first) & (writer != warp) & (known[writer] < epoch)
        if bad.any():
            return self._race("overwrites", bad, g)
        used = self.warps + len(self._names)
        late = self.read_epoch[:used, g] > known[:used, None]
        late[warp] = False
        late[:first] = False
        if late.any():
            agent = int(np.argmax(late.any(1)))
            at = int(np.asarray(g)[np.argmax(late[agent])])
            return (
                f"overwrites shared bytes {at * GRANULE:#x} that {self.name(agent)} may still read "
                f"(line {self.read_line[agent, at]})"
            )
        return None

    def _race(self, verb: str, bad: np.ndarray, g: np.ndarray) -> str:
        at = int(np.asarray(g)[np.argmax(bad)])
        return (
            f"{verb} shared bytes {at * GRANULE:#x} written by {self.name(int(self.writer[at]))} "
            f"(line {self.write_line[at]}) without an ordering between them"
        )

    # ---- asynchronous proxy; `known` is the issuer's token at issue

    def async_read(
        self, known, issuer: int, agent: int, epoch: int, g: np.ndarray, line: int
    ) -> tuple[str, str] | None:
        """(check, report) of an asynchronous read issued with what `known` says."""
        writer = self.writer[g]
        unordered = (writer >= 0) & (writer != issuer) & (known[0][writer] < self.write_epoch[g])
        if unordered.any():
            result = "race", self._race("reads asynchronously", unordered, g)
        else:
            result = self._unfenced(known, g, "reads")
        self.read_epoch[agent, g] = np.maximum(self.read_epoch[agent, g], epoch)
        self.read_line[agent, g] = line
        return result

    def async_write(
        self, known, issuer: int, agent: int, epoch: int, g: np.ndarray, line: int
    ) -> tuple[str, str] | None:
        race = self._check_write(known[0], issuer, g, (self.writer[g], self.write_epoch[g])) or self._barrier_memory(g)
        unfenced = self._unfenced(known, g, "overwrites")
        self._written(agent, epoch, g, line)
        return ("race", race) if race else unfenced

    def _unfenced(self, known, g: np.ndarray, what: str) -> tuple[str, str] | None:
        """Generic writes before an asynchronous access, with no fence.proxy.async between them (8.6)."""
        writer = self.writer[g]
        bad = (writer >= 0) & (writer < self.warps) & (known[1][writer] < self.write_epoch[g])
        if not bad.any():
            return None
        at = int(np.asarray(g)[np.argmax(bad)])
        return (
            "proxy_fence",
            f"the asynchronous proxy {what} shared bytes {at * GRANULE:#x} written by generic stores of "
            f"{self.name(int(self.writer[at]))} (line {self.write_line[at]}) without fence.proxy.async",
        )
