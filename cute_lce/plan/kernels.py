"""Which kernels calls need: the keys of `compile`'s cache. A key is everything that a compile depends on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from ..arch import ARCHITECTURES, Gpu, KernelConfig, architecture
from ..arguments import MORE_PARTS, TERMS


class ForwardKey(NamedTuple):
    """The key of a kernels.entry.forward.Forward.

    dtype: "bfloat16" or "float16", of both operands. target_dtype: "int32" or "int64". terms: names of
    arguments.TERMS, whose numbers are arguments.
    """

    config: KernelConfig
    dtype: str = "bfloat16"
    target_dtype: str = "int64"
    keeps: bool = False
    terms: tuple[str, ...] = ()

    @property
    def arch(self) -> str:
        return self.config.arch

    @property
    def words(self) -> str:
        what = "forward that keeps" if self.keeps else "forward"
        return f"{what}, {_types(self)}, {_tile(self.config)}"


class BackwardKey(NamedTuple):
    """The key of a kernels.entry.backward.Backward: its GEMMs' configurations, types as in ForwardKey.

    tokens: of the logits. dhidden, dweight: of the gradients. added: the dtype of a matrix to which dweight
    is added, "float32", "bfloat16" or "float16"; "": dweight is written, in the operands' dtype.
    """

    tokens: KernelConfig
    dhidden: KernelConfig
    dweight: KernelConfig
    dtype: str = "bfloat16"
    target_dtype: str = "int64"
    added: str = ""
    terms: tuple[str, ...] = ()

    @property
    def arch(self) -> str:
        return self.tokens.arch

    @property
    def words(self) -> str:
        added = f", adds to {self.added}" if self.added else ""
        gradients = f"dinput {_tile(self.dhidden)}; dweight {_tile(self.dweight)}"
        return f"backward, {_types(self)}{added}, logits {_tile(self.tokens)}; {gradients}"


class MultiplyKey(NamedTuple):
    """The key of a kernels.entry.multiply.Multiplying. dtype: the gradients'. added: as in BackwardKey."""

    arch: str
    dtype: str = "bfloat16"
    added: str = ""

    @property
    def words(self) -> str:
        added = f", adds to {self.added}" if self.added else ""
        return f"multiply accumulated gradients, {self.dtype}{added}"


class MergeKey(NamedTuple):
    """The key of a kernels.entry.merge.Merging."""

    arch: str
    target_dtype: str = "int64"

    @property
    def words(self) -> str:
        return f"merge a group's ranks, {self.target_dtype} targets"


def _types(key: ForwardKey | BackwardKey) -> str:
    terms = f", with {', '.join(key.terms)}" if key.terms else ""
    return f"{key.dtype}, {key.target_dtype} targets{terms}"


def _tile(config: KernelConfig) -> str:
    """Every field that tells a configuration from the others of its architecture."""
    turns = ", in turns" if config.pingpong else ""
    tile = f"tile {config.tile_m} x {config.tile_n} x {config.tile_k}"
    cluster = f"cluster {config.cluster_m} x {config.cluster_n}"
    return f"{tile}, {cluster}, {config.warpgroups} warpgroups{turns}, {config.stages} stages"


Key = ForwardKey | BackwardKey | MultiplyKey | MergeKey


class Terms(NamedTuple):
    """The terms (arguments.TERMS) of the kernels of a job.

    forward: of one that keeps nothing. keeps: of one that keeps; None: none does. backwards: of those that
    recompute all columns, some, and none.
    """

    forward: tuple[str, ...] = ()
    keeps: tuple[str, ...] | None = ()
    backwards: tuple[tuple[str, ...], ...] = ((),)


def kernels(
    arch: str,
    dtype: str,
    target_dtype: str,
    added: str = "",
    terms: Terms | None = None,
) -> list[Key]:
    """The keys of all kernels that calls with these types may need; added: see BackwardKey. terms: None:
    none."""
    row, keys = architecture(arch), dict[Key, None]()
    forward, keeps, backwards = terms or Terms()
    for configs in row.configs:
        for names, keep in ((forward, False), *(((keeps, True),) if keeps is not None else ())):
            widths = Gpu(arch, 1).serving(names, "keep" if keep else "forward").widths
            for config in configs.within(widths).forwards(keep):
                keys[ForwardKey(config, dtype, target_dtype, keep, names)] = None
        for names in backwards:
            pairs = configs.within(Gpu(arch, 1).serving(names, "backward").widths).pairs
            for pair, dweight in product(pairs, configs.dweight):
                keys[BackwardKey(*pair, dweight, dtype, target_dtype, added, names)] = None
    keys[MultiplyKey(arch, dtype, added)] = None
    return list(keys)


def is_users_own(key: Key) -> bool:
    """Whether a LogitTerm is compiled into a kernel: no other process has its functions."""
    return any("own_scale" in TERMS.get(term, ()) for term in getattr(key, "terms", ()))


class Kind(NamedTuple):
    """What calls have in common whose kernels differ in nothing but tiles.

    added: as in BackwardKey. group: whether the vocabulary is sharded. gradient: whether one is needed.
    accumulates: whether grad_in_forward may serve them.
    """

    arch: str
    dtype: str = "bfloat16"
    target_dtype: str = "int64"
    terms: Terms = Terms()
    added: str = ""
    group: bool = False
    gradient: bool = True
    accumulates: bool = False


def needed(kind: Kind, tokens: int = 0) -> list[Key]:
    """The keys of all kernels that calls of a kind may need, the most useful first: small kernels, then
    those whose tiles have widths near `tokens`; grad_in_forward's are the last."""
    arch, dtype, target_dtype, terms, added = kind[:5]
    if kind.gradient:
        keys = kernels(arch, dtype, target_dtype, added, terms)
    else:
        keys = kernels(arch, dtype, target_dtype, terms=terms._replace(keeps=None, backwards=()))
        keys = [key for key in keys if isinstance(key, ForwardKey)]
    found = dict.fromkeys(sorted(keys, key=lambda key: _distance(key, tokens)))
    if kind.group:
        found = {MergeKey(arch, target_dtype): None, **found}
    if kind.accumulates and kind.gradient and not kind.group:
        more = [*kernels(arch, dtype, target_dtype, "float32", terms), MultiplyKey(arch, dtype, added)]
        found.update(dict.fromkeys(sorted(more, key=lambda key: _distance(key, tokens))))
    return list(found)


def _distance(key: Key, tokens: int) -> int:
    """From the tokens that a kernel takes at once; -1: it has no tiles."""
    if isinstance(key, ForwardKey):
        return abs(key.config.cluster_columns - tokens)
    return abs(key.tokens.cluster_columns - tokens) if isinstance(key, BackwardKey) else -1


class Flags(NamedTuple):
    """Which terms and outputs calls have, by the names of `cute-lce compile`'s options."""

    logit_scale: bool = False
    softcap: bool = False
    z_loss: bool = False
    linear_bias: bool = False
    label_smoothing: bool = False
    class_weights: bool = False
    entropy: bool = False
    lse: bool = False
    log_sum_sq_probs: bool = False
    mean_logit: bool = False
    argmax: bool = False
    topk: bool = False
    temperatures: bool = False


def terms_of(args: Flags, dtype: str) -> Terms:
    """Of calls with operands of a dtype."""
    logits = ("linear_bias",) * args.linear_bias
    logits += ("softcap",) if args.softcap else ("logit_scale",) if args.logit_scale else ()
    if args.temperatures:
        logits = (*logits, "row_scale")
    weights = ("class_weight",) if args.class_weights and args.label_smoothing else ()
    sums = {
        "entropy": args.entropy,
        "squares": args.log_sum_sq_probs,
        "total": args.label_smoothing,
        "logits": args.mean_logit,
        "argmax": args.argmax,
    }
    topk = ("topk",) * args.topk
    statistics = *logits, *weights, *(term for term in MORE_PARTS if sums[term])
    forward = *statistics, *topk
    smooth_cap = args.softcap and args.label_smoothing
    keeps = None
    of_logits = any((args.entropy, args.log_sum_sq_probs, args.label_smoothing, args.lse, args.topk))
    if not of_logits:
        keeps = *forward, *("proportion",) * args.z_loss
    more = *("gap",) * args.entropy, *("uniform",) * args.label_smoothing, *weights, *topk
    numbers = args.lse, args.log_sum_sq_probs, args.mean_logit, args.argmax
    if more or any((*numbers, args.linear_bias, args.softcap, args.z_loss, args.temperatures)):
        more = "coefficients", *more
    bias = ("bias_gradient",) * args.linear_bias
    backwards = [(*logits, *more, *bias)]
    if keeps is not None:
        backwards.append((*("coefficients",) * args.linear_bias, *bias) if more else logits)
    elif dtype == "bfloat16" and not smooth_cap:
        keeps = *statistics, "kept_logits", *topk
        backwards.append((*logits, *more, "kept_logits", *bias))
    return Terms(forward, keeps, tuple(dict.fromkeys(backwards)))


def carried(dtypes: Sequence[str] = ("bfloat16",)) -> list[Key]:
    """The keys of all kernels that a wheel carries, compiled: of every architecture, for int64 targets and no
    terms, those that add to a float32 buffer (grad_in_forward's too), and those of groups."""
    keys: dict[Key, None] = {}
    for arch in ARCHITECTURES:
        for dtype in dtypes:
            for added in ("", "float32"):
                keys.update(dict.fromkeys(kernels(arch, dtype, "int64", added)))
        keys[MergeKey(arch)] = None
    return list(keys)
