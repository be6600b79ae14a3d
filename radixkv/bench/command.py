"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from radixkv.errors import (
    ConfigError,
    EngineDeadError,
    InternalError,
    ModelLoadError,
    RadixKVError,
    UnsupportedModelError,
)


def exit_status(name: str, run: Callable[[], int]) -> int:
    """What ``run`` returns; with one line of text, 2 where the options make no sense and 1 where the model
    cannot be loaded or run, as for the other commands.

    Faults of our own (``InternalError``, ``EngineDeadError``) go through, with their traceback.
    """
    try:
        return run()
    except (InternalError, EngineDeadError):
        raise
    except (ModelLoadError, UnsupportedModelError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except RadixKVError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def check_writable(path: Path | None) -> None:
    """Raise ``ConfigError`` before any work where ``path`` cannot be written: its folder does not exist or
    refuses, or it is a folder itself. What stands there is not touched."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied")


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write ``result`` where ``path`` is given."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")
