"""Programmatic dependent launch: the next of our launches of a stream is set up while this one runs.

Kernels are launched with `use_pdl=True`, so that CTAs may start once all of the launch before have signalled.
Every thread of every kernel calls `begin`, which waits for the end of the launch before and then signals. So
all launches before that one have ended when a kernel starts, and it may, before it calls `begin`, read what
the launch before does not write, and write what that one does not access; a call's first launch nothing,
since what ran before it is unknown. Launches of others, without the attribute, wait for the end of ours as
ever.
"""

import cutlass.cute as cute

wait = cute.arch.griddepcontrol_wait


def begin():
    """Wait until the launch before has ended and its writes are visible; then let the next one start, on what
    SMs have free beside this one."""
    wait()
    cute.arch.griddepcontrol_launch_dependents()
