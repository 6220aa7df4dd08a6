"""How fast the emulator is on the kernels of mutation_kernels.py: `python3 -m tests.emulator.speed`."""

from __future__ import annotations

import tempfile
import time

from .host import Emulated
from .mutation_kernels import KERNELS


def main() -> None:
    """Prints warp instructions, and warp instructions a second of CPU time: the best of seeds 0 to 4."""
    for subject in KERNELS:
        with tempfile.TemporaryDirectory() as folder:
            emulated = subject.build(folder)
        rates, totals = [], []
        run = Emulated.run

        def counted(self, *args, run=run, totals=totals, **options):
            result = run(self, *args, **options)
            totals.append(result.total)
            return result

        Emulated.run = counted
        try:
            for seed in range(5):
                start = time.process_time()
                assert subject.check(emulated, seed)
                rates.append(totals[-1] / (time.process_time() - start))
        finally:
            Emulated.run = run
        print(f"{subject.name}: {totals[-1]} instructions, {max(rates):.0f} a second", flush=True)


if __name__ == "__main__":
    main()
