"""What one checkout answers to cases of the ledger.

    PYTHONPATH=CHECKOUT/src:. python -m tests.ledger.answers CHECKOUT INPUTS OUT CASE ...

Writes `OUT/answers.jsonl`: a line for each case, with its exit code and its leaves.
"""

import contextlib
import hashlib
import io
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from tests.ledger.cases import CASES, Case

Leaves = dict[str, Any]
"""Place in an output -> hash, number or text; those of records begin with RECORD."""
RECORD = "record "
MANIFEST = "actmat_manifest.json"
TEXTS = (MANIFEST, "README.md", "report.json", "report.html")
"""Files whose texts may change; of the manifest, the numbers and hashes of records are compared."""


def run_cases(cases: list[Case], inputs: Path, out: Path) -> None:
    """Run cases one after the other, from the folder of the inputs."""
    os.chdir(inputs)
    with (out / "answers.jsonl").open("w") as file:
        for case in cases:
            folder = out / case.slug
            folder.mkdir()
            code, text, values = _run(case, folder)
            answer = {"case": case.name, "code": code, "text": text[-2000:], "leaves": read_output(folder) | values}
            print(json.dumps(answer), file=file, flush=True)


def _run(case: Case, folder: Path) -> tuple[int, str, Leaves]:
    """Exit code, what was printed, and what a function computed."""
    text, values, code = io.StringIO(), {}, 0
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            if callable(case.run):
                values = {name: hash_value(value) for name, value in case.run(folder).items()}
            else:
                arguments = case.arguments(folder / case.out)
                with mock.patch.object(sys, "argv", ["actmat", *arguments]):
                    runpy.run_module("actmat", run_name="__main__")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except Exception:  # noqa: BLE001 - whatever it is, it is this case's answer
            code = -1
            traceback.print_exc(file=text)
    return code, text.getvalue(), values


def hash_value(value: Any) -> Any:
    """Hash of a tensor's dtype, shape and bytes; a number is its own."""
    if isinstance(value, int | float):
        return value
    import torch

    data = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return _digest(str(value.dtype).encode(), json.dumps(list(value.shape)).encode(), data)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_output(folder: Path) -> Leaves:
    """Leaves of all files below a folder that do not begin with a dot."""
    leaves: Leaves = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")):
        place = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            leaves |= {f"{place}: {name}": value for name, value in _weights(path).items()}
        elif path.name not in TEXTS:
            leaves[place] = _digest(path.read_bytes())
        if path.name == MANIFEST:
            leaves |= {f"{RECORD}{place}: {name}": v for name, v in _records(json.loads(path.read_text()))}
    return leaves


def _weights(path: Path) -> Leaves:
    """Hash of every tensor, the metadata except a manifest, and the hash of the order of tensors."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    leaves: Leaves = {f"metadata {name}": value for name, value in metadata.items() if name != "actmat"}
    for name, spec in header.items():
        low, high = spec["data_offsets"]
        kind = json.dumps([spec["dtype"], spec["shape"]])
        leaves[f"tensor {name}"] = _digest(kind.encode(), data[start + low : start + high])
    return {**leaves, "places of the tensors": _digest(json.dumps(list(header.items())).encode())}


def _records(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Numbers, flags and hashes of the rows of tensors and modules."""
    for kind in ("tensors", "modules"):
        for row in manifest.get(kind, ()):
            yield from ((f"{row['name']} {name}", value) for name, value in _numbers(row))


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of plain data that are no texts, hashes apart."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for position, part in enumerate(value):
            yield from _numbers(part, f"{name}.{position}")
    elif not isinstance(value, str) or "hash" in name:
        yield name, value


def check_origin(checkout: Path) -> None:
    """Check that all of actmat that was imported, extras included, is this checkout's.

    Raises:
        RuntimeError: some module is not.
    """
    modules = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "actmat"}
    strange = {n: f for n, m in modules.items() if (f := m.__file__) and not Path(f).is_relative_to(checkout / "src")}
    if strange or not any(n.startswith("actmat.") for n in modules):
        raise RuntimeError(f"expected modules of {checkout}, found {strange or 'none'}")


def main(checkout: str, inputs: str, out: str, *names: str) -> None:
    """Command line."""
    chosen = {*names}
    run_cases([c for c in CASES if c.name in chosen], Path(inputs), Path(out))
    check_origin(Path(checkout))


if __name__ == "__main__":
    main(*sys.argv[1:])
