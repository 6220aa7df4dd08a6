"""The command `cute-lce`: what is installed and what it would do."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Sequence

PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python")


def _print_table(rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# info


def info(args: argparse.Namespace) -> int:
    """Print versions, the devices, and the path that a call takes on each, with the reason."""
    import torch

    import cute_lce

    versions = {package: _version(package) for package in PACKAGES}
    versions["torch"] = f"{torch.__version__}, built for CUDA {torch.version.cuda or 'none'}"
    _print_table(
        [
            ("cute_lce", cute_lce.__version__),
            ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
            *versions.items(),
        ]
    )
    print()
    _print_table(_paths())
    return 0


def _paths() -> list[tuple[str, str]]:
    """(device and dtype, the path of a call there and why) for the CPU and for every CUDA device."""
    import torch

    from cute_lce import ops, streaming

    rows = [("cpu", "streaming path: the kernels are for GPUs")]
    if not torch.cuda.is_available():
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "no usable CUDA device"
        return [*rows, ("cuda", f"not there: {reason}")]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        major, minor = torch.cuda.get_device_capability(device)
        properties = torch.cuda.get_device_properties(device)
        name, sms = properties.name, properties.multi_processor_count
        rows.append((str(device), f"{name}, compute capability {major}.{minor}, {sms} SMs"))
        served = [dtype for dtype in ops.DTYPES if ops.implementation(device, dtype) is not streaming]
        for dtype in ops.DTYPES:
            if dtype in served:
                path = "kernels"
            elif served:
                path = f"streaming path: the kernels take {' and '.join(map(_dtype, served))}"
            else:
                path = f"streaming path: no kernels for compute capability {major}.{minor}"
            rows.append((f"{device} {_dtype(dtype)}", path))
    return rows


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


# The command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cute-lce", description="Fused linear cross entropy: what is installed and what it would do."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser("info", help="versions, devices, and the path that a call takes on each")
    command.set_defaults(run=info)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
