"""Every causal language model of transformers, tiny and patched, beside itself unpatched.

For each class whose name ends in ForCausalLM or LMHeadModel: is its forward understood, can it be made from a
configuration with small numbers, does patch accept its head, and are loss and gradients the model's own in
float32? Prints the names of each outcome, and ends with status 1 where a loss or a gradient differs. About
two minutes; after an update of transformers it says what its new models need.

    python3 -m tests.integrations.sweep
"""

from __future__ import annotations

import ast
import importlib
import signal
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from cute_lce.integrations.forward_source import Unproven, read
from cute_lce.integrations.transformers import patch
from tests.integrations.language_models import LATENT, SIZES, VOCAB, gradients, tokens

OTHER_SIZES = {
    "head_dim": 8,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "word_embed_proj_dim": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_d_state": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
SECONDS = 15
"""A model that takes longer is too large."""


def classes() -> list[type]:
    """All of transformers, by their files."""
    found = []
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        names = [each.name for each in ast.parse(file.read_text()).body if isinstance(each, ast.ClassDef)]
        names = [name for name in names if name.endswith(("ForCausalLM", "LMHeadModel"))]
        if names and file.parent.name != "auto":
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            found += [getattr(module, name) for name in names]
    return found


def tiny(kind: Any) -> Any:
    """A model with the numbers of SIZES, and without dropout."""
    sizes = {**OTHER_SIZES, **SIZES, **LATENT}
    known = kind.config_class()
    config = kind.config_class(**{name: value for name, value in sizes.items() if hasattr(known, name)})
    for name, value in vars(config).items():
        if ("drop" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    model = kind(config).float().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def found(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Loss and gradients as one vector."""
    torch.manual_seed(1)
    output = model(input_ids=ids, labels=labels, num_items_in_batch=7, use_cache=False)
    return torch.cat([each.reshape(-1) for each in gradients(model, output.loss)])


def outcome(kind: Any) -> tuple[str, str]:
    """What became of a class, and why."""
    try:
        read(kind.forward)
    except Unproven as error:
        return "not understood", str(error)
    ids, labels = tokens(length=8)
    try:
        model = tiny(kind)
        want = found(model, ids, labels)
    except Exception as error:
        return "not made", repr(error)
    try:
        patch(model)
    except (TypeError, ValueError) as error:
        return "head refused", str(error)
    error = float((found(model, ids, labels) - want).norm() / want.norm())
    return ("equal" if error < 1e-4 else "DIFFERENT"), f"{error:.1e}"


def _stop(*_: Any) -> None:
    raise TimeoutError


def main() -> int:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, _stop)
    outcomes: dict[str, dict[str, str]] = defaultdict(dict)
    for kind in classes():
        signal.alarm(SECONDS)
        what, why = outcome(kind)
        signal.alarm(0)
        outcomes[what][kind.__name__] = why
    for what, names in sorted(outcomes.items()):
        print(f"{what}: {len(names)}")
        for name, why in names.items():
            print(f"    {name}: {' '.join(why.split())[:120]}")
    return int("DIFFERENT" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
