"""The public face: a simulated device that runs msa_ext's CUDA path, or single PTX kernels."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import fatbin, layouts, memory, ptx, shim
from .cta import Report
from .machine import Launch, Machine, Profile, SimulationError
from .ptx import PtxError
from .streams import Streams
from .translate import LANES, Program

DEVICES = {"b200": ("NVIDIA B200 (simulated)", 10, 0, 148), "h200": ("NVIDIA H200 (simulated)", 9, 0, 132)}


@dataclass
class _Launch(Launch):
    """A launch and its parameter block."""

    parameter_base: np.uint64 = np.uint64(0)
    parameter_cache: dict = None
    grid_workspace: int = 0

    def parameter(self, offset: int, size: int) -> np.ndarray:
        key = offset, size
        value = self.parameter_cache.get(key)
        if value is None:
            region = self.parameters
            if offset + size > region.size:
                raise memory.MemoryFault("out_of_bounds", f"parameter bytes {offset} + {size} of {region.size}")
            raw = region.data[offset : offset + size].tobytes()
            value = np.full(LANES, int.from_bytes(raw, "little"), memory.UNSIGNED[size])
            self.parameter_cache[key] = value
        return value


_parse = functools.lru_cache(maxsize=64)(ptx.parse)  # a process runs one library many times


class Module:
    """Parsed PTX whose variables live in simulated memory."""

    def __init__(self, simulator: Simulator, text: str, registers: dict[str, int] | None = None):
        self.registers = registers or {}  # of a thread at launch, by kernel
        self.major = simulator.major
        self.parsed = _parse(text)
        self.addresses: dict[str, int] = {}
        self.programs: dict[str, Program] = {}
        variables = [v for v in self.parsed.variables.values() if v.space in ("global", "const") and v.bytes]
        for variable in variables:
            initial = variable.initial.ljust(variable.bytes, b"\0")
            self.addresses[variable.name] = simulator.allocate(variable.bytes, initial, name=variable.name)
        for variable in variables:
            region = simulator.machine.memory.at(self.addresses[variable.name])
            region.constant = region.read_only = variable.space == "const"
            for p in variable.pointers:
                if p.symbol not in self.addresses:
                    raise PtxError(f"initial value of {variable.name}: the address of {p.symbol} is not modelled")
                value = (self.addresses[p.symbol] + p.addend >> p.shift) % (1 << 8 * p.bytes)
                region.data[p.offset : p.offset + p.bytes] = list(value.to_bytes(p.bytes, "little"))

    def program(self, name: str) -> Program:
        if name not in self.programs:
            matches = [k for k in self.parsed.kernels if k == name] or [k for k in self.parsed.kernels if name in k]
            if len(matches) != 1:
                raise KeyError(f"kernel {name!r}: expected one of {', '.join(self.parsed.kernels)}")
            kernel = self.parsed.kernels[matches[0]]
            for x in kernel.instructions:
                if self.major != {"wgmma": 9, "tcgen05": 10}.get(x.parts[0], self.major):
                    raise PtxError(f"{name}, line {x.line}: {x.opcode} on a device of capability {self.major}.x")
            self.programs[name] = Program(self.parsed, kernel, self.addresses)
        return self.programs[name]


class Simulator:
    """A simulated device, as a context manager.

    Inside the block msa_ext's CUDA path runs in the simulator on CPU tensors; `launch` runs a single PTX kernel.

    Args:
        device: "b200" or "h200".
        num_sms: default: the device's.
        num_devices: devices the CUDA runtime reports.
        mode: "eager" (asynchronous work is done at issue), "late" (at the last moment) or "random".
        seed: of the adversary and the scheduler.
        mma_order: "issue" (one thread's MMAs execute in order) or "isa" (only the order the ISA promises).
        checks: severity "error", "warning" or "off" by check name, see machine.DEFAULT_CHECKS. Below "error" an
            uninitialised read gives the bytes as they are; after an access out of bounds or misaligned, a trap or an
            index past the targets of brx.idx the warp ends.

    Attributes:
        reports: findings of severity warning and error, oldest first.
        rewrite: changes the PTX text of a library's module before it is parsed.
    """

    _active: Simulator | None = None

    def __init__(
        self,
        device: str = "b200",
        num_sms: int | None = None,
        num_devices: int = 1,
        mode: str = "late",
        seed: int = 0,
        mma_order: str = "issue",
        checks: dict[str, str] | None = None,
    ):
        if device not in DEVICES:
            raise ValueError(f"device: expected one of {', '.join(DEVICES)}, got {device!r}")
        self.name, self.major, self.minor, sms = DEVICES[device]
        self.num_devices = num_devices
        self.machine = Machine(num_sms=num_sms or sms, mode=mode, seed=seed, mma_order=mma_order, checks=checks)
        self.streams = Streams(self.machine)
        self.launches: list[tuple[str, tuple[int, int, int], float]] = []
        self._buffers: dict[int, np.ndarray] = {}
        self._modules: dict[object, Module] = {}
        self._stack = contextlib.ExitStack()
        self._stubs: dict[int, tuple[int, str]] = {}
        self._fatbins: dict[int, int] = {}
        self.error: BaseException | None = None
        self.rewrite: Callable[[str], str] | None = None

    # ---- memory

    @property
    def reports(self) -> list[Report]:
        return self.machine.reports

    def allocate(self, size: int, data: bytes | None = None, *, name: str = "allocation", host_element: int = 0) -> int:
        """Address of `size` new bytes, 256-byte aligned, uninitialised without `data`; see memory.Region."""
        raw = np.full(size + 256, memory.POISON_BYTE, np.uint8)
        start = -raw.ctypes.data % 256
        address = raw.ctypes.data + start
        if data is not None:
            raw[start : start + size] = np.frombuffer(data[:size], np.uint8)
        self._buffers[address] = raw
        self.machine.memory.register(
            address, size, initialised=data is not None, name=name, keep=raw, host_element=host_element
        )
        return address

    def free(self, address: int) -> None:
        """Gives memory of `allocate` back."""
        self.machine.memory.unregister(self.machine.memory.find(address, 1))
        self._buffers.pop(address)

    def array(self, data: np.ndarray | None = None, *, shape=None, dtype=None, name: str = "array") -> np.ndarray:
        """A device array: a copy of `data`, or an uninitialised one of `shape` and `dtype`."""
        like = np.asarray(data) if data is not None else np.empty(shape, dtype)
        data = like.tobytes() if data is not None else None
        address = self.allocate(like.nbytes, data, name=name, host_element=min(like.itemsize, 8))
        return memory.host_bytes(address, like.nbytes).view(like.dtype).reshape(like.shape)

    def register(self, tensor, *, initialised: bool, name: str) -> None:
        """Makes a CPU torch tensor's storage accessible to kernels."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return
        known = self.machine.memory
        address, size = storage.data_ptr(), storage.nbytes()
        for region in known.regions:
            if region.base <= address and address + size <= region.base + region.size:
                if getattr(region, "storage", None) == storage._cdata or region.name.startswith("workspace"):
                    return
        region = known.register(
            address, size, initialised=initialised, name=name, keep=tensor, host_element=min(tensor.element_size(), 8)
        )
        region.storage = storage._cdata

    # ---- single kernels

    def load(self, text: str) -> Module:
        """Parses PTX text."""
        key = hashlib.sha256(text.encode()).digest()
        if key not in self._modules:
            self._modules[key] = Module(self, text)
        return self._modules[key]

    def launch(
        self,
        module: Module | str,
        kernel: str,
        grid,
        block,
        *arguments,
        shared_bytes: int = 0,
        registers: int = 0,
        stream: int | None = None,
        may_overlap: bool = False,
    ) -> None:
        """Runs one kernel of a module or PTX text to its end, or enqueues it in a stream until `synchronize`.

        `arguments` are device arrays (passed as addresses), Python ints and floats (converted to the parameter's
        size), or bytes. `registers`: of a thread at launch; 0: the register file divided by the threads, at most 255.
        `may_overlap`: the grid before it in its stream, by programmatic dependent launch.

        Raises:
            SimulationError: a check of severity error fired.
            PtxError: the kernel has something that is not modelled.
        """
        if isinstance(module, str):
            module = self.load(module)
        program = module.program(kernel)
        data = bytearray(program.kernel.parameter_bytes)
        if len(arguments) != len(program.kernel.parameters):
            raise TypeError(f"{kernel}: expected {len(program.kernel.parameters)} arguments, got {len(arguments)}")
        for parameter, value in zip(program.kernel.parameters, arguments):
            if isinstance(value, np.ndarray):
                value = value.ctypes.data
            if isinstance(value, (float, np.floating)):
                value = np.array(value, {4: np.float32, 8: np.float64}[parameter.bytes]).tobytes()
            if isinstance(value, (int, np.integer)):
                value = (int(value) % (1 << 8 * parameter.bytes)).to_bytes(parameter.bytes, "little")
            if len(value) != parameter.bytes:
                raise TypeError(f"{kernel}: expected {parameter.bytes} bytes for {parameter.name}, got {len(value)}")
            data[parameter.offset : parameter.offset + parameter.bytes] = value
        if stream is None:
            self.streams.flush()
        launch = self._make_launch(program, grid, block, shared_bytes, bytes(data), registers)
        self.streams.launch(stream or 0, launch, may_overlap=may_overlap)
        if stream is None:
            self.streams.flush()

    def tensor_map(self, array: np.ndarray, box: tuple[int, ...], *, swizzle: int = 0, kind: str = "bf16") -> bytes:
        """128 bytes describing a C-contiguous array, box and sizes innermost first, as the driver would make them."""
        codes = {"bf16": 9, "f16": 6, "f32": 7}
        sizes = tuple(reversed(array.shape))
        strides = tuple(reversed(array.strides))[1:]
        mode = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]
        return layouts.encode_tensor_map(
            codes[kind], array.ndim, array.ctypes.data, sizes, strides, box, (1,) * array.ndim, 0, mode, 0
        )

    def _make_launch(
        self, program: Program, grid, block, shared_bytes: int, parameters: bytes, registers: int, cooperative=False
    ) -> _Launch:
        def three(x):
            return (x, 1, 1) if isinstance(x, int) else (*x, 1, 1)[:3]

        size = max(len(parameters), 1)
        address = self.allocate(size, parameters or b"\0", name=f"parameters of {program.name}")
        region = self.machine.memory.find(address, size)
        region.read_only = True
        launch = _Launch(program, three(grid), three(block), shared_bytes, region, cooperative, registers)
        launch.parameter_base, launch.parameter_cache = np.uint64(address), {}
        if cooperative:
            launch.grid_workspace = self.allocate(64, bytes(64), name="cooperative grid workspace")

        def ended():
            self.free(address)
            if cooperative:
                self.free(launch.grid_workspace)
            if launch.started:
                self.launches.append((program.name, launch.grid, launch.instructions))

        launch.on_end = ended
        return launch

    # ---- msa_ext

    def __enter__(self) -> Simulator:
        if Simulator._active is not None:
            raise RuntimeError("Simulator: another one is active")
        self._connect()
        try:
            import msa_ext._runtime as runtime
        except ImportError:
            runtime = None
        if runtime is not None:
            self._patch(runtime)
        Simulator._active = self
        return self

    def __exit__(self, *exception) -> None:
        Simulator._active = None
        self._stack.close()
        self.streams.clear()
        self.machine.memory.__init__()
        self._modules.clear()
        gc.collect()  # a CTA is a cycle of objects that holds tens of megabytes

    def _connect(self) -> None:
        library = shim.load()
        self._callbacks = (
            shim.LAUNCH(self._on_launch), shim.MEMSET(self._on_memset), shim.ENCODE(self._on_encode),
            shim.STREAM(self._on_stream),
        )  # fmt: skip
        library.msa_sim_connect(*self._callbacks)
        library.msa_sim_device(
            self.name.encode(), self.major, self.minor, self.machine.num_sms, ctypes.c_int(self.num_devices)
        )
        self._library = library

    def _patch(self, runtime) -> None:
        import torch

        from msa_ext import debug

        simulator = self

        def workspace(total_bytes, sections, device):
            tensor = torch.full((total_bytes,), memory.POISON_BYTE, dtype=torch.uint8)
            simulator._workspace = tensor
            for name, offset, size in sections:
                if size:
                    region = simulator.machine.memory.register(
                        tensor.data_ptr() + offset,
                        size,
                        initialised=False,
                        name=f"workspace section {name}",
                        keep=tensor,
                    )
                    region.storage = None
            return tensor

        def empty_like(like, dtype):
            tensor = torch.empty(like.shape, dtype=dtype)
            tensor.view(torch.uint8).fill_(memory.POISON_BYTE) if tensor.numel() else None
            simulator.register(tensor, initialised=False, name="an output")
            return tensor

        def address(tensor):
            if tensor.numel():
                workspace_tensor = getattr(simulator, "_workspace", None)
                if workspace_tensor is None or tensor.data_ptr() != workspace_tensor.data_ptr():
                    simulator.register(tensor, initialised=True, name="an argument")
            return tensor.data_ptr() if tensor.numel() else 0

        @contextlib.contextmanager
        def guard(device):
            """The calls of one backward; its caller may read what they wrote."""
            try:
                yield
            except BaseException:
                simulator.streams.clear()
                raise
            simulator.synchronize()

        replaced = {
            "is_cuda": lambda device: True,
            "capability": lambda device: (simulator.major, simulator.minor),
            "guard": guard,
            "stream": lambda device: 0,
            "empty_like": empty_like,
            "workspace": workspace,
            "address": address,
            "synchronize": lambda device: simulator.synchronize(),
            "is_capturing": lambda device: False,
        }
        for name, function in replaced.items():
            self._stack.callback(setattr, runtime, name, getattr(runtime, name))
            setattr(runtime, name, function)
        flags = dict(debug._last)
        debug._last.clear()
        self._stack.callback(lambda: (debug._last.clear(), debug._last.update(flags)))

    # ---- callbacks of the shim

    def _fail(self, error: BaseException) -> int:
        self.error = error
        self._library.msa_sim_message(str(error).encode()[:4000])
        return 1

    def _find(self, stub: int) -> tuple[Program, int]:
        """The kernel of a host stub, and the registers a thread of its cubin starts with."""
        if stub not in self._stubs:
            fatbins, stubs = self._fatbins, self._stubs

            def on_function(handle, address, name):
                stubs[address] = handle, name.decode()

            keep = (
                shim.FATBIN(lambda wrapper, handle: fatbins.__setitem__(handle, wrapper)),
                shim.FUNCTION(on_function),
                shim.VARIABLE(lambda *a: None),
            )
            self._library.msa_sim_each(*keep)
        if stub not in self._stubs:
            raise SimulationError(f"launch of an unregistered kernel at {stub:#x}")
        handle, name = self._stubs[stub]
        if handle not in self._modules:
            data = fatbin.from_memory(self._fatbins[handle])
            entries = dict(fatbin.ptx_entries(data))
            arch = self.major * 10 + self.minor
            if arch not in entries:
                raise SimulationError(f"{name}: no PTX for sm_{arch}, only for {sorted(entries)}")
            text = entries[arch] if self.rewrite is None else self.rewrite(entries[arch])
            counts = {kernel: n for (target, kernel), n in fatbin.register_counts(data).items() if target == arch}
            self._modules[handle] = Module(self, text, counts)
        module = self._modules[handle]
        return module.program(name), module.registers.get(name, 0)

    def _on_launch(self, stub, sizes, arguments, shared_bytes, stream, cooperative, overlap) -> int:
        try:
            program, registers = self._find(stub)
            data = bytearray(program.kernel.parameter_bytes)
            for i, parameter in enumerate(program.kernel.parameters):
                value = ctypes.string_at(arguments[i], parameter.bytes)
                data[parameter.offset : parameter.offset + parameter.bytes] = value
            grid, block = tuple(sizes[0:3]), tuple(sizes[3:6])
            launch = self._make_launch(program, grid, block, shared_bytes, bytes(data), registers, bool(cooperative))
            self.streams.launch(stream or 0, launch, may_overlap=bool(overlap))
        except (SimulationError, PtxError, memory.MemoryFault, KeyError, ValueError) as error:
            return self._fail(error)
        except BaseException as error:  # an exception cannot cross the C frames
            import traceback

            traceback.print_exc()
            return self._fail(error)
        return 0

    def synchronize(self) -> None:
        """Does what is enqueued on all streams.

        Raises:
            RuntimeError: a check of severity error fired, or a kernel has something that is not modelled.
        """
        try:
            self.streams.flush()
        except (PtxError, memory.MemoryFault, KeyError, ValueError) as error:
            self.error = error
            raise RuntimeError(str(error)) from error

    def _on_stream(self, what, stream, event) -> int:
        if what == shim.STREAM_RECORD:
            self.streams.record(stream or 0, event)
        elif what == shim.STREAM_WAIT:
            self.streams.wait(stream or 0, event)
        else:
            try:
                self.synchronize()
            except BaseException as error:  # an exception cannot cross the C frames
                return self._fail(error)
        return 0

    def _on_memset(self, target, value, size, stream) -> int:
        if size:
            self.streams.push(stream or 0, lambda: self._memset(target, value, size))
        return 0

    def _memset(self, target: int, value: int, size: int) -> None:
        covered = 0
        for region in self.machine.memory.regions:
            low, high = max(region.base, target), min(region.base + region.size, target + size)
            if low < high:
                region.data[low - region.base : high - region.base] = value & 0xFF
                region.mark(low - region.base, high - region.base)
                covered += high - low
        if covered == 0:
            raise SimulationError(f"cudaMemsetAsync at {target:#x}, outside every allocation")

    def _on_encode(self, target, kind, rank, address, sizes, strides, box, element_strides, interleave, mode, l2, fill):
        try:

            def values(pointer, kind_, count):
                return tuple((kind_ * count).from_address(pointer)) if count else ()

            raw = layouts.encode_tensor_map(
                kind, rank, address or 0, values(sizes, ctypes.c_uint64, rank),
                values(strides, ctypes.c_uint64, rank - 1), values(box, ctypes.c_uint32, rank),
                values(element_strides, ctypes.c_uint32, rank), interleave, mode, fill,
            )  # fmt: skip
            if target % 64:
                raise layouts.LayoutError(f"tensor map at {target:#x}, not a multiple of 64")
            ctypes.memmove(target, raw, 128)
        except (layouts.LayoutError, ValueError) as error:
            return self._fail(error)
        return 0

    # ---- profile

    @contextlib.contextmanager
    def profiled(self):
        """Counts executed warp instructions inside the block; yields a `Profile`."""
        self.machine.profile = Profile()
        try:
            yield self.machine.profile
        finally:
            self.machine.profile = None


def _compiled(source: Path, arch: str, suffix: str, options: list[str]) -> Path:
    root = Path(__file__).resolve().parents[2]
    includes = [root / "csrc", root / "third_party/cutlass/include"]
    key = hashlib.sha256(source.read_bytes() + repr((arch, options)).encode()).hexdigest()[:16]
    target = shim.cache_directory() / f"{source.stem}.{arch}.{key}{suffix}"
    if not target.exists():
        new = target.with_suffix(f".{os.getpid()}")
        command = [
            "nvcc", "-std=c++17", "--expt-relaxed-constexpr", "-o", str(new), str(source), *options,
            *(f"-I{i}" for i in includes),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc failed on {source.name}:\n{done.stderr}")
        os.replace(new, target)
    return target


def compile_ptx(source: Path, arch: str = "sm_90a", *options: str) -> str:
    """PTX of a .cu file, compiled by nvcc once and cached.

    Raises:
        RuntimeError: nvcc fails.
    """
    return _compiled(source, arch, ".ptx", [f"-arch={arch}", "-ptx", *options]).read_text()


def compile_library(source: Path, arch: str = "sm_90a") -> Path:
    """A .cu file as a shared library that carries PTX only, compiled once and cached.

    Raises:
        RuntimeError: nvcc fails.
    """
    virtual = arch.replace("sm_", "compute_")
    options = ["-gencode", f"arch={virtual},code={virtual}", "-Xcompiler=-fPIC,-O0", "-shared", "-cudart=shared"]
    return _compiled(source, arch, ".so", options)
