"""Programmatic dependent launch: the next launch of a stream is set up while this one runs.

Every kernel is launched with `use_pdl=True`, so its CTAs may start once all of the launch before have
signalled, and calls `begin` before it accesses global memory. What a launch waits for has itself waited for
all before it, so the order of memory is that of launches without this.
"""

import cutlass.cute as cute


def begin():
    """Wait until the launch before has ended and its writes are visible; then let the next one start, on what
    SMs have free beside this one."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
