"""The arguments of the kernels' host functions, declared once and without cutlass.

A host function (kernels/entry) takes the three tensors of `Operands`, each as an argument of its own, and a
few groups. A group is a NamedTuple whose annotations say what its fields are: numbers of 32 or 64 bits,
addresses in global memory, or another group. `kernels.entry.types` derives the DSL's types from these
declarations, plan/ builds the groups that depend on sizes only, and launch/ builds the rest, by keyword:
swapped addresses have the same type and would go unnoticed.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, NamedTuple, get_type_hints

Tensor = Any
Int32 = Annotated[int, 32]
Int64 = Annotated[int, 64]
Float32 = Annotated[float, 32]
Address = Annotated[int, 64]
"""An address in global memory; 0 for something absent, where the group's docstring allows it."""

REDUCTIONS = {"none": 0, "sum": 1, "mean": 2, "logprob": 3}
"""LossArguments.reduction; "logprob": as "none", of minus the losses, and +0.0 if ignored."""
COMBINE_ROWS = 8
"""Rows that a block of the combine kernel processes: a partial of each, together 64 consecutive bytes."""
MERGE_ROWS = 256
"""Rows that a block of the merge of ranks processes."""
ELSEWHERE, IGNORED = -1, -100
"""Targets counted from a shard's first class: of another shard, and of an ignored token."""
NO_CLASS = 2**31 - 1
"""Greater than any class."""
TOPK_CLASSES, TOPK_TOKENS = 128, 16
"""Classes and tokens whose given ids lie together (TERMS' topk)."""
KEPT_TILE = 128
"""Columns that are kept, or not, together."""
SUMMED_TOKENS = 256
"""Tokens that one partial sum of what was kept is of."""
UNIT = 32
"""Columns of a token that share a note: by how much its exponentials were raised (kernels/keep.py)."""
NOTE_BYTES = 2
TERMS: dict[str, dict[str, Any]] = {
    "linear_bias": {"linear_bias": Address},
    "logit_scale": {"logit_scale": Float32},
    "softcap": {
        "cap": Float32,
        "inverse_square": Float32,
        "edge": Float32,
        "edge_square": Float32,
        "doubled": Float32,
        "series_0": Float32,
        "series_1": Float32,
        "series_2": Float32,
        "series_3": Float32,
    },
    "row_scale": {"row_scale": Address},
    "class_weight": {"class_weight": Address},
    "entropy": {"more_partials": Address, "mean_gap": Address},
    "squares": {"more_partials": Address, "square_sum": Address},
    "total": {"more_partials": Address, "total": Address},
    "logits": {"more_partials": Address, "logit_sum": Address},
    "argmax": {"more_partials": Address, "argmax": Address},
    "topk": {
        "topk_entries": Address,
        "topk_starts": Address,
        "topk_values": Address,
        "topk_units": Int32,
        "topk_blocks": Int32,
    },
    "proportion": {"target_weight": Address, "lse_slope": Float32, "onehot_ratio": Address},
    "coefficients": {"row_factor": Address},
    "gap": {"gap": Address},
    "uniform": {"uniform": Address},
    "bias_gradient": {"dbias": Address, "column_sums": Address, "with_dhidden": Int32},
    "kept_logits": {
        "kept_logits": Address,
        "kept_pitch": Int64,
        "kept_notes": Address,
        "beside_logits": Address,
        "beside_notes": Address,
        "beside_first": Int32,
        "beside_columns": Int32,
    },
}
"""What kernels that are compiled for a term take for it in LossArguments. Vectors are fp32, (V,) or, by the
operands' tokens, (n,).

Of logits, of a product x: linear_bias (V,): x + linear_bias. logit_scale: logit_scale x. softcap:
cap tanh(|s| x / c), with c the option, a scale s, and both a temperature and s's sign in `cap`: all are of
maths.softcap_numbers. row_scale (n,): multiplies z. A LogitTerm, by a name of its own that logit_term adds
here: logit(own_scale x) own_inverse, with own_temperature = 1 / own_inverse, and its fields own_0, own_1 ...

Of a forward, which writes: entropy: mean_gap (n,), sum p (row_max - z). squares: square_sum (n,), the sum of
exp(2 (z - row_max)). total: total (n,), the sum of lse - z, times class_weight (V,) if it is a term, and 0
where the token is ignored; of a shard the sum of row_max - z, and of ignored tokens anything.
logits: logit_sum (n,), that of z. argmax: argmax (n,) int32, the first class with the largest z.
more_partials (partials of a row, n, numbers): scratch, with as many numbers of a term as MORE_PARTS says.

Of both: topk: some classes of each token. topk_entries, int32: token TOPK_CLASSES + class % TOPK_CLASSES, by
units of TOPK_CLASSES classes, in these by blocks of TOPK_TOKENS tokens; tokens are the operands' or the
compacted ones. topk_starts (units blocks + 1,) int32: where those of a unit and block begin. topk_values, of
each entry: z, written by a forward; added to the gradient by x by a backward.

Of a forward that keeps exponentials: proportion: in a row's gradient by z the onehot has the coefficient
target_weight (n,), or 1 at address 0; and the softmax has that and lse_slope lse. onehot_ratio (n,), the
first over the second, is written where the token is valid. Else both are equal.

Of a backward: coefficients: the gradient by x is, but for the rounding,

    ((softmax + gap (z - row_max)) exp(z - row_max) + uniform class_weight) slope - target onehot

with slope 1, or of a softcap 1 - tanh^2, or a LogitTerm's, and coefficients of each token: `softmax` lies
where else row_sum does, `target` where dloss does, gap and uniform (n,) are terms. In float16 they are at
most HALF_SCALE, and row_factor (n,) multiplies the gradient; else it is 0. Exponentials that were
kept are multiplied by row_factor in any dtype.
bias_gradient: dbias (V,), the gradient's sums over tokens: written by launches whose tokens are all or the
first ones, else added to. with_dhidden: whether only by those that compute dhidden (0 or 1). column_sums:
scratch, a number for each class of a launch and each slab of its tokens: as many as a Fragment has columns,
or SUMMED_TOKENS of what was kept.

Of a forward that keeps and of its backward: kept_logits: logits are kept instead of exponentials
(kernels/kept_logits.py), of which a launch of the backward makes dlogits where it has the address of its
classes': (n, columns) fp16, rows of kept_pitch elements; kept_notes (units, n) fp16. At address 0 it
computes logits. A forward takes the addresses from KeepOutputs. beside_columns others from beside_first on,
whose addresses are beside_logits and beside_notes, become dlogits in place beside dweight's GEMM.
"""
MORE_PARTS = {"entropy": 1, "squares": 1, "total": 2, "logits": 1, "argmax": 1}
"""Numbers in a partial of a row, by the terms of a forward, in their order there: a total's second are the
weights that it is of, and an argmax is the bits of an int32."""
COMPUTED_ROWS = 64
"""Compacted tokens are computed in multiples of so many, the depth of a k tile (kernels/rows.py)."""


def units(columns: Any) -> Any:
    """Units of so many kept columns, an int or a kernel's Int32; the last tile counts as whole."""
    return KEPT_TILE // UNIT * ((columns + KEPT_TILE - 1) // KEPT_TILE)


class Operands(NamedTuple):
    """The tensors of a call: hidden (n, d), weight (V, d), target (n,) int32 or int64.

    A launch wants rows of hidden and weight at multiples of 16 bytes, and takes the tensors as arguments of
    their own: in a group each would become a managed copy at every launch.
    """

    hidden: Tensor
    weight: Tensor
    target: Tensor


class LossArguments(NamedTuple):
    """What kernels read of a loss at run time: the reduction as a number of REDUCTIONS, and ignore_index.
    `terms`: names of TERMS, whose numbers `with_terms` adds."""

    reduction: Int32
    ignore_index: Int64

    terms = ()

    @classmethod
    def of(cls, loss: Any) -> LossArguments:
        """loss: LossOptions, or what else has the terms' numbers by their names."""
        kind = with_terms(loss.terms)
        return kind(REDUCTIONS[loss.reduction], *[getattr(loss, name) for name in kind._fields[1:]])


@functools.cache
def with_terms(terms: tuple[str, ...]) -> Any:
    """LossArguments with the numbers of the terms."""
    if not terms:
        return LossArguments
    fields = get_type_hints(LossArguments, include_extras=True)
    for term in terms:
        fields |= TERMS[term]
    kind: Any = NamedTuple("LossArguments", [*fields.items()])  # pyright: ignore[reportArgumentType]
    kind.terms = terms
    return kind


COPIES = 2
"""Rows.gathers of a forward that keeps and only copies hidden states: an earlier one has compacted."""


class Rows(NamedTuple):
    """Which tokens a launch computes: [first, first + tokens) of the operands', or of the compacted ones,
    which are the valid ones in their order and then the ignored ones in theirs (kernels/rows.py).

    Of compacted tokens, else 0: source (n,) int32, which of the operands' tokens each is; count, one int32,
    how many are valid; target (n,), in the target's dtype. hidden (tokens, d), contiguous, the launch's, and
    values (3, n) fp32, dloss, row_max and row_sum; 0: not copied. If no token is ignored, hidden is not
    written, and the operands' rows are read instead. gathers: whether all these are written first (0 or 1),
    or hidden alone (COPIES). dhidden (n, d): the gradient by the operands' tokens, written
    after the last stripe's GEMM of dhidden, from Gradients.dhidden or, where this is the same, from the sums;
    0: not by this launch.
    accumulator (n, d) fp32: likewise, from this launch's sums, which need not be of compacted tokens: it
    is then that of the launch's; 0: not by this launch. in_order: whether its rows are the launch's compacted
    tokens in their order.
    sums (n, d) fp32: dhidden's sum, of one split, by the operands' tokens, instead of Gradients.sums. Where
    the launch gathers and begins at token 0 the rows of ignored tokens are written, as zeros, and no launch
    adds to them. 0: there is none.
    """

    first: Int32
    tokens: Int32
    source: Address = 0
    count: Address = 0
    target: Address = 0
    hidden: Address = 0
    values: Address = 0
    gathers: Int32 = 0
    dhidden: Address = 0
    accumulator: Address = 0
    sums: Address = 0
    in_order: Int32 = 0


class GemmPlan(NamedTuple):
    """The grid of one GEMM (kernels/schedule.py): windows of A's rows, each of tiles_per_window cluster-wide
    tiles; splits of k; columns of tiles in a group; clusters launched, and whether they pace (0 or 1)."""

    windows: Int32
    tiles_per_window: Int32
    splits: Int32
    group: Int32
    clusters: Int32
    paced: Int32


class ForwardOutputs(NamedTuple):
    """What a forward writes: loss fp32, (n,) or one number; row_max, row_sum (n,) fp32; num_valid, one int64.

    workspace: 2 counters, the partials (number of partials of a row, n, 2), target_logit (n,), and 2 fp32 for
    each block of combine.
    target_logit (n,) fp32: the targets' logits, nan of one that is no class of weight. Written of a shard,
    and where a softcap or a LogitTerm is a term, whose slope a backward needs there.
    shard: whether weight is a shard of the vocabulary (0 or 1); then loss and num_valid hold nothing of use,
    if they are written. Such a forward, if it keeps, is launched again with `finishes` 1 and merged
    statistics: it reads row_max, row_sum and target_logit, and completes what is kept.
    """

    loss: Address
    row_max: Address
    row_sum: Address
    num_valid: Address
    workspace: Address
    target_logit: Address = 0
    shard: Int32 = 0
    finishes: Int32 = 0


class KeepOutputs(NamedTuple):
    """What a forward that keeps writes in addition; all zero if it keeps nothing.

    kept (n, columns) in the operands' dtype, rows of `pitch` elements. kept_scale (n,) fp32. workspace:
    reference (n,) fp32, most_raised (n,) int32, notes (units, n) uint16. With the term kept_logits: kept in
    fp16, workspace: notes (units, n) fp16, and nothing else.
    """

    kept: Address
    kept_scale: Address
    workspace: Address
    pitch: Int64
    columns: Int32


class ShardTargets(NamedTuple):
    """Targets counted from a shard's first class; all 0 where ranks are merged instead (RankStatistics).

    Written: local (n,) in the target's dtype, ELSEWHERE outside the shard and IGNORED for ignore_index;
    header (1,) fp32, the number `count`; arrived (1,) int32, 0. start, columns: of the shard.
    """

    local: Address
    header: Address
    arrived: Address
    start: Int64
    columns: Int32
    count: Int32


class RankStatistics(NamedTuple):
    """The gathered statistics of `ranks` shards, each `pitch` fp32 (kernels/merge.py), and their merge; all 0
    where targets are counted instead.

    Written: row_max, row_sum (n,) fp32; loss, num_valid as in ForwardOutputs; and fp32 (n,), or not at
    address 0, target_logit, mean_gap and total_gap. Scratch: blocks, 2 fp32 for each MERGE_ROWS tokens;
    arrived: as ShardTargets' left it.
    """

    gathered: Address
    ranks: Int32
    pitch: Int64
    row_max: Address
    row_sum: Address
    loss: Address
    num_valid: Address
    blocks: Address
    arrived: Address
    target_logit: Address = 0
    mean_gap: Address = 0
    total_gap: Address = 0


class Products(NamedTuple):
    """What grad_in_forward's backward multiplies by the upstream gradient, and writes.

    dinput (n, d), dweight (vocab, d): accumulators fp32, contiguous; d is a multiple of 8. Of one that is not
    needed n or vocab is 0. dinput_out (n, d) is written, in the gradients' dtype; dweight_out (vocab, d) too,
    or has the key's `added` dtype and is added to. source (n,) int32: which token each row of dinput is, the
    valid ones first; 0: rows are the tokens'. Then target (n,), with a stride in elements of target_bytes, 4
    or 8, says which are ignored.
    """

    dinput: Address
    dweight: Address
    dinput_out: Address
    dweight_out: Address
    n: Int32
    vocab: Int32
    d: Int32
    target: Address
    target_stride: Int64
    target_bytes: Int32
    source: Address


class Upstream(NamedTuple):
    """The upstream gradient: fp32, (n,) with a stride in elements; stride 0: one number."""

    dloss: Address
    stride: Int64


class Statistics(NamedTuple):
    """The forward's: row_max, row_sum (n,) fp32; num_valid, one int64."""

    row_max: Address
    row_sum: Address
    num_valid: Address


class Gradients(NamedTuple):
    """dhidden (n, d), dweight (V, d); 0 if not needed. sums (splits, n, d) fp32: dhidden of several stripes
    or splits of k, one sum for each split. Of compacted tokens (Rows), dhidden and sums are the launch's.

    dhidden has the operands' dtype. dweight has it too and is written, or has the key's `added` dtype and is
    added to; fp32 is written instead where `adds` is 0.
    """

    dhidden: Address
    dweight: Address
    sums: Address
    adds: Int32


class GradientOperands(NamedTuple):
    """The operands of a stripe's gradient GEMMs, and the factors of their products.

    dlogits (n, columns) in the operands' dtype, rows of `pitch` elements: written, or what was kept.
    factor fp32 (n,): multiplies the rows of dlogits @ weight; 0: ones, and hidden holds no factors either.
    hidden (n, d), rows of hidden_pitch elements: multiplied by dlogits.T. weight_factor, one fp32: multiplies
    dlogits.T @ hidden; 0: one. kept_scale (n,) fp32: of a kept stripe; 0: the stripe is recomputed. scales:
    whether factor, hidden and weight_factor are written first (0 or 1; kernels/scale.py).
    """

    dlogits: Address
    pitch: Int64
    factor: Address
    weight_factor: Address
    hidden: Address
    hidden_pitch: Int64
    kept_scale: Address
    scales: Int32


class Counters(NamedTuple):
    """int32 by which a launch's three GEMMs pace; clears: how many of them, this launch's first, it zeroes
    before, for itself and those after it: in ScaleRows, in Gather, or by `clear`."""

    address: Address
    clears: Int32


class Stripe(NamedTuple):
    """A stripe of the vocabulary: its first column, number of columns, whether it is the first and the last
    (0 or 1), and its three GEMMs."""

    first: Int32
    columns: Int32
    is_first: Int32
    is_last: Int32
    logits: GemmPlan
    dhidden: GemmPlan
    dweight: GemmPlan
