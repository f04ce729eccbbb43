"""MiniMax Sparse Attention (MSA) for PyTorch, trainable.

The entry points are `msa_ext.attention` and, below it, `msa_ext.backward.run_backward`; see README.md.
"""

from importlib.metadata import PackageNotFoundError, version

from .attention import attention
from .backward import run_backward
from .schedule import MSABackwardSchedule, align_kv, build_schedule, unalign_kv

try:
    __version__ = version("msa_ext")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "MSABackwardSchedule",
    "__version__",
    "align_kv",
    "attention",
    "build_schedule",
    "run_backward",
    "unalign_kv",
]
