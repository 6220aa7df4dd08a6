"""Semantics of instructions, by the chapters of the PTX ISA. Importing this registers all decoders."""

exit_checks: list = []  # functions of a warp that has exited; they raise what is still pending

from . import (  # noqa: E402, F401
    arithmetic,
    bulk,
    cluster_launch,
    control,
    convert,
    memory,
    synchronisation,
    tcgen05,
    warpwide,
    wgmma,
)
