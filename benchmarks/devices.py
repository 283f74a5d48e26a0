"""Merges on devices against one thread on the host, and the rates of every device.

    python -m benchmarks.devices                                  # all GPUs, a reduced Llama of 1.4 B parameters
    python -m benchmarks.devices --device cuda:0,2 --methods actmat tsv
    python -m benchmarks.devices --device cpu:0,1 --hidden 64 --intermediate 176 --layers 2 --vocabulary 1000

Without `--device` all CUDA devices are measured, one alone and all together; it ends with an error where there are
none. `cpu:0,1` are simulated devices: they show that the program runs and that the bytes are those of the host, not how
fast anything is.

`results/devices.json` has a row per method and device: wall time of the whole process, speed up over one thread, bytes
that went up per second, their share of what the links of these devices carry from pinned memory, and the largest
relative difference of a tensor from the host's. Simulated devices must write the bytes of the host. `results/
device_rates.json` has a row per device: products in float32, eigendecompositions in float64 (one, and 16 small ones
together and one by one), copies from pinned and from ordinary memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import actmat
from actmat.engine.devices.device import CudaDevice, Device, SimulatedDevice, open_devices
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

COLUMNS = ("method", "device", "wall_s", "speed_up", "moved_b", "up_gbps", "share_of_links", "difference")
RATES = ("device", "name", "memory_b", "matmul_f32_gflops", "eigh_f64_s", "eigh_16_small_s", "eigh_16_single_s",
         "pinned_up_gbps", "pinned_down_gbps", "ordinary_up_gbps")  # fmt: skip
SMALL = 256
"""Side of the matrices of a batch."""


def synchronised(device: Device, work: Any) -> Any:
    """The work, to its end on the device."""

    def run() -> None:
        work()
        device.mark().synchronize()

    return run


def rates_of(device: Device, matrix: int, block: int) -> dict[str, Any]:
    """Rates of one device.

    Args:
        matrix: side of the matrices; `block`: bytes of a copy.
    """
    device.activate()
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(matrix, matrix, generator=generator).to(device.torch_device)
    gram = (a @ a.mT).double()
    small = torch.randn(16, SMALL, SMALL, generator=generator).double().to(device.torch_device)
    small = small @ small.mT
    pinned, ordinary = device.host_buffer(block).fill_(1), torch.ones(block, dtype=torch.uint8)
    there = device.empty(block, torch.uint8)

    def seconds(work: Any) -> float:
        with torch_threads(1):
            return timed(synchronised(device, work))

    def one_by_one() -> None:
        for matrix_SS in small:
            torch.linalg.eigh(matrix_SS)

    return {
        "device": device.name,
        "name": torch.cuda.get_device_name(device.torch_device) if isinstance(device, CudaDevice) else "simulated",
        "memory_b": device.total_bytes(),
        "matmul_f32_gflops": 2 * matrix**3 / seconds(lambda: a @ a) / 1e9,
        "eigh_f64_s": seconds(lambda: torch.linalg.eigh(gram)),
        "eigh_16_small_s": seconds(lambda: torch.linalg.eigh(small)),
        "eigh_16_single_s": seconds(one_by_one),
        "pinned_up_gbps": block / seconds(lambda: device.send(pinned, there, None).synchronize()) / 1e9,
        "pinned_down_gbps": block / seconds(lambda: device.fetch(there, pinned).synchronize()) / 1e9,
        "ordinary_up_gbps": block / seconds(lambda: there.copy_(ordinary)) / 1e9,
    }


def single_and_all(names: str) -> list[str]:
    """The first of the devices alone, and all of them: `cuda:0,2` -> `cuda:0`, `cuda:0,2`."""
    numbers = [d.name.partition(":")[2] for d in open_devices(names)]
    kind = names.partition(":")[0]
    return list(dict.fromkeys([f"{kind}:{numbers[0]}", f"{kind}:{','.join(numbers)}"]))


def moved_bytes(base: Path, experts: Sequence[Path], method: str, device: str) -> int:
    """Bytes that go up in one merge, by the plan."""
    plan = actmat.plan(base, experts, method=method, device=device)
    return sum(item.cost.read_bytes for item in plan.on_device)


def merge(base: Path, experts: Sequence[Path], method: str, device: str, out: Path) -> Run:
    """One merge in a process of its own."""
    command: list[str | Path] = [*actmat_command(), "merge", "--base", base, "--method", method, "--out", fresh(out)]
    for expert in experts:
        command += ["--expert", expert]
    return measure(
        [*command, "--device", device, "--threads", "1", "--quiet"], None, PYTHONPATH=str(HERE.parent / "src")
    )


def rows_of(method: str, names: Sequence[str], links: dict[str, float], given: argparse.Namespace) -> list[Any]:
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
            row["moved_b"] = moved_bytes(base, experts, method, name)
            row["up_gbps"] = row["moved_b"] / row["wall_s"] / 1e9
            row["share_of_links"] = row["up_gbps"] / sum(links[d.name] for d in open_devices(name))
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
    links = {row["device"]: row["pinned_up_gbps"] for row in rates}
    rows = [row for method in given.methods for row in rows_of(method, single_and_all(given.device), links, given)]
    print(markdown(rows, COLUMNS))
    kind = {"simulated": isinstance(devices[0], SimulatedDevice)}
    print(write_result(f"{given.name.removesuffix('s')}_rates", rates, columns=RATES, **kind))
    size = size_from(given)
    print(write_result(given.name, rows, columns=COLUMNS, parameters=size.parameters(), experts=given.experts, **kind))


if __name__ == "__main__":
    main()
