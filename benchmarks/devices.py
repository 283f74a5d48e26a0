"""Merges on devices against one thread on the host, and the rates of every device.

    python -m benchmarks.devices                                  # all GPUs, a reduced Llama of 1.4 B parameters
    python -m benchmarks.devices --device cuda:0,2 --methods actmat tsv
    python -m benchmarks.devices --device cpu:0,1 --hidden 64 --intermediate 176 --layers 2 --vocabulary 1000

Without `--device` all CUDA devices are measured, one alone and all together; it ends with an error where there are
none. `cpu:0,1` are simulated devices: they show that the program runs and that the bytes are those of the host, not how
fast anything is.

`results/devices.json` has a row per method and device: wall time of the whole process, speed up over one thread, and
the largest relative difference of a tensor from the host's. Simulated devices must write the bytes of the host.
`results/device_rates.json` has a row per device: products in float32, an eigendecomposition in float64, copies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actmat.engine.devices import Device, open_devices
from benchmarks.common import (
    HERE,
    WORK,
    Run,
    actmat_command,
    alternate,
    fresh,
    markdown,
    measure,
    summary,
    timed,
    torch_threads,
    weights_digest,
    write_result,
)
from benchmarks.elementwise import largest_difference
from benchmarks.make_llama import add_size_arguments, home, make_family, size_from

COLUMNS = ("method", "device", "wall_s", "speed_up", "difference")
RATES = ("device", "name", "memory_b", "matmul_f32_gflops", "eigh_f64_s", "up_gbps", "down_gbps")


def rates_of(device: Device, matrix: int, block: int) -> dict[str, Any]:
    """Rates of one device.

    Args:
        matrix: side of the matrices; `block`: bytes of a copy.
    """
    there = device.torch_device
    a = torch.randn(matrix, matrix, generator=torch.Generator().manual_seed(0)).to(there)
    gram = (a @ a.mT).double()
    host = torch.ones(block, dtype=torch.uint8)
    sent = host.to(there, copy=True)

    def seconds(work: Any) -> float:
        def to_its_end() -> None:
            work()
            if there.type == "cuda":
                torch.cuda.synchronize(there)

        with torch_threads(1):
            return timed(to_its_end)

    return {
        "device": device.name,
        "name": torch.cuda.get_device_name(there) if there.type == "cuda" else "simulated",
        "memory_b": device.total_bytes() or 0,
        "matmul_f32_gflops": 2 * matrix**3 / seconds(lambda: a @ a) / 1e9,
        "eigh_f64_s": seconds(lambda: torch.linalg.eigh(gram)),
        "up_gbps": block / seconds(lambda: sent.copy_(host)) / 1e9,
        "down_gbps": block / seconds(lambda: host.copy_(sent)) / 1e9,
    }


def single_and_all(names: str) -> list[str]:
    """The first of the devices alone, and all of them: `cuda:0,2` -> `cuda:0`, `cuda:0,2`."""
    numbers = [d.name.partition(":")[2] for d in open_devices(names)]
    kind = names.partition(":")[0]
    return list(dict.fromkeys([f"{kind}:{numbers[0]}", f"{kind}:{','.join(numbers)}"]))


def merge(base: Path, experts: Sequence[Path], method: str, device: str, out: Path) -> Run:
    """One merge in a process of its own."""
    command: list[str | Path] = [*actmat_command(), "merge", "--base", base, "--method", method, "--out", fresh(out)]
    for expert in experts:
        command += ["--expert", expert]
    return measure(
        [*command, "--device", device, "--threads", "1", "--quiet"], None, PYTHONPATH=str(HERE.parent / "src")
    )


def rows_of(method: str, names: Sequence[str], given: argparse.Namespace) -> list[Any]:
    """Rows of one method: the host with one thread, then every choice of devices."""
    base, experts = family_of(given)
    outs = {name: WORK / "out" / f"devices-{name.replace(':', '-').replace(',', '-')}" for name in ("cpu", *names)}
    runs = {name: partial(merge, base, experts, method, name, out) for name, out in outs.items()}
    found = alternate(runs, given.repeats)
    host, rows = summary(found["cpu"])["wall_s"], []
    for name, out in outs.items():
        row: dict[str, Any] = {"method": method, "device": name, **summary(found[name])}
        row["speed_up"] = host / row["wall_s"]
        if name != "cpu":
            row["difference"] = largest_difference(out, outs["cpu"])
            if name.startswith("cpu:") and weights_digest(out) != weights_digest(outs["cpu"]):
                raise SystemExit(f"{method}: simulated devices {name} wrote other bytes than the host")
        rows.append(row)
    return rows


def family_of(given: argparse.Namespace) -> tuple[Path, list[Path]]:
    """Base and experts of the sizes that were asked for."""
    size = size_from(given)
    return make_family(home(WORK, size, "bfloat16"), size, given.experts, dtype="bfloat16")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="devices, as for actmat merge")
    parser.add_argument("--methods", nargs="+", default=["actmat", "tsv", "ties"])
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--matrix", type=int, default=4096, help="side of the matrices of the rates")
    parser.add_argument("--block", type=int, default=256 << 20, help="bytes of a copy of the rates")
    parser.add_argument("--name", default="devices", help="name of the result file of the merges")
    add_size_arguments(parser)
    parser.set_defaults(hidden=4096, intermediate=11008, layers=4)
    return parser.parse_args(argv)


def main() -> None:
    given = arguments()
    devices = open_devices(given.device) if torch.cuda.is_available() or not given.device.startswith("cuda") else []
    if not devices:
        sys.exit(f"torch sees no devices of '{given.device}'; --device cpu:0,1 runs on simulated ones")
    rates = [rates_of(device, given.matrix, given.block) for device in devices]
    print(markdown(rates, RATES))
    rows = [row for method in given.methods for row in rows_of(method, single_and_all(given.device), given)]
    print(markdown(rows, COLUMNS))
    kind = {"simulated": devices[0].name.startswith("cpu")}
    print(write_result(f"{given.name.removesuffix('s')}_rates", rates, columns=RATES, **kind))
    size = size_from(given)
    print(write_result(given.name, rows, columns=COLUMNS, parameters=size.parameters(), experts=given.experts, **kind))


if __name__ == "__main__":
    main()
