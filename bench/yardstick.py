"""The kinds of rows on which errors are compared, and the errors that bf16 operands excuse.

The yardstick is fp32 logits from bf16 operands, dlogits rounded once, gradients accumulated in fp32 and
rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import terms
from bench.inputs import ROWS, make_inputs
from bench.shapes import Shape
from cute_lce.measure.timing import relative_rms

DTYPE = torch.bfloat16
HEIGHTS = (50, 100, 300)
OFFSETS = (100, 10000)
"""Of all logits."""
USUAL = (*ROWS, *(f"jump_{height}" for height in HEIGHTS))
"""What errors are compared on unless other regimes are asked for."""
REGIMES = (*USUAL, *(f"offset_{height}" for height in OFFSETS))
Results = tuple[Tensor, Tensor, Tensor]  # loss, dH (n, d), dW (V, d)


@dataclass(frozen=True)
class Part:
    """What is compared by itself: rows of H and vocabulary entries, as masks; None: none of them."""

    name: str
    rows: Tensor | None
    columns: Tensor | None


class Problem:
    """One regime's inputs, their parts, and what float64 and the yardstick make of them."""

    def __init__(
        self, shape: Shape, regime: str, reduction: str, device: torch.device, given: str | None = None
    ):
        """given: terms of the loss, as of bench.terms; None: the plain loss."""
        kind, _, number = regime.partition("_")
        height = float(number or 0)
        self.regime, self.reduction, self.given = regime, reduction, given
        inputs = make_inputs(shape, DTYPE, "untrained" if height else regime, device)
        self.hidden, self.weight, self.target = inputs.hidden, inputs.weight, inputs.target
        generator = torch.Generator(device).manual_seed(2)
        # Signed, so that what an upstream vector does to one row shows.
        upstream = torch.randn(shape.n, device=device, generator=generator)
        self.upstream = upstream if reduction == "none" else torch.full_like(upstream, 1 / shape.n)

        all_rows = torch.ones(shape.n, dtype=torch.bool, device=device)
        all_columns = torch.ones(shape.vocab, dtype=torch.bool, device=device)
        self.parts = [Part("all", all_rows, all_columns)]
        if height:
            rows, columns = torch.zeros_like(all_rows), torch.zeros_like(all_columns)
            rows[::8] = True
            columns[[min(5, shape.vocab - 1), shape.vocab // 3, shape.vocab - 1]] = True
            if kind == "offset":
                rows, columns = all_rows, all_columns
            # A direction of its own makes the jump. Were it a single feature, that one would be all of dH
            # there, the same number in every row, whose rounding is luck.
            direction = torch.randn(shape.d, device=device, generator=generator)
            direction /= direction.norm()
            for operand, length, which in ((self.hidden, 1.0, rows), (self.weight, height, columns)):
                wide = operand.float()
                wide -= (wide @ direction).unsqueeze(1) * direction
                wide[which] += length * direction
                operand.copy_(wide)
            if kind == "jump":
                self.parts += [Part("jumping", rows, columns), Part("others", ~rows, ~columns)]
        else:
            untargeted = all_columns.clone()
            untargeted[self.target] = False
            self.parts.append(Part("no target", None, untargeted))
        self._exact = self._by_float64()
        self.loss_shape = self._exact[0].shape
        self.yardstick = self.errors(by_fp32_logits(self, widen=device.type != "cuda"))
        self._soften_luck()

    def losses_and_dlogits(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' losses (n,) and, times upstream, their gradients by logits (n, V); in logits' dtype."""
        logits = logits.requires_grad_()
        if self.given is None:
            losses = F.cross_entropy(logits, self.target, reduction="none")
        else:
            losses = terms.by_logits(self.given, self.hidden, self.weight)(logits, self.target)
        (dlogits,) = torch.autograd.grad(losses, logits, self.upstream.to(logits.dtype))
        return losses.detach(), dlogits

    def _by_float64(self) -> Results:
        hidden, weight = self.hidden.double(), self.weight.double()
        self._losses, dlogits = self.losses_and_dlogits(hidden @ weight.T)
        loss = self._losses.mean() if self.reduction == "mean" else self._losses
        return loss, dlogits @ weight, dlogits.T @ hidden

    def _soften_luck(self) -> None:
        """A mean's error is one number, of any size by luck: the yardstick's is no less than half a unit in
        the last place, nor than what the errors of its rows make likely."""
        if self.reduction != "mean":
            return
        got, _ = self.losses_and_dlogits(_product(self.hidden, self.weight.T))
        likely = (got.double() - self._losses).pow(2).sum().sqrt() / self._losses.sum().abs()
        for errors in self.yardstick.values():
            if errors["err_loss"] is not None:
                errors["err_loss"] = max(errors["err_loss"], likely.item(), 2.0**-24)

    def errors(self, got: Results) -> dict[str, dict[str, float | None]]:
        """part -> the three errors."""
        found: dict[str, dict[str, float | None]] = {}
        for part in self.parts:
            by_rows = (got[0], self._exact[0]), (got[1], self._exact[1])
            loss, dh = (
                None if part.rows is None else relative_rms(*(t[part.rows] if t.dim() else t for t in pair))
                for pair in by_rows
            )
            dw = None
            if part.columns is not None:
                dw = relative_rms(got[2][part.columns], self._exact[2][part.columns])
            found[part.name] = {"err_loss": loss, "err_dh": dh, "err_dw": dw}
        return found


def _product(a: Tensor, b: Tensor, widen: bool | None = None) -> Tensor:
    """a @ b in fp32. widen: fp32 operands; otherwise bf16 ones, as tensor cores multiply them."""
    if widen or (widen is None and a.device.type != "cuda"):
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


def by_fp32_logits(problem: Problem, widen: bool) -> Results:
    """Loss and gradients from fp32 logits, dlogits rounded once, gradients accumulated in fp32."""
    losses, dlogits = problem.losses_and_dlogits(_product(problem.hidden, problem.weight.T, widen))
    loss = losses.mean() if problem.reduction == "mean" else losses
    dlogits = dlogits.to(DTYPE)
    dh, dw = _product(dlogits, problem.weight, widen), _product(dlogits.T, problem.hidden, widen)
    return loss, dh.to(DTYPE), dw.to(DTYPE)
