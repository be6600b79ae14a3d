"""ModelCache: converted models in the user's cache folder, each keyed by the digest of its source.

Nothing half-written is ever seen: a model is written to a temporary folder beside its place and renamed.
Two processes that convert the same file at once both succeed; the first rename wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from radixkv.errors import ModelLoadError

MANIFEST = "radixkv.json"
_STALE_AFTER_S = 3600.0


def default_cache_dir() -> Path:
    """``RADIXKV_CACHE``, else ``XDG_CACHE_HOME/radixkv``, else ``~/.cache/radixkv``. Raises
    ``ModelLoadError`` where that is the home of nobody."""
    try:
        if own := os.environ.get("RADIXKV_CACHE"):
            return Path(own).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "radixkv"
    except RuntimeError as error:  # no such user, or no home
        raise ModelLoadError(f"there is no cache folder: {error}; RADIXKV_CACHE names one") from error


class ModelCache:
    """K1: a folder under ``models`` is complete, or it is not there. K2: its files are the ones that were
    written, as far as size, time and (where the time differs) digest tell; a folder that fails this is
    dropped and made anew. A flipped bit that changes neither size nor time is not noticed."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        self.root = default_cache_dir() if cache_dir is None else Path(cache_dir)

    def digest(self, path: Path) -> str:
        """sha256 of the file, as hex; remembered by path, size and time, so that it is read once only."""
        stat = path.stat()
        place = str(path.resolve())
        seen = {"path": place, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        note = self.root / "digests" / (hashlib.sha256(place.encode()).hexdigest()[:32] + ".json")
        known = _read_json(note) or {}
        if {name: known.get(name) for name in seen} == seen and isinstance(known.get("sha256"), str):
            return str(known["sha256"])
        digest = file_digest(path)
        self._write_json(note, {**seen, "sha256": digest})
        return digest

    def folder(self, key: str, version: int, make: Callable[[Path], object]) -> tuple[Path, bool]:
        """The folder of ``key`` and whether ``make(folder)`` had to fill it just now.

        Raises whatever ``make`` raises (nothing is left behind), and ``ModelLoadError`` where the cache
        cannot be written.
        """
        place = self.root / "models" / f"{key[:32]}-v{version}"
        if self._is_whole(place):
            return place, False
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            self._sweep(place)
            temp = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        except OSError as error:
            raise ModelLoadError(
                f"cannot write to the cache folder {self.root}: {error}; RADIXKV_CACHE names another"
            ) from error
        try:
            make(temp)
            try:
                manifest = {"key": key, "version": version, "files": _file_table(temp)}
                (temp / MANIFEST).write_text(json.dumps(manifest, indent=1))
                temp.chmod(0o755)
            except OSError as error:
                raise ModelLoadError(f"cannot write to the cache folder {self.root}: {error}") from error
            self._publish(temp, place)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
        return place, True

    def _publish(self, temp: Path, place: Path) -> None:
        """Rename ``temp`` to ``place``; a whole folder that another process put there meanwhile stays."""
        for _ in range(3):
            try:
                temp.rename(place)
                return
            except OSError:
                if self._is_whole(place):
                    return
                # damaged: out of the way by rename, which only one of several processes can do
                grave = temp.with_name(temp.name + ".old")
                try:
                    place.rename(grave)
                except OSError:
                    continue
                shutil.rmtree(grave, ignore_errors=True)
        raise ModelLoadError(f"cannot put the converted model in place at {place}")

    def _is_whole(self, place: Path) -> bool:
        """K2. Files whose time differs from the manifest are hashed; if they agree, the time is noted."""
        manifest = _read_json(place / MANIFEST)
        if manifest is None or not isinstance(manifest.get("files"), dict):
            return False
        changed = False
        try:
            for name, known in manifest["files"].items():
                stat = (place / name).stat()
                if stat.st_size != known["size"]:
                    return False
                if stat.st_mtime_ns != known["mtime_ns"]:
                    if file_digest(place / name) != known["sha256"]:
                        return False
                    known["mtime_ns"] = stat.st_mtime_ns
                    changed = True
        except (OSError, ValueError, TypeError, KeyError):  # a file is gone, or the manifest is damaged
            return False
        if changed:
            self._write_json(place / MANIFEST, manifest)
        return True

    def _write_json(self, path: Path, content: dict[str, Any]) -> None:
        """Atomic; a note that cannot be written is only a note lost."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temp = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(temp, path)
        except OSError:
            return

    def _sweep(self, place: Path) -> None:
        """Remove what a killed conversion of the same model left behind an hour ago or more."""
        for left in place.parent.glob(f".{place.name}.*"):
            try:
                if time.time() - left.stat().st_mtime > _STALE_AFTER_S:
                    shutil.rmtree(left, ignore_errors=True)
            except OSError:
                continue


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_table(folder: Path) -> dict[str, dict[str, Any]]:
    table = {}
    for path in sorted(folder.iterdir()):
        stat = path.stat()
        table[path.name] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": file_digest(path)}
    return table


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
