"""Results of stages on disk, found again by everything that determines them.

    root/<stage>/<key>/         output of the stage, and key.json: the whole key
    root/<stage>/<key>.part/    a stage that is running, or was interrupted
    root/<stage>/<key>.lock     held while it runs, so that two processes do not make the same thing

`<key>` is the SHA-256 of the key as canonical JSON, its first 16 hexadecimal digits.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from actmat.errors import OutputError

_KEY_FILE = "key.json"
_HEX = 16
_CHUNK = 1 << 20


def canonical(key: Any) -> str:
    """JSON with sorted keys: equal keys give equal text, whatever the order in which they were built.

    Dataclasses become mappings, tuples lists.

    Raises:
        TypeError: the key holds something whose text does not determine it, such as a path (give the hash of what is
            there), or a NaN.
    """
    try:
        return json.dumps(key, sort_keys=True, default=_plain, allow_nan=False, ensure_ascii=False)
    except ValueError as error:
        raise TypeError(f"a cache key must be plain, finite data: {error}") from None


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"a cache key holds a {type(value).__name__}, whose content is unknown: {value!r}")


def digest(key: Any) -> str:
    """The 16 hexadecimal digits that stand for a key."""
    return hashlib.sha256(canonical(key).encode()).hexdigest()[:_HEX]


def file_digest(paths: Iterable[Path]) -> str:
    """SHA-256 over the names and bytes of files, in the order of their names."""
    found = hashlib.sha256()
    for path in sorted(paths, key=lambda p: p.name):
        found.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                found.update(chunk)
    return found.hexdigest()


@functools.cache
def code_digest(*layers: str) -> str:
    """Hash of the code of some layers of actmat: a changed rule never returns an old number.

    Comments and docstrings do not count, see `meaning`.
    """
    import actmat

    package = Path(actmat.__file__).parent
    found = hashlib.sha256()
    files = {layer: sorted((package / layer).rglob("*.py")) for layer in layers}
    assert all(files.values()), "a layer that has been renamed would count for nothing"
    for path in (p for layer in layers for p in files[layer]):
        found.update(f"{path.relative_to(package).as_posix()}\0{meaning(path.read_text(encoding='utf-8'))}\0".encode())
    return found.hexdigest()


def meaning(source: str) -> str:
    """The syntax tree of a module as text, without comments, layout and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                body[:] = [s for s in body if not _is_text(s)] or ([ast.Pass()] if body else [])
    return ast.dump(tree)


def _is_text(statement: ast.AST) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def library_versions(*names: str) -> dict[str, str]:
    """Installed versions, "absent" for a missing library: part of the cache key."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


class Cache:
    """Content-keyed folders below `root`.

    Args:
        root: made when the first stage runs.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def path(self, stage: str, key: Mapping[str, Any]) -> Path:
        """Folder of a stage's result."""
        return self.root / stage / digest(key)

    def holds(self, stage: str, key: Mapping[str, Any]) -> bool:
        """True if the stage is finished."""
        return (self.path(stage, key) / _KEY_FILE).is_file()

    def get(self, stage: str, key: Mapping[str, Any], make: Callable[[Path], None], *, resumable: bool = False) -> Path:
        """The folder of a finished stage, made now unless it is there.

        `make` fills an empty folder, which then appears under its name whole. One that failed or was interrupted begins
        again, or, if `resumable`, finds its unfinished files.

        Args:
            stage: name of the stage: letters, digits, `-` and `_`.
            key: all that determines the result: data by hash, options, seed, versions.
            make: writes the result into the folder that it is given.
            resumable: hand the folder of an interrupted run to `make` as it was left.

        Raises:
            OutputError: the cache cannot be written, or holds another key under the same digits.
        """
        return self.get_many(stage, {"": key}, lambda parts: make(parts[""]), resumable=resumable)[""]

    def get_many(
        self,
        stage: str,
        keys: Mapping[str, Mapping[str, Any]],
        make: Callable[[Mapping[str, Path]], None],
        *,
        resumable: bool = False,
    ) -> dict[str, Path]:
        """The same for several results of one stage; `make` gets the folders of those that are missing, in one call."""
        if not stage.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"'{stage}' is not a valid stage name: use only letters, digits, - and _")
        done = {name: self.path(stage, key) for name, key in keys.items()}
        text = {name: canonical(key) for name, key in keys.items()}
        if missing := [n for n in keys if not _finished(done[n], text[n])]:
            with self._locked([done[n] for n in missing]):
                missing = [n for n in missing if not _finished(done[n], text[n])]  # another process may have been first
                parts = {n: done[n].with_suffix(".part") for n in missing}
                with self._kept(stage):
                    for part in parts.values():
                        if part.exists() and not resumable:
                            shutil.rmtree(part)
                        part.mkdir(exist_ok=True)
                if parts:
                    make(parts)
                with self._kept(stage):
                    for name, part in parts.items():
                        (part / _KEY_FILE).write_text(text[name] + "\n", encoding="utf-8")
                        part.replace(done[name])
        return done

    @contextlib.contextmanager
    def _locked(self, places: Sequence[Path]) -> Iterator[None]:
        """Locks of all places, taken in one order, so that two processes never wait for each other."""
        from filelock import FileLock

        with contextlib.ExitStack() as stack:
            with self._kept(places[0].parent.name):
                places[0].parent.mkdir(parents=True, exist_ok=True)
                for place in sorted(places):
                    stack.enter_context(FileLock(place.with_suffix(".lock")))
            yield

    @contextlib.contextmanager
    def _kept(self, stage: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"The stage '{stage}' cannot be stored in {self.root}: {error.strerror or error}. "
                "Fix: choose another folder with --cache."
            ) from error


def _finished(done: Path, text: str) -> bool:
    """True if a stage is there; its key must be the one that is asked for."""
    path = done / _KEY_FILE
    if not path.is_file():
        return False
    if path.read_text(encoding="utf-8").rstrip("\n") != text:
        raise OutputError(f"{path} does not match its folder's key. Fix: remove the folder {done}.")
    return True
