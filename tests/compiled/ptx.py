"""The PTX of every configuration, to see whether two versions of the package compile to the same kernels.

python -m tests.compiled.ptx DIR [ARCH ...]     write it to DIR, a file for each key of plan.kernels; all
                                                architectures if none is named
python -m tests.compiled.ptx --compare A B      say of each file of two such folders in what they differ; exit
                                                with 1 if any does by more than names and registers
"""

from __future__ import annotations

import argparse
import difflib
import re
import tempfile
from pathlib import Path

from cute_lce.arch import ARCHITECTURES, KernelConfig
from cute_lce.compile.trace import trace
from cute_lce.plan.kernels import BackwardKey, ForwardKey, Key, MultiplyKey, kernels

DTYPES, TARGET_DTYPES = ("bfloat16", "float16"), ("int64", "int32")
SAME = ("same", "same but for names", "same but for names and registers")


def write(folder: Path, arch: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for dtype in DTYPES:
        for target_dtype in TARGET_DTYPES:
            for key in dict.fromkeys(kernels(arch, dtype, target_dtype)):
                path = folder / f"{arch}-{dtype}-{target_dtype}-{pass_of(key)}.ptx"
                path.write_text(ptx(key))
                print(path, flush=True)


def ptx(key: Key) -> str:
    with tempfile.TemporaryDirectory() as dump:
        return trace(key, f"--keep-ptx --dump-dir {dump}").__ptx__


def pass_of(key: Key) -> str:
    """Also its tiles: clusters, and how wide."""
    if isinstance(key, BackwardKey):
        dhidden = "" if key.dhidden == key.tokens else f"-{_tiles(key.dhidden)}"
        return f"backward{_tiles(key.tokens)}{dhidden}-{_tiles(key.dweight)}"
    if isinstance(key, MultiplyKey):
        return "multiply"
    assert isinstance(key, ForwardKey)
    return f"{'keep' if key.keeps else 'forward'}{_tiles(key.config)}"


def _tiles(config: KernelConfig) -> str:
    high = f"x{config.tile_m}" if config.tile_m != 128 else ""
    return f"{config.cluster_m}x{config.cluster_n}x{config.tile_n}{high}"


def compare(before: str, after: str) -> str:
    """One of SAME, or how many lines were removed and added, whatever their registers."""
    forms = [(text, named := _name_kernels(text), _number_registers(named)) for text in (before, after)]
    for verdict, one, other in zip(SAME, *forms, strict=True):
        if one == other:
            return verdict
    # One register more has another number in every line behind it.
    one, other = (re.sub(r"(%[a-z]+)\d+\b", r"\1", form[-1]).splitlines() for form in forms)
    changes = list(difflib.unified_diff(one, other, n=0, lineterm=""))[2:]
    removed, added = (sum(line.startswith(sign) for line in changes) for sign in "-+")
    return f"differs: {removed} of {len(one)} lines removed, {added} added, apart from registers"


def _name_kernels(text: str) -> str:
    """With entries named by their order: a name has the types of the arguments in it."""
    names = {name: f"kernel{i}" for i, name in enumerate(re.findall(r"\.entry\s+([\w$]+)", text))}
    # What belongs to a kernel, as its parameters, has its name in front.
    longest_first = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    return re.sub(longest_first, lambda name: names[name[0]], text) if names else text


def _number_registers(text: str) -> str:
    """The instructions, each kernel's registers numbered by where they first appear."""
    numbers: dict[str, str] = {}

    def number(register: re.Match[str]) -> str:
        return numbers.setdefault(register[0], f"{register[1]}{len(numbers)}")

    lines = []
    for line in text.splitlines():
        if ".entry" in line:
            numbers.clear()
        if not line.strip().startswith((".reg", ".file", ".loc", "//")):
            lines.append(re.sub(r"(%[a-z]+)\d+\b", number, line))
    return "\n".join(lines)


def compare_folders(before: Path, after: Path) -> dict[str, str]:
    """File -> what `compare` says, or that only one of the folders has it."""
    found = {}
    for name in sorted({path.name for folder in (before, after) for path in folder.glob("*.ptx")}):
        paths = [folder / name for folder in (before, after)]
        if all(path.exists() for path in paths):
            found[name] = compare(*(path.read_text() for path in paths))
        else:
            found[name] = f"only in {next(path for path in paths if path.exists()).parent}"
    if not found:
        raise FileNotFoundError(f"{before}, {after}: got no .ptx file, want those that {__name__} writes")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compiled.ptx", description="PTX of every kernel.")
    parser.add_argument("--compare", action="store_true", help="compare two folders")
    parser.add_argument("folder", type=Path)
    parser.add_argument("rest", nargs="*", metavar="ARCH or folder")
    args = parser.parse_args()
    if not args.compare:
        for arch in args.rest or ARCHITECTURES:
            write(args.folder, arch)
        return 0
    if len(args.rest) != 1:
        parser.error(f"--compare: got {1 + len(args.rest)} folders, want 2")
    verdicts = compare_folders(args.folder, Path(args.rest[0]))
    for name, verdict in verdicts.items():
        print(f"{name}: {verdict}")
    return int(any(verdict not in SAME for verdict in verdicts.values()))


if __name__ == "__main__":
    raise SystemExit(main())
