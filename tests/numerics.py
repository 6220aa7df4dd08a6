"""The inputs of the numerical tests, and the one comparison."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_lce import reference
from cute_lce.streaming.products import sums_narrow

# ----------------------------------------------------------------------------------------------------------
# The one comparison


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """RMS of the error over RMS of what is expected, in float64; nan where actual has one."""
    actual, expected = actual.detach().double(), expected.detach()
    return float((actual - expected).norm() / expected.norm())


# The RMS of one rounding for the types that are rounded to last, some more for those that sums are taken in:
# a scalar's baseline may happen to have no error, and float64's has none by definition.
FLOORS = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-20, torch.float64: 2.0**-40}


def assert_close(
    name: str, actual: Tensor, expected: Tensor, baseline: Tensor, *, rounding: float = 0.0
) -> None:
    """Assert that actual is as near to expected as twice the error of baseline, and a floor.

    expected: float64. baseline: the same by plain torch with float32 logits, rounded to actual's dtype.
    rounding: a relative error that actual may have besides, since baseline's sums have none of it.
    Where nothing but zeros is expected, nothing but zeros will do.
    """
    assert expected.dtype is torch.float64
    assert actual.shape == expected.shape, (
        f"{name}: shape {tuple(actual.shape)}, want {tuple(expected.shape)}"
    )
    assert bool(actual.isfinite().all()), f"{name}: not finite"
    if not expected.any():
        assert not actual.any(), f"{name}: want zeros, largest is {actual.abs().max():.3g}"
        return
    bound = 2 * relative_error(baseline, expected) + FLOORS[actual.dtype] + rounding
    # Zeros have an error of 1.
    assert bound < 0.5, f"{name}: this comparison could not fail, its bound is {bound:.3g}"
    error = relative_error(actual, expected)
    assert error <= bound, f"{name}: relative error {error:.3g}, bound {bound:.3g}"


# ----------------------------------------------------------------------------------------------------------
# The inputs


@dataclass(frozen=True)
class Case:
    """One call: input (..., d), linear_weight (V, d), target (...); what of its loss the kernels serve."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    ignore_index: int = -100
    logit_scale: float = 1.0

    def to(self, device: str) -> Case:
        tensors = {name: getattr(self, name).to(device) for name in ("input", "linear_weight", "target")}
        return replace(self, **tensors)

    def expected(self, dloss: Tensor | float = 1.0, reduction: str = "mean"):
        """(loss, dinput, dlinear_weight) in float64."""
        return reference.gradients(
            self.input.double(),
            self.linear_weight.double(),
            self.target,
            dloss,
            reduction=reduction,
            ignore_index=self.ignore_index,
            logit_scale=self.logit_scale,
        )

    @property
    def multiplies_narrow(self) -> bool:
        """Whether dlogits are rounded to the operands' dtype, as products of narrow operands want: CUDA's, or
        a CPU's that has instructions for them."""
        device_type, dtype = self.input.device.type, self.input.dtype
        on_gpu = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)
        return on_gpu or sums_narrow(device_type, dtype)

    def baseline(
        self, dloss: Tensor | float = 1.0, reduction: str = "mean", *, rounded_dlogits: bool | None = None
    ):
        """The same with logits in float32 (float64 for float64), gradients rounded last.

        rounded_dlogits: with dlogits rounded to the dtype before the products, as every implementation does
        whose products have narrow operands: bfloat16 upstream (softmax - onehot), float16 softmax - onehot,
        since it has no room for the upstream. None: where the case multiplies so.
        """
        if self.multiplies_narrow if rounded_dlogits is None else rounded_dlogits:
            return self._rounded_baseline(dloss, reduction)
        dtype = self.input.dtype
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        loss, dinput, dweight = reference.gradients(
            self.input.to(wide),
            self.linear_weight.to(wide),
            self.target,
            dloss,
            reduction=reduction,
            ignore_index=self.ignore_index,
            logit_scale=self.logit_scale,
        )
        return loss, dinput.to(dtype), dweight.to(dtype)

    def _rounded_baseline(self, dloss, reduction):
        dtype = self.input.dtype
        hidden, weight = self.input.flatten(0, -2).float(), self.linear_weight.float()
        target = self.target.flatten().long()
        valid = target != self.ignore_index
        onehot = torch.nn.functional.one_hot(target.where(valid, 0), weight.shape[0])
        dlogits = (hidden @ weight.mT * self.logit_scale).softmax(1) - onehot
        upstream = torch.as_tensor(dloss, dtype=torch.float32, device=hidden.device)
        if reduction == "mean":
            upstream = upstream / valid.sum().clamp(min=1)
        upstream = upstream * self.logit_scale
        factor = torch.where(valid, upstream.expand(self.target.shape).flatten(), 0).unsqueeze(1)
        before, after = (factor, 1.0) if dtype is torch.bfloat16 else (1.0, factor)
        dlogits = (before * dlogits).to(dtype).float()
        dinput = (after * (dlogits @ weight)).to(dtype).view(self.input.shape)
        loss, _, _ = self.baseline(dloss, reduction, rounded_dlogits=False)
        return loss, dinput, (dlogits.mT @ (after * hidden)).to(dtype)

    def upstream(self, reduction: str) -> Tensor:
        """An upstream gradient other than 1; for "none" with zeros, negatives and a wide range."""
        device = self.input.device
        if reduction != "none":
            return torch.tensor(-2.5, dtype=torch.float64, device=device)
        generator = torch.Generator().manual_seed(11)
        dloss = torch.randn(self.target.shape, generator=generator, dtype=torch.float64) * 3
        flat = dloss.view(-1)
        flat[1::5] = 0
        flat[2::7] *= 10
        # float32 holds it exactly, so that the upstream itself has no error.
        return dloss.float().double().to(device)

    def check(
        self,
        call: Callable[..., Tensor],
        *,
        reduction: str = "mean",
        need_dinput: bool = True,
        need_dweight: bool = True,
        dloss: Tensor | None = None,
        rounded_dlogits: bool | None = None,
        **options,
    ) -> None:
        """Run call(input, linear_weight, target, ...) forward and backward and compare all that it gives."""
        hidden = self.input.detach().requires_grad_(need_dinput)
        weight = self.linear_weight.detach().requires_grad_(need_dweight)
        upstream = self.upstream(reduction) if dloss is None else dloss
        loss = call(
            hidden, weight, self.target, reduction=reduction, ignore_index=self.ignore_index, **options
        )
        wide = torch.float64 if self.input.dtype is torch.float64 else torch.float32
        assert loss.dtype is wide
        loss.backward(upstream.to(wide))
        expected = self.expected(upstream, reduction)
        baseline = self.baseline(upstream, reduction, rounded_dlogits=rounded_dlogits)
        assert_close("loss", loss.detach(), expected[0], baseline[0])
        for name, tensor, needed, want, plain in (
            ("dinput", hidden, need_dinput, expected[1], baseline[1]),
            ("dlinear_weight", weight, need_dweight, expected[2], baseline[2]),
        ):
            if not needed:
                assert tensor.grad is None
                continue
            assert tensor.grad is not None
            assert tensor.grad.dtype is self.input.dtype
            assert_close(name, tensor.grad, want, plain)


def negated(tensor: Tensor) -> Tensor:
    """The same numbers as a lazily negated view."""
    return torch._neg_view(-tensor)  # pyright: ignore[reportPrivateImportUsage]


def random_case(n: int, d: int, V: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Case:
    """Logits of standard deviation `scale`, targets anywhere."""
    generator = torch.Generator().manual_seed(seed)
    return Case(
        torch.randn(n, d, generator=generator).to(dtype),
        (torch.randn(V, d, generator=generator) * (scale / d**0.5)).to(dtype),
        torch.randint(0, V, (n,), generator=generator),
    )


def jumping(case: Case, heights: dict[int, float], rows: slice = slice(None)) -> Case:
    """Columns whose logits lie above all others by so much, for some rows; targets there and elsewhere."""
    hidden, weight, target = case.input.clone(), case.linear_weight.clone(), case.target.clone()
    hidden[:, 0] = 0
    hidden[rows, 0] = 1
    weight[:, 0] = 0
    for i, (column, height) in enumerate(heights.items()):
        weight[column, 0] = height
        target[i] = column
    return replace(case, input=hidden, linear_weight=weight, target=target)


CAPS = 1e-5, 2e-5, 1e-4, 1e-2
"""Small ones, of a few ulp of lse."""
REACHES = torch.tensor([1.2, -0.7, 1.0, 0.3, 2.0, -3.0, 4.0, -5.0, 1.5, 6.0, -7.0, 8.0, 0.05, 14.0])
"""Of a small cap, products of tokens and their targets: some tokens are confident, others saturated."""


def near_a_cap(cap: float, dtype: torch.dtype, V: int = 137) -> Case:
    """Targets' products are REACHES times the cap, and so are those of the fifth class behind each. Each
    token has a feature of its own: there a class's row of dweight is the gradient by the token's logit."""
    n, d = len(REACHES), 64
    tokens, target = torch.arange(n), torch.arange(n) * 11 % V
    weight = torch.zeros(V, d)
    weight[:, :n] = torch.randn(V, n, generator=torch.Generator().manual_seed(3)) * cap
    weight[target, tokens], weight[(target + 5) % V, tokens] = REACHES * cap, REACHES.flip(0) * cap
    return Case(torch.eye(n, d).to(dtype), weight.to(dtype), target)


def check_near_a_cap(case: Case, dweight: Tensor, expected: Tensor, factor: Tensor, kept: bool = False):
    """At both classes of each token. Rounding a logit costs its slope what it costs 1, and not the sign, but
    for that of the softmax's share. factor (n,): what the gradient by the capped logit is at most."""
    tokens, V = torch.arange(len(case.target), device=dweight.device), len(case.linear_weight)
    for name, classes in ("target", case.target), ("other", (case.target + 5) % V):
        got, want = (each[classes, tokens].double() for each in (dweight, expected))
        bound = want.abs() * 2.0 ** (-7 if kept else -8) + factor.double().abs() * 2.0**-20
        assert bool(((got - want).abs() <= bound).all()), (name, got, want)
        is_share = got.abs() <= factor.double().abs() * 2.0**-28
        assert bool((is_share | (got * want >= 0)).all()), (name, got, want)


def with_probability(case: Case, probability: float) -> Case:
    """Targets of about this probability; no more rows than half of the features, of which each has one."""
    n, (V, d) = len(case.target), case.linear_weight.shape
    assert n <= d // 2
    rows = torch.arange(n, device=case.target.device)
    hidden, weight = case.input.clone(), case.linear_weight.clone()
    hidden[:, :n] = torch.eye(n, dtype=hidden.dtype, device=hidden.device)
    weight[:, :n] = 0
    target = torch.randperm(V, generator=torch.Generator().manual_seed(5)).to(rows.device)[:n]
    logits = hidden.double() @ weight.double().mT
    own = logits[rows, target]
    rest = logits.index_put((rows, target), torch.tensor(-torch.inf).to(logits)).logsumexp(1)
    odds = torch.tensor(probability / (1 - probability), dtype=torch.float64).log()
    weight[target, rows] = (rest + odds - own).to(weight.dtype)
    return replace(case, input=hidden, linear_weight=weight, target=target)


def with_bad_rows(case: Case, sick: Sequence[int], impossible: Sequence[int]) -> Case:
    """sick: rows that hold a nan and, every other one, inf. impossible: rows whose target is one of two
    classes, near either end of the vocabulary, that have logits of -inf in every row.

    What 0 times -inf makes of dinput stays in feature 0, as in torch.
    """
    hidden, weight, target = case.input.clone(), case.linear_weight.clone(), case.target.clone()
    masked = torch.tensor([20, weight.shape[0] - 20], device=target.device)
    target[torch.isin(target, masked)] = 0
    target[list(impossible)] = masked[torch.arange(len(impossible)) % 2]
    hidden[:, 0], weight[:, 0] = 1, 0
    weight[masked, 0] = -torch.inf
    hidden[list(sick[::2]), 1] = torch.nan
    hidden[list(sick[1::2]), 1] = torch.inf
    return replace(case, input=hidden, linear_weight=weight, target=target)


def check_bad_rows(
    case: Case,
    sick: Sequence[int],
    impossible: Sequence[int],
    found: tuple[Tensor | None, Tensor | None, Tensor | None],
    dloss: Tensor,
    rounded_dlogits: bool | None = None,
) -> None:
    """Each row of `with_bad_rows` has its own share of (loss, dinput, dweight) and no other's; loss None: not
    looked at. A row of nan makes dweight nan, as in torch; without one dweight is compared as well."""
    loss, dinput, dweight = found
    assert dinput is not None
    well, finite = (torch.ones(len(case.target), dtype=torch.bool, device=case.target.device) for _ in "ab")
    well[list(sick)] = False
    finite[[*sick, *impossible]] = False
    rest = replace(case, input=case.input[well], target=case.target[well])
    expected = rest.expected(dloss[well].double(), "none")
    baseline = rest.baseline(dloss[well].double(), "none", rounded_dlogits=rounded_dlogits)
    if loss is not None:
        assert torch.equal(loss.isnan(), ~well)
        assert torch.equal(loss.isposinf(), well & ~finite)
        assert_close("loss", loss[finite], *(each[0][finite[well]] for each in (expected, baseline)))
    assert dinput[~well].isnan().all()
    assert_close("dinput", dinput[well][:, 1:], *(each[1][:, 1:] for each in (expected, baseline)))
    if dweight is not None and sick:
        assert dweight.isnan().all()
    elif dweight is not None:
        assert_close("dweight", dweight, expected[2], baseline[2])


def with_bad_ignored_rows(case: Case) -> tuple[Case, Case]:
    """A case with ignored rows of nan, inf and -inf, and the same with zeros in these rows."""
    target, hidden, plain = case.target.clone(), case.input.clone(), case.input.clone()
    target[1::3] = case.ignore_index
    for row, value in ((1, torch.nan), (4, torch.inf), (7, -torch.inf)):
        hidden[row, 1] = value
        plain[row] = 0
    return replace(case, input=hidden, target=target), replace(case, input=plain, target=target)


def _grid_case(n: int, d: int, V: int, dtype: torch.dtype, offset: tuple[float, float]) -> Case:
    """Logits that float32 holds exactly, moved by the offset's product: what errs is the loss, not a GEMM."""
    case = random_case(n, d, V, dtype)
    hidden = (case.input * 4).round().clamp(-8, 8) / 4
    weight = (case.linear_weight * 16).round().clamp(-16, 16) / 16
    hidden[:, 0], weight[:, 0] = offset
    return replace(case, input=hidden, linear_weight=weight)


def _ignored(dtype):
    case = random_case(41, 64, 513, dtype)
    case.target[::3] = -100
    case.target[-1] = -100
    return case


def _all_ignored(dtype):
    case = random_case(9, 32, 130, dtype)
    return replace(case, target=torch.full_like(case.target, 3), ignore_index=3)


def _one_valid(dtype):
    case = random_case(33, 48, 257, dtype)
    case.target[:] = -100
    case.target[17] = 256
    return case


def _confident(dtype):
    """Half of the rows are sure of their target, by up to 20 nats."""
    case = random_case(40, 96, 700, dtype)
    weight = case.linear_weight.float()
    hidden = case.input.float()
    directions = weight[case.target] / weight[case.target].norm(dim=1, keepdim=True)
    strength = torch.linspace(0, 20, 40).unsqueeze(1) * (torch.arange(40) % 2).unsqueeze(1)
    return replace(case, input=(hidden * 0.3 + directions * strength).to(dtype))


def _sixty(dtype):
    """Logits of -60 and 60 only, the target among either."""
    case = random_case(24, 60, 300, dtype)
    signs = torch.where(torch.arange(300) % 7 == 0, 1.0, -1.0)
    weight = signs.unsqueeze(1).expand(300, 60).to(dtype)
    hidden = torch.ones(24, 60, dtype=dtype)
    hidden[1::2] = -1
    return replace(case, input=hidden, linear_weight=weight.contiguous())


def _jumps(dtype):
    """The maximum rises by 50, 100 and 300 along the vocabulary; the target is anywhere."""
    case = random_case(30, 40, 900, dtype)
    hidden, weight = case.input, case.linear_weight
    hidden[:, 0] = 1
    for column, height in ((200, 50.0), (500, 100.0), (800, 300.0)):
        weight[column, 0] = height
    case.target[:3] = torch.tensor([200, 500, 800])
    return case


def _last_column(dtype):
    case = random_case(19, 72, 1000, dtype)
    return replace(case, target=torch.full_like(case.target, 999))


def _first_column(dtype):
    case = random_case(19, 72, 1000, dtype)
    return replace(case, target=torch.zeros_like(case.target))


def _leading(dtype):
    case = random_case(30, 24, 77, dtype)
    target = case.target.view(2, 3, 5).clone()
    target[1, 2, 3] = -100
    return replace(case, input=case.input.view(2, 3, 5, 24), target=target)


def _strided(dtype):
    """Every operand strided: input by columns, the weight transposed, the targets every other."""
    case = random_case(22, 36, 150, dtype)
    hidden = torch.stack((case.input, case.input), dim=2)[:, :, 0]
    return Case(
        hidden,
        case.linear_weight.t().contiguous().t(),
        torch.stack((case.target, case.target), dim=1)[:, 0],
    )


def _int32(dtype):
    case = _ignored(dtype)
    return replace(case, target=case.target.int())


CASES: dict[str, Callable[[torch.dtype], Case]] = {
    "ragged": lambda dtype: random_case(37, 100, 1023, dtype),
    "aligned": lambda dtype: random_case(64, 64, 512, dtype),
    "sharp": lambda dtype: random_case(50, 33, 1001, dtype, scale=4.0),
    "gpt2": lambda dtype: random_case(37, 100, 50257, dtype),
    "few_classes": lambda dtype: random_case(37, 100, 7, dtype),
    "one_class": lambda dtype: random_case(5, 16, 1, dtype),
    "one_token": lambda dtype: random_case(1, 100, 700, dtype),
    "one_feature": lambda dtype: random_case(12, 1, 65, dtype),
    "offset_300": lambda dtype: _grid_case(29, 50, 640, dtype, (20.0, 15.0)),
    "offset_10000": lambda dtype: _grid_case(29, 50, 640, dtype, (100.0, 100.0)),
    "ignored": _ignored,
    "all_ignored": _all_ignored,
    "one_valid": _one_valid,
    "confident": _confident,
    "sixty": _sixty,
    "jumps": _jumps,
    "last_column": _last_column,
    "first_column": _first_column,
    "leading": _leading,
    "strided": _strided,
    "int32": _int32,
}

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def make(name: str, dtype: torch.dtype, device: str = "cpu") -> Case:
    return CASES[name](dtype).to(device)


def nested(tensor: Tensor, layout: torch.layout = torch.strided) -> Tensor:
    """A tensor and its first two rows as one, which no call takes."""
    with warnings.catch_warnings():
        # Nested tensors are a prototype.
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([tensor, tensor[:2]], layout=layout)
