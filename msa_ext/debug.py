"""What the device found wrong with a schedule."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _runtime

# Bits of TaskFlags in csrc/params.h.
FLAGS = {
    "work_count_clamped": 1 << 0,  # work_count exceeds work_capacity; the only non-fatal one
    "task_overflow": 1 << 1,  # more tasks than edge_capacity and work_capacity allow
    "bad_item": 1 << 2,  # an item's fields out of range or misaligned
    "bad_query_index": 1 << 3,  # a query index outside its entry, or not ascending
    "bad_row_pointer": 1 << 4,  # a CSR row outside its edges
}
FATAL = sum(bit for name, bit in FLAGS.items() if name != "work_count_clamped")

_last: dict[torch.device, Tensor] = {}
_latest: torch.device | None = None  # device of the last call


def flags_tensor(device: torch.device) -> Tensor:
    """int32 `[1]` that every call on `device` writes its flags to."""
    global _latest
    _latest = device
    if device not in _last:
        _last[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return _last[device]


def decode(bits: int) -> set[str]:
    """Names of the set bits."""
    return {name for name, bit in FLAGS.items() if bits & bit}


def last_flags(device: torch.device | str | None = None) -> set[str]:
    """Names of the flags that the last CUDA call raised; synchronises. Offending tasks were skipped.

    Args:
        device: default: the device of the last call. "cuda" without an index is the current device.
    """
    device = _latest if device is None else torch.device(device)
    if device is not None and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _last:
        return set()
    _runtime.synchronize(device)
    return decode(int(_last[device]))
