"""From a compiled CuTe DSL function to launches on the emulated device.

The function's own host code runs: it checks its arguments, encodes tensor maps and computes the grid. It
is exported to an object file, linked with fake_runtime.c into a shared object, and called through TVM-FFI
with CPU tensors that claim to be CUDA tensors; each launch it makes arrives here with the grid, the
cluster and every byte of the parameters.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests import store

from .faults import EmulatorError
from .machine import Device
from .memory import GlobalMemory
from .program import Program, decode

CLUSTER_ATTRIBUTE = 4  # cudaLaunchAttributeClusterDimension
PDL_ATTRIBUTE = 6  # cudaLaunchAttributeProgrammaticStreamSerialization


@dataclass(frozen=True)
class Launch:
    """What the host code asked for. `params` is the parameter buffer as the kernel sees it."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int  # dynamic shared memory, bytes
    params: np.ndarray = field(repr=False)
    attributes: tuple[int, ...] = ()

    @property
    def by_pdl(self) -> bool:
        """Whether it may begin before the end of the launch before."""
        return PDL_ATTRIBUTE in self.attributes


@dataclass
class Result:
    """What a run counted. The tensors that the kernels wrote were written in place."""

    launches: list[Launch]
    instructions: Counter  # opcode -> executed, summed over warps (an instruction of a warp counts once)
    by_warp: Counter  # warp index in its CTA -> instructions executed, summed over CTAs
    counters: Counter  # bytes moved, barriers waited on, and so on, by name
    warnings: Counter  # faults that the caller chose to ignore
    by_warp_opcode: dict[int, Counter]  # warp index -> opcode -> executed
    by_launch: list[dict[int, Counter]] = field(default_factory=list)  # the same of each of `launches`

    @property
    def total(self) -> int:
        return sum(self.instructions.values())


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    ]


_HOOK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_Config), ctypes.POINTER(ctypes.c_void_p)
)


def ptx_of(compiled) -> str:
    """The PTX text of a compiled function. It must have been compiled with `--keep-ptx` and an existing
    `--dump-dir`."""
    text = getattr(compiled, "__ptx__", None)
    if text and "\n" not in text and os.path.exists(text):
        text = Path(text).read_text()
    if not text or "\n" not in text:
        raise EmulatorError(
            "the function carries no PTX: compile it with options='--keep-ptx --dump-dir <an existing"
            " directory>'"
        )
    return text


class Emulated:
    """A compiled function bound to the emulator. Call `run` with the arguments of the function."""

    def __init__(self, object_file: str | Path, ptx: str, function_name: str):
        import tvm_ffi

        self.ptx = ptx
        self.programs: dict[str, Program] = decode(ptx)
        source = Path(__file__).with_name("fake_runtime.c")
        # What is loaded stays mapped when its file is gone.
        with tempfile.TemporaryDirectory(prefix="emulator-") as folder:
            library = Path(folder) / "host.so"
            command = [
                "gcc",
                "-shared",
                "-fPIC",
                "-O1",
                "-w",
                "-Wl,-Bsymbolic",
                "-o",
                str(library),
                str(source),
                str(object_file),
            ]
            built = subprocess.run(command, capture_output=True, text=True)
            if built.returncode:
                raise EmulatorError(f"linking the host code failed:\n{built.stderr}")
            self._module = tvm_ffi.load_module(str(library))
            self._function = self._module[function_name]
            self._library = ctypes.CDLL(str(library))

    def replace_ptx(self, ptx: str) -> None:
        """Run other device code under the same host code: for mutations."""
        self.ptx, self.programs = ptx, decode(ptx)

    def capture(self, *args) -> list[Launch]:
        """The launches that a call makes, without running them."""
        launches: list[Launch] = []
        self._call(args, launches.append)
        return launches

    def run(
        self, *args, seed: int = 0, ignore=(), resident: int = 16, per_sm: int = 1, extra_tensors=()
    ) -> Result:
        """Call the function on CPU tensors; every launch runs on the emulated device before the call
        returns."""
        memory = GlobalMemory()
        for name, tensor in _tensors((*args, *extra_tensors)):
            memory.add(name, bytes_of(tensor))
        _add_known(memory)
        device = Device(memory, seed, ignore, resident, per_sm)
        launches: list[Launch] = []
        by_launch: list[dict[int, Counter]] = []

        def launch(what: Launch) -> None:
            launches.append(what)
            before = Counter(device.instructions)
            device.launch(self.programs[what.kernel], what)
            by_launch.append(_by_warp(device.instructions - before))

        self._call(args, launch)
        return _result(device, launches, by_launch)

    def _call(self, args, on_launch: Callable[[Launch], None]) -> None:
        failure: list[BaseException] = []

        def hook(name, config, arguments):
            try:
                on_launch(self._read_launch(name.decode(), config.contents, arguments))
                return 0
            except BaseException as error:  # must not cross the C frames: raised again below
                failure.append(error)
                return 0

        callback = _HOOK(hook)
        self._library.emulator_set_hook(callback)
        keep: list = []
        try:
            self._function(*[_claim_cuda(a, keep) for a in args])
        finally:
            self._library.emulator_set_hook(_HOOK())
        if failure:
            raise failure[0]

    def _read_launch(self, name: str, config: _Config, arguments) -> Launch:
        if name not in self.programs:
            raise EmulatorError(f"launch of {name}, which is not in the PTX: {list(self.programs)}")
        entry = self.programs[name].entry
        params = np.zeros(entry.param_bytes, np.uint8)
        for i, p in enumerate(entry.params):
            params[p.offset : p.offset + p.size] = np.frombuffer(
                ctypes.string_at(arguments[i], p.size), np.uint8
            )
        cluster, ids = (1, 1, 1), []
        for i in range(config.attribute_count):
            raw = ctypes.string_at(config.attributes + 72 * i, 72)
            number, value = (int.from_bytes(raw[at : at + 4], "little") for at in (0, 8))
            if number != PDL_ATTRIBUTE or value:  # the DSL gives it to every launch, as 0 or 1
                ids.append(number)
            if number == CLUSTER_ATTRIBUTE:
                x, y, z = (int.from_bytes(raw[8 + 4 * j : 12 + 4 * j], "little") for j in range(3))
                cluster = (x, y, z)
        required = entry.directives.get("reqntid")
        block = tuple(config.block)
        if required and tuple(required) + (1,) * (3 - len(required)) != block:
            raise EmulatorError(f"{name}: launched with block {block}, .reqntid is {required}")
        return Launch(
            name, tuple(config.grid), block, cluster, int(config.dynamic_shared), params, tuple(ids)
        )


def build(compiled) -> Emulated:
    """Bind a function of `cute.compile(..., options="--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-
    dir DIR")`."""
    ptx = ptx_of(compiled)
    with tempfile.TemporaryDirectory(prefix="emulator-") as folder:
        path = os.path.join(folder, "host.o")
        compiled.export_to_c(path, function_name="emulated", export_only_tvm_ffi_symbols=True)
        return Emulated(path, ptx, "emulated")


def load(folder: Path) -> Emulated:
    """Bind what tests/store.py has exported to a folder."""
    return Emulated(folder / store.OBJECT, (folder / store.PTX).read_text(), store.FUNCTION)


def run(
    compiled, *args, seed: int = 0, ignore=(), resident: int = 16, per_sm: int = 1, extra_tensors=()
) -> Result:
    """Run a compiled function, or an `Emulated` from `build`, on CPU tensors.

    args: what the function takes; torch CPU tensors (any nesting in tuples) are written in place.
    seed: draws the schedule. Run several: seeds 0, 1 and 2 have different policies of completing asynchronous
      work.
    ignore: fault codes (faults.FAULTS) to count as warnings where the rule allows going on.
    resident: at most this many CTAs are on the device at once.
    per_sm: of these, so many to an SM, whose tensor memory they share.
    extra_tensors: memory that kernels reach through pointers, not passed as tensors. Raises Fault (with .code
      and .where) when a kernel breaks a rule.
    """
    bound = compiled if isinstance(compiled, Emulated) else build(compiled)
    return bound.run(
        *args, seed=seed, ignore=ignore, resident=resident, per_sm=per_sm, extra_tensors=extra_tensors
    )


def run_ptx(
    ptx: str,
    *args,
    grid=(1, 1, 1),
    block=(32, 1, 1),
    cluster=(1, 1, 1),
    shared=0,
    seed: int = 0,
    ignore=(),
    resident: int = 16,
    per_sm: int = 1,
    pdl: bool = False,
) -> Result:
    """Launch the kernels of a PTX module one after the other, all in this way. args: a value for each
    parameter; CPU tensors stand for their address. pdl: by programmatic dependent launch."""
    memory = GlobalMemory()
    _add_known(memory)
    device = Device(memory, seed, ignore, resident, per_sm)
    attributes = (PDL_ATTRIBUTE,) if pdl else ()
    launches: list[Launch] = []
    by_launch: list[dict[int, Counter]] = []
    for program in decode(ptx).values():
        params = _parameters(program, args, memory)
        launches.append(Launch(program.name, grid, block, cluster, shared, params, attributes))
        before = Counter(device.instructions)
        device.launch(program, launches[-1])
        by_launch.append(_by_warp(device.instructions - before))
    return _result(device, launches, by_launch)


def _parameters(program: Program, args, memory: GlobalMemory) -> np.ndarray:
    """A kernel's parameter buffer; tensors are registered."""
    params = np.zeros(program.entry.param_bytes, np.uint8)
    if len(args) != len(program.entry.params):
        raise EmulatorError(f"{len(args)} arguments for {len(program.entry.params)} parameters")
    for i, (p, value) in enumerate(zip(program.entry.params, args, strict=True)):
        if _is_tensor(value):
            memory.add(f"argument {i}", bytes_of(value))
            value = value.data_ptr()
        kind = {"f32": np.float32, "f64": np.float64}.get(p.type)
        raw = kind(value).tobytes() if kind else int(value).to_bytes(p.size, "little", signed=int(value) < 0)
        params[p.offset : p.offset + p.size] = np.frombuffer(raw, np.uint8)
    return params


def _by_warp(instructions: Counter) -> dict[int, Counter]:
    """Warp index -> opcode -> executed."""
    result: dict[int, Counter] = {}
    for (warp, name), n in instructions.items():
        result.setdefault(warp, Counter())[name] += n
    return result


def _result(device: Device, launches: list[Launch], by_launch: list[dict[int, Counter]]) -> Result:
    by_warp_opcode = _by_warp(device.instructions)
    instructions: Counter = Counter()
    for counts in by_warp_opcode.values():
        instructions += counts
    by_warp = Counter({w: sum(c.values()) for w, c in by_warp_opcode.items()})
    return Result(
        launches, instructions, by_warp, device.counters, device.warnings, by_warp_opcode, by_launch
    )


# ---- tensors


def _is_tensor(x) -> bool:
    return hasattr(x, "__dlpack__") and hasattr(x, "data_ptr")


def _tensors(args, prefix="argument"):
    for i, a in enumerate(args):
        if _is_tensor(a):
            yield f"{prefix} {i}", a
        elif isinstance(a, (tuple, list)):
            yield from _tensors(a, f"{prefix} {i}.")


def bytes_of(tensor) -> np.ndarray:
    """The bytes from a tensor's first to its last element, as a uint8 array on the same memory."""
    if tensor.device.type != "cpu":
        raise EmulatorError(f"a tensor on {tensor.device}: the emulator takes CPU tensors")
    if any(st < 0 for st in tensor.stride()):
        raise EmulatorError("negative strides")
    span = 0
    if tensor.numel():
        span = (
            sum((n - 1) * st for n, st in zip(tensor.shape, tensor.stride(), strict=False)) + 1
        ) * tensor.element_size()
    if not span:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(tensor.data_ptr()))


_trackers: list[known_allocations] = []


def _add_known(memory: GlobalMemory) -> None:
    for tracker in _trackers:
        for i, tensor in enumerate(tracker.tensors):
            memory.add(f"allocation {i} of shape {tuple(tensor.shape)}", bytes_of(tensor))


class known_allocations:
    """While active, CPU tensors that torch creates are memory that kernels may reach through addresses.

    For host code that passes `tensor.data_ptr()` instead of tensors:

        with emulator.known_allocations():
            out = torch.empty(8)
            emulator.run(compiled, x, out.data_ptr())

    The tensors are kept alive until the end.
    """

    def __enter__(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        self.tensors = tensors = []

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                for each in out if isinstance(out, tuple) else (out,):
                    if _is_tensor(each) and each.device.type == "cpu" and each.numel():
                        tensors.append(each)
                return out

        self._mode = Record()
        self._mode.__enter__()
        _trackers.append(self)
        return self

    def __exit__(self, *error):
        _trackers.remove(self)
        return self._mode.__exit__(*error)


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLTensorHead(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _DLDevice)]


class _ClaimsCuda:
    """Hands out a tensor's DLPack capsule with the device changed to CUDA 0."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **_):
        capsule = self.tensor.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        head = _DLTensorHead.from_address(get(capsule, b"dltensor"))
        head.device.device_type, head.device.device_id = 2, 0
        return capsule


def _claim_cuda(value, keep: list):
    import tvm_ffi

    if _is_tensor(value):
        claimed = tvm_ffi.from_dlpack(_ClaimsCuda(value))
        keep.append(claimed)
        return claimed
    if isinstance(value, (tuple, list)):
        claimed = [_claim_cuda(v, keep) for v in value]
        return type(value)(*claimed) if hasattr(value, "_fields") else tuple(claimed)
    return value
