"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError, EngineDeadError, InternalError, RadixKVError


def exit_status(name: str, run: Callable[[], int]) -> int:
    """What ``run`` returns; 2 with one line of text where options or model make no sense.

    Faults of our own (``InternalError``, ``EngineDeadError``) go through, with their traceback.
    """
    try:
        return run()
    except (InternalError, EngineDeadError):
        raise
    except RadixKVError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def check_writable(path: Path | None) -> None:
    """Raise ``ConfigError`` before any work where ``path`` lies in a folder that does not exist."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write ``result`` where ``path`` is given."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")
