"""Make the data of the suites from public originals, and check every file by its SHA-256.

    python -m benchmarks.data DATA                            # all; DATA/text is --data of text-minilm, ...
    python -m benchmarks.data DATA --only text/trec images/mnist
    python -m benchmarks.data DATA --check                    # only check what is there
    python -m benchmarks.data --list                          # names, sources, sizes, hashes, licenses

The originals are files of GitHub repositories at a commit. Texts come out byte for byte; of images the arrays are
equal, and the hash is theirs. A file that differs is not written. Licenses are those of the originals: read them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actmat.errors import CheckpointError
from benchmarks.common import markdown
from benchmarks.data.images import Arrays
from benchmarks.data.originals import Original
from benchmarks.data.table import IMAGES, TEXTS, DataFile, files

ARRAYS = ("x_train", "y_train", "x_test", "y_test", "class_names")


def content_hash(name: str, content: bytes) -> str:
    """SHA-256 of a file; of an `.npz`, of its arrays: name, dtype, shape and bytes of each.

    >>> content_hash("a.jsonl", b"")[:8]
    'e3b0c442'
    """
    if not name.endswith(".npz"):
        return hashlib.sha256(content).hexdigest()
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return array_hash({key: file[key] for key in ARRAYS})


def array_hash(arrays: Arrays) -> str:
    """SHA-256 of arrays; texts count as UTF-8 lines, whatever the width of their dtype."""
    found = hashlib.sha256()
    for key in ARRAYS:
        array = arrays[key]
        body = "\n".join(array.tolist()).encode() if array.dtype.kind == "U" else np.ascontiguousarray(array).tobytes()
        kind = "text" if array.dtype.kind == "U" else str(array.dtype)
        found.update(f"{key} {kind} {array.shape}\n".encode() + body)
    return found.hexdigest()


def make(file: DataFile, mirror: str = "") -> bytes:
    """The content of a file, from its original.

    Raises:
        CheckpointError: the original cannot be had, or the content is not the expected one.
    """
    original = Original(file.repo, file.commit, mirror)
    if file.name in TEXTS:
        content = TEXTS[file.name](original)
    else:
        stream = io.BytesIO()
        arrays: dict[str, Any] = IMAGES[file.name](original)
        np.savez_compressed(stream, **arrays)
        content = stream.getvalue()
    if (found := content_hash(file.name, content)) != file.sha256:
        raise CheckpointError(
            f"{file.name} from {file.repo} at {file.commit} has SHA-256 {found}, expected {file.sha256}. The "
            "original has changed, the transfer was cut, or a library decodes or resizes images otherwise; nothing was "
            "written."
        )
    return content


def fetch(file: DataFile, out: Path, mirror: str = "") -> str:
    """Make a file below `out` unless it is there as it should be; what was done.

    Raises:
        CheckpointError: see `make`; or another file of the name is there.
    """
    path = out / file.name
    if path.is_file():
        check(file, out)
        return "there"
    content = make(file, mirror)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
    return "made"


def check(file: DataFile, out: Path) -> None:
    """Compare a file with its hash.

    Raises:
        CheckpointError: it is missing, or another one.
    """
    path = out / file.name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: python -m benchmarks.data {out} --only {file.name} makes it.")
    if (found := content_hash(file.name, path.read_bytes())) != file.sha256:
        raise CheckpointError(f"{path} has SHA-256 {found}, expected {file.sha256}: remove it, and fetch it again.")


def chosen(table: Mapping[str, DataFile], only: Sequence[str]) -> list[DataFile]:
    """Files whose names begin with one of `only`; all for none.

    Raises:
        CheckpointError: a beginning that no file has.
    """
    if unknown := [o for o in only if not any(name.startswith(o) for name in table)]:
        raise CheckpointError(f"No file begins with {', '.join(unknown)}; there are {', '.join(table)}.")
    return [file for name, file in table.items() if not only or any(name.startswith(o) for o in only)]


def main() -> int:
    """Command line; the number of files that failed, 1 at most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--only", nargs="+", default=(), help="beginnings of names")
    parser.add_argument("--check", action="store_true", help="make nothing")
    parser.add_argument("--list", action="store_true", help="print the table")
    parser.add_argument("--mirror", default="", help="another server with REPO/COMMIT/PATH and REPO/tar.gz/COMMIT")
    given = parser.parse_args()
    some = chosen(files(), given.only)
    if given.list:
        columns = ["name", "repo", "commit", "bytes", "sha256", "license"]
        print(markdown([{n: str(getattr(f, n)) for n in columns} for f in some], columns))
        return 0
    if given.out is None:
        parser.error("give the folder of the data")
    failed = 0
    for file in some:
        try:
            done = "as expected" if given.check else fetch(file, given.out, given.mirror)
            if given.check:
                check(file, given.out)
        except CheckpointError as error:
            failed, done = 1, f"FAILED: {error}"
        print(f"{file.name}: {done}", file=sys.stderr if done.startswith("FAILED") else sys.stdout, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
