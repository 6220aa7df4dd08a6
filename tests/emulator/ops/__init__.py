"""Semantics of instructions, by the chapters of the PTX ISA. Importing this package registers all
decoders."""

exit_checks: list = []  # functions of a warp that has exited; they raise what is still pending

from . import arithmetic, bulk, control, convert, memory, synchronisation, tcgen05, warpwide, wgmma  # noqa: E402, F401
