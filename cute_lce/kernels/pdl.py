"""Programmatic dependent launch: the next of our launches of a stream is set up while this one runs.

Kernels are launched with `use_pdl=True`, so that CTAs may start once all of the launch before have signalled.
Every thread of every kernel calls `begin` before it accesses global memory, and at all: a launch has then
ended only after all launches before it, so memory is ordered as without this. Launches of others, without the
attribute, wait for the end of ours as ever.
"""

import cutlass.cute as cute


def begin():
    """Wait until the launch before has ended and its writes are visible; then let the next one start, on what
    SMs have free beside this one."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
