"""A PTX emulator: runs kernels compiled by CuTe DSL for sm_90a and sm_100a on a CPU, and names the rules they
break.

    result = emulator.run(compiled, *cpu_tensors, seed=0)

See README.md for what is modelled, what is not, and how to read a fault.
"""

from .faults import FAULTS, Deadlock, EmulatorError, Fault, UnsupportedInstruction
from .host import Emulated, Launch, Result, build, known_allocations, load, run, run_ptx

__all__ = [
    "FAULTS",
    "Deadlock",
    "Emulated",
    "EmulatorError",
    "Fault",
    "Launch",
    "Result",
    "UnsupportedInstruction",
    "build",
    "known_allocations",
    "load",
    "run",
    "run_ptx",
]
