"""Programmatic dependent launch: the next of our launches of a stream is set up while this one runs.

Kernels are launched with `use_pdl=True`, so that CTAs may start once all of the launch before have signalled.
Every thread of every kernel calls `begin`, which waits for the end of the launch before and only then
signals. So when a kernel starts, of all launches before it only one may still run, and before `begin` it may
read, by plain loads, what that one does not write, and write what that one does not access. A call's first
launch may do neither: what ran before it is unknown. Launches of others, without the attribute, wait for the
end of ours as ever.

What another launch of the call has written is read early by `load`: L1 may hold what was there before.
"""

import cutlass.cute as cute
from cutlass import Int32


def wait():
    """Wait until the launch before has ended and its writes are visible."""
    cute.arch.griddepcontrol_wait()


def begin():
    """`wait`, and let the next launch start, on what SMs have free beside this one."""
    wait()
    cute.arch.griddepcontrol_launch_dependents()


def load(vector: cute.Tensor, at: Int32 | int):
    """An element of a vector in global memory, from L2."""
    return cute.arch.load((vector.iterator + at), vector.element_type, cop="cg")
