"""The shapes that the project promises times for, and the memory that each may use."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Shape:
    """One problem: n tokens, hidden size d, vocabulary of V.

    bars: (workspace_mb, bar) pairs. The first is what the call may allocate, in MiB (None: the library's
        default); the second is the time that must be reached with it, as a multiple of cuBLAS's GEMMs (None:
        no bar is set).
    frozen: the operand that needs no gradient: "", "weight" or "hidden".
    """

    n: int
    d: int
    vocab: int
    bars: tuple[tuple[int | None, float | None], ...] = ((None, None),)
    frozen: str = ""

    def __str__(self) -> str:
        return f"{self.n},{self.d},{self.vocab}" + (f",{self.frozen}" if self.frozen else "")


def _gib(*bars: tuple[float, float]) -> tuple[tuple[int | None, float | None], ...]:
    return tuple((round(budget * 1024), bar) for budget, bar in bars)


# Forward: what the kernels of a forward pass are measured on. The first rows matter most.
FORWARD = (
    Shape(8192, 4096, 131072, ((None, 0.93),)),
    Shape(32768, 4096, 262144, ((None, 1.02),)),
    Shape(4096, 4096, 32768, ((None, 1.00),)),
    Shape(1024, 4096, 262144, ((None, 1.00),)),
    Shape(4096, 7168, 129280, ((None, 1.00),)),
    Shape(16384, 2048, 151936, ((None, 1.02),)),
    Shape(8192, 1024, 50257, ((None, 1.10),)),
    Shape(256, 4096, 128256, ((None, 1.10),)),
)

# Forward + backward, each with generous memory first, then with little.
BACKWARD = (
    Shape(8192, 4096, 131072, _gib((2.3, 1.03), (1.3, 1.24), (0.3, 1.40))),
    Shape(4096, 4096, 32768, _gib((0.38, 1.04), (0.15, 1.42))),
    Shape(1024, 4096, 262144, _gib((0.55, 1.08), (0.2, 1.40))),
    Shape(4096, 7168, 129280, _gib((1.2, 1.00), (0.3, 1.36))),
    Shape(32768, 4096, 262144, _gib((5.5, 1.28), (1.1, 1.40))),
    Shape(8192, 4096, 131072, _gib((2.3, 0.72), (0.3, 1.08)), frozen="weight"),
)

# Small enough for a CPU, ragged in every dimension.
TINY = (Shape(48, 32, 517),)

# Output layers of models that people train: name -> (d, V), as their configurations give them.
ZOO = {
    "GPT-2": (768, 50257),
    "Llama 3 8B": (4096, 128256),
    "Llama 3 70B": (8192, 128256),
    "Qwen2.5 7B": (3584, 152064),
    "Qwen3 8B": (4096, 151936),
    "Qwen3 32B": (5120, 151936),
    "Gemma 2 9B": (3584, 256000),
    "Gemma 3 27B": (5376, 262208),
    "gpt-oss": (2880, 201088),
    "DeepSeek-V3": (7168, 129280),
    "Mistral Small 3": (5120, 131072),
}

# The paper's, whose d is 4096.
PAPER = tuple(
    Shape(n, 4096, V) for n in (1024, 4096, 8192, 16384, 32768) for V in (32768, 65536, 131072, 262144)
)

TABLES = {"forward": FORWARD, "backward": BACKWARD, "paper": PAPER, "tiny": TINY}

RANDOM = "random:SEED:COUNT"
LEAST_TOKENS, MOST_TOKENS = 16, 32768


def draw(seed: int, count: int) -> tuple[Shape, ...]:
    """Shapes that nobody rounded: a model of the ZOO, and tokens from 16 to 32768, log-uniformly."""
    random = Random(seed)
    shapes = []
    for _ in range(count):
        tokens = round(math.exp(random.uniform(math.log(LEAST_TOKENS), math.log(MOST_TOKENS))))
        shapes.append(Shape(tokens, *random.choice(list(ZOO.values()))))
    return tuple(shapes)


CHUNK_TOKENS = 1024
"""Of "grad_in_forward" in an ample workspace, at least."""


def ample(shape: Shape) -> int:
    """MiB that hold whatever a call may use: 16-bit logits and an eighth of them, gradients by input in
    float32 (several, where few tokens make them small), copies of the hidden rows; or both gradients in
    float32 and a chunk of tokens."""
    n, d, vocab = shape.n, shape.d, shape.vocab
    kept = 2.25 * n * vocab + 16 * n * d
    accumulated = 4 * (n + vocab) * d + 2.25 * min(n, CHUNK_TOKENS) * vocab + 16 * n * d
    return math.ceil(max(kept, accumulated) / 2**20) + 512


def parse(text: str) -> tuple[Shape, ...]:
    """A table's name, "random:SEED:COUNT" (`draw`), or "n,d,V" with ",weight" or ",hidden" behind it for the
    operand that is frozen."""
    if text in TABLES:
        return TABLES[text]
    if match := re.fullmatch(r"random:(\d+):([1-9]\d*)", text):
        return draw(int(match[1]), int(match[2]))
    numbers, frozen = text.split(","), ""
    if numbers[-1] in ("weight", "hidden"):
        frozen = numbers.pop()
    try:
        n, d, vocab = (int(number) for number in numbers)
    except ValueError:
        raise ValueError(
            f"shape must be one of {', '.join(TABLES)}, {RANDOM} or n,d,V[,weight|hidden], got {text!r}"
        ) from None
    if min(n, d, vocab) < 1:
        raise ValueError(f"shape must have n, d and V of at least 1, got {text!r}")
    return (Shape(n, d, vocab, frozen=frozen),)


def parse_one(text: str) -> Shape:
    """`parse` of one shape with nothing frozen. Raises ValueError for anything else."""
    found = parse(text)
    if len(found) != 1 or found[0].frozen:
        raise ValueError(f"shape must be n,d,V, got {text!r}")
    return found[0]
