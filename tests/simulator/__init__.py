"""A functional simulator of PTX for Hopper and Blackwell kernels; README.md says what it models."""

from .cta import Report
from .machine import SimulationError
from .ptx import PtxError
from .simulator import Simulator, compile_ptx

__all__ = ["PtxError", "Report", "SimulationError", "Simulator", "compile_ptx"]
