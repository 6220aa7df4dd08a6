"""What the kernels' host functions take, declared once and without cutlass.

A host function (kernels/entry) takes a few groups. Each is a NamedTuple whose fields say what they are:
tensors, numbers of 32 or 64 bits, addresses of global memory, or another group. `kernels.entry.types` derives
the DSL's types from these declarations, plan/ builds the groups that only sizes decide, and launch/ builds
the rest, by keyword: two addresses that change places have the same type and would go unnoticed.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

Tensor = Any
Int32 = Annotated[int, 32]
Int64 = Annotated[int, 64]
Address = Annotated[int, 64]
"""Of global memory; 0 where a kernel's docstring allows that there is nothing."""

REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
"""LossArguments.reduction."""


class Operands(NamedTuple):
    """hidden (n, d) and weight (V, d), rows at multiples of 16 bytes; target (n,) int32 or int64."""

    hidden: Tensor
    weight: Tensor
    target: Tensor


class LossArguments(NamedTuple):
    """What the loss is, as far as kernels read it at run time; reduction: a number of REDUCTIONS."""

    ignore_index: Int64
    reduction: Int32


class GemmPlan(NamedTuple):
    """One GEMM: windows that a row of clusters has along n, rows of clusters that share L2, clusters that are
    launched, and whether they keep pace (0 or 1)."""

    windows: Int32
    group_m: Int32
    clusters: Int32
    paced: Int32


class Sweep(NamedTuple):
    """The forward's GEMM: its windows are of tiles_per_window tiles of cluster_n tile_n columns."""

    tiles_per_window: Int32
    gemm: GemmPlan


class ForwardOutputs(NamedTuple):
    """What a forward writes: loss fp32, (n,) or one number; row_max, row_sum (n,) fp32; num_valid, one int64.

    workspace: 2 counters, the partials (all of a row's, n, 2), target_logit (n,), 2 fp32 a block of combine.
    """

    loss: Address
    row_max: Address
    row_sum: Address
    num_valid: Address
    workspace: Address


class KeepOutputs(NamedTuple):
    """What a forward that keeps writes beside; zeros where it keeps nothing.

    kept (n, columns) bf16, rows of `pitch` elements. kept_scale (n,) fp32. workspace: reference (n,) fp32,
    most_raised (n,) int32, raised (units, n) uint16.
    """

    kept: Address
    kept_scale: Address
    workspace: Address
    pitch: Int64
    columns: Int32


class Upstream(NamedTuple):
    """The gradient of what follows by the loss: fp32, (n,) of a stride in elements; 0: one number."""

    dloss: Address
    stride: Int64


class Statistics(NamedTuple):
    """The forward's: row_max, row_sum (n,) fp32; num_valid, one int64."""

    row_max: Address
    row_sum: Address
    num_valid: Address


class Gradients(NamedTuple):
    """dhidden (n, d) and dweight (V, d) in the operands' dtype, 0: not wanted; accumulator (n, d) fp32, of
    dhidden over several stripes."""

    dhidden: Address
    dweight: Address
    accumulator: Address


class Dlogits(NamedTuple):
    """The operand of a stripe's gradient GEMMs, and the factors that it lacks.

    dlogits (n, columns) in the operands' dtype, rows of `pitch` elements: written, or what was kept.
    factor fp32 (n,) of a stride: of the rows of dlogits @ weight; 0: ones. hidden (n, d), rows of
    hidden_pitch elements: what dlogits.T is multiplied by. weight_factor, one fp32: of dlogits.T @ hidden;
    0: one. kept_scale (n,) fp32: of a stripe that was kept, whose factor and hidden are written; 0: the
    stripe is recomputed.
    """

    dlogits: Address
    pitch: Int64
    factor: Address
    factor_stride: Int64
    weight_factor: Address
    hidden: Address
    hidden_pitch: Int64
    kept_scale: Address


class Stripe(NamedTuple):
    """A stripe of the vocabulary: its first column, its columns, whether it is the first and the last (0 or
    1), and its three GEMMs."""

    first: Int32
    columns: Int32
    is_first: Int32
    is_last: Int32
    logits: GemmPlan
    dhidden: GemmPlan
    dweight: GemmPlan
