"""The GEMMs that a loss needs at least, as cuBLAS does them: what every time is a multiple of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOOR_TOKENS = 4096  # the GEMMs take at most so many tokens at once


class Floor:
    """The GEMMs as cuBLAS does them, over equal slices of at most 4096 tokens; V rounded up to 64s."""

    def __init__(self, hidden: Tensor, weight: Tensor, backward: bool, frozen: str = ""):
        """hidden (n, d), weight (V, d). frozen: what needs no gradient, "hidden" or "weight"; "": nothing."""
        self.backward = backward
        vocab = 64 * math.ceil(weight.shape[0] / 64)
        if vocab != weight.shape[0]:
            weight = torch.cat((weight, weight.new_zeros(vocab - weight.shape[0], weight.shape[1])))
        # Equal slices: a last one of few tokens would be slow, and what is compared with it look fast.
        rows = math.ceil(len(hidden) / math.ceil(len(hidden) / FLOOR_TOKENS))
        self._slices, self._weight = hidden.split(rows), weight
        self._logits = hidden.new_empty(rows, vocab)
        self._dh = hidden.new_empty(rows, hidden.shape[1]) if backward and frozen != "hidden" else None
        self._dw = torch.empty_like(weight) if backward and frozen != "weight" else None
        self._dlogits = torch.randn_like(self._logits) if backward else None

    @torch.no_grad()
    def __call__(self) -> None:
        for h in self._slices:
            torch.mm(h, self._weight.T, out=self._logits[: len(h)])
        if self._dlogits is None:
            return
        if self._dh is not None:
            for h in self._slices:
                torch.mm(self._dlogits[: len(h)], self._weight, out=self._dh[: len(h)])
        if self._dw is not None:
            for h in self._slices:
                torch.mm(self._dlogits[: len(h)].T, h, out=self._dw)
