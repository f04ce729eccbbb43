"""Happens-before of a CTA's shared memory and tensor memory: vector clocks and shadow state.

An *agent* is a warp, a transaction barrier (all asynchronous operations that complete on it) or a warp(group)'s
asynchronous unit. `now[a]` is what agent `a` knows of each agent; `proxy[a]` the part of it that is also visible to
the asynchronous proxy (PTX ISA 8.6 proxies, 9.7.13.4 fence.proxy).
"""

from __future__ import annotations

import numpy as np

GRANULE = 4  # bytes


class Clocks:
    """`warps` warps and up to `spare` asynchronous agents over `size` bytes of shared memory."""

    def __init__(self, warps: int, size: int, spare: int = 128):
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
        self._names: dict[object, int] = {}

    def close(self) -> None:
        """Frees the tens of megabytes that a cycle of objects would keep until it is collected."""
        del self.read_epoch, self.read_line

    def agent(self, key: object) -> int:
        """Number of an asynchronous agent."""
        if key not in self._names:
            self._names[key] = self.warps + len(self._names)
            if self._names[key] >= self.agents:
                raise RuntimeError("too many asynchronous agents in one CTA")
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
        np.maximum(self.now[warp], token[0], out=self.now[warp])
        np.maximum(self.proxy[warp], token[1], out=self.proxy[warp])
        np.maximum(self.tensor_received[warp], token[2], out=self.tensor_received[warp])

    def tensor_release(self, warp: int) -> None:
        """tcgen05.fence::before_thread_sync."""
        np.maximum(self.tensor_published[warp], self.tensor_known[warp], out=self.tensor_published[warp])

    def tensor_acquire(self, warp: int) -> None:
        """tcgen05.fence::after_thread_sync."""
        np.maximum(self.tensor_known[warp], self.tensor_received[warp], out=self.tensor_known[warp])

    def fence_proxy(self, warp: int) -> None:
        np.maximum(self.proxy[warp], self.now[warp], out=self.proxy[warp])

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
        return self._race("reads", bad, g) if bad.any() else None

    def generic_write(self, warp: int, g: np.ndarray, line: int, partial: bool = False) -> str | None:
        report = self._check_write(self.now[warp], warp, g, self.warps if partial else 0)
        self.writer[g] = warp
        self.write_epoch[g] = self.now[warp, warp]
        self.write_line[g] = line
        return report

    def _check_write(self, known: np.ndarray, warp: int, g: np.ndarray, first: int = 0) -> str | None:
        """`first`: agents below it are not looked at."""
        writer = self.writer[g]
        bad = (writer >= first) & (writer != warp) & (known[writer] < self.write_epoch[g])
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
        now, proxy = known[:2]
        writer = self.writer[g]
        generic = (writer >= 0) & (writer < self.warps)
        result = None
        unordered = (writer >= 0) & (writer != issuer) & (now[writer] < self.write_epoch[g])
        unfenced = generic & ~unordered & (proxy[writer] < self.write_epoch[g])
        if unordered.any():
            result = "race", self._race("reads asynchronously", unordered, g)
        elif unfenced.any():
            at = int(np.asarray(g)[np.argmax(unfenced)])
            result = (
                "proxy_fence",
                f"the asynchronous proxy reads shared bytes {at * GRANULE:#x} written by generic stores of "
                f"{self.name(int(self.writer[at]))} (line {self.write_line[at]}) without fence.proxy.async",
            )
        self.read_epoch[agent, g] = np.maximum(self.read_epoch[agent, g], epoch)
        self.read_line[agent, g] = line
        return result

    def async_write(self, known, issuer: int, agent: int, epoch: int, g: np.ndarray, line: int) -> str | None:
        report = self._check_write(known[0], issuer, g)
        self.writer[g] = agent
        self.write_epoch[g] = epoch
        self.write_line[g] = line
        return report
