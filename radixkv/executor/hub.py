"""fetch_snapshot: a model repository of the Hugging Face hub, as a local folder."""

from __future__ import annotations

import json
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from radixkv.errors import ModelLoadError, UnsupportedModelError
from radixkv.plain import shown

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
UNWANTED = ["*/*"]
"""Sub-folders hold other formats of the same weights."""
PROBE_S = 5.0


def fetch_snapshot(repo_id: str, revision: str | None = None, *, progress: bool | None = None) -> Path:
    """The folder of ``repo_id`` at ``revision``, fetched where needed.

    Where ``HF_HUB_OFFLINE`` is set or the hub does not answer within ``PROBE_S`` seconds, only what was
    fetched before is used. Raises ``ModelLoadError`` (unknown, refused, offline and not there) and
    ``UnsupportedModelError`` for a quantised checkpoint, before its weights are fetched.
    """
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    offline = bool(constants.HF_HUB_OFFLINE) or not _answers(constants.ENDPOINT)
    common: dict[str, Any] = {"repo_id": repo_id, "revision": revision, "local_files_only": offline}
    hush = progress is False and not are_progress_bars_disabled()
    if hush:
        disable_progress_bars()
    try:
        refuse_quantised(Path(hf_hub_download(filename="config.json", **common)), repo_id)
        return Path(snapshot_download(allow_patterns=WANTED, ignore_patterns=UNWANTED, **common))
    except (UnsupportedModelError, ModelLoadError):
        raise
    except Exception as error:  # the hub's own kinds and those of its HTTP library
        at = "" if revision is None else f" at revision {revision!r}"
        if offline:
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub does not answer"
            raise ModelLoadError(
                f"{repo_id!r}{at} is no local folder and was not fetched before, and {why}"
            ) from error
        raise ModelLoadError(f"{repo_id!r}{at} cannot be fetched: {error}") from error
    finally:
        if hush:
            enable_progress_bars()


def refuse_quantised(config_file: Path, name: str) -> None:
    """Raise ``UnsupportedModelError`` where this config.json names a quantisation."""
    quantization = read_json(config_file, name).get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        method = method if isinstance(method, str) else "an unnamed method"
        raise UnsupportedModelError(f"{name} is quantised ({method}); only float weights are supported")


def read_json(file: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of the model ``name``. Raises ``ModelLoadError`` where it holds none."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{name}: {file.name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{name}: {file.name} holds {shown(content)}, not an object")
    return content


def _answers(endpoint: str) -> bool:
    """Whether a connection can be made at all. Behind a proxy there is nothing to probe."""
    url = urllib.parse.urlsplit(endpoint)
    if url.scheme in urllib.request.getproxies():
        return True
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname or "", port), timeout=PROBE_S).close()
    except OSError:
        return False
    return True
