"""Brings a checkpoint from the Hugging Face Hub: only the files that are read, into the Hub's own cache."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qwenc.checkpoint.packed_writer import show_bytes
from qwenc.checkpoint.shards import INDEX, SINGLE
from qwenc.errors import QwencError
from qwenc.report import Reporter

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_SMALL_FILES = ["*.json", "*.jinja"]
_SUBFOLDERS = ["*/*"]  # original/, onnx/, … : never read
_POLL_SECONDS = 0.2


def download(hub_id: str, offline: bool, reporter: Reporter) -> Path:
    """The folder of a snapshot of `owner/name[@revision]`. offline, or HF_HUB_OFFLINE: from the local cache only. Raises QwencError."""
    from huggingface_hub import constants  # takes a while to import

    repo, _, revision = hub_id.partition("@")
    request: dict[str, Any] = {"repo_id": repo, "revision": revision or None}
    if offline or constants.HF_HUB_OFFLINE:
        return _snapshot(hub_id, local_files_only=True, **request)
    with _quiet():
        folder = _snapshot(hub_id, allow_patterns=_SMALL_FILES, ignore_patterns=_SUBFOLDERS, **request)
        weights = _weight_files(folder)
        if all((folder / name).exists() for name in weights):
            return folder
        fetch = {**request, "allow_patterns": weights, "ignore_patterns": _SUBFOLDERS}
        return _snapshot_with_progress(hub_id, fetch, folder, weights, reporter)


def _weight_files(folder: Path) -> list[str]:
    """The shards that the index names, or the single file; a malformed index is told of later, where it is read in earnest."""
    try:
        return sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [SINGLE]


def _snapshot_with_progress(hub_id: str, fetch: dict[str, Any], folder: Path, weights: list[str], reporter: Reporter) -> Path:
    """Downloads in a thread, and meanwhile tells the reporter, from this one, how much has arrived on disk."""
    total = _missing_bytes(fetch, folder, weights)
    blobs = folder.parent.parent / "blobs"
    before = _folder_bytes(blobs)
    result: list[Path | BaseException] = []

    def run() -> None:
        try:
            result.append(_snapshot(hub_id, **fetch))
        except BaseException as error:
            result.append(error)

    reporter.note(f"downloading {hub_id}" + (f": {show_bytes(total)}" if total else ""))
    thread = threading.Thread(target=run, daemon=True)  # daemon: Ctrl-C must not wait for the network
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        if total and thread.is_alive():
            reporter.progress("download", min(_folder_bytes(blobs) - before, total), total, "B")
    if isinstance(result[0], BaseException):
        raise result[0]
    if total:
        reporter.progress("download", total, total, "B")
    return result[0]


def _snapshot(hub_id: str, **request: Any) -> Path:
    """snapshot_download with its exceptions turned into one line each."""
    from huggingface_hub import snapshot_download, utils

    try:
        return Path(snapshot_download(**request))
    except utils.GatedRepoError:
        raise QwencError(f"{hub_id}: access is gated; accept its terms on huggingface.co and log in (`hf auth login`)") from None
    except utils.RepositoryNotFoundError:
        raise QwencError(f"{hub_id}: neither a local path nor a model on the Hugging Face Hub (or it is private)") from None
    except utils.RevisionNotFoundError:
        raise QwencError(f"{hub_id}: the Hugging Face Hub has no such revision of this model") from None
    except utils.HFValidationError:
        raise QwencError(f"{hub_id}: neither a local path nor a valid Hugging Face Hub id (owner/name)") from None
    except utils.LocalEntryNotFoundError:
        if request.get("local_files_only"):
            raise QwencError(f"{hub_id}: not in the local Hugging Face cache, and offline mode forbids a download") from None
        raise _unreachable(hub_id, "") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QwencError(f"{hub_id}: the disk is full") from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
            raise QwencError(
                f"{hub_id}: cannot write {error.filename or 'the Hugging Face cache'}: {error.strerror} (HF_HOME moves it)"
            ) from None
        raise _unreachable(hub_id, str(error)) from None
    except Exception as error:  # network errors are of whichever HTTP library the installed version uses
        raise _unreachable(hub_id, str(error)) from None


def _unreachable(hub_id: str, reason: str) -> QwencError:
    first_line = reason.strip().splitlines()[0][:200] if reason.strip() else ""
    detail = f" ({first_line})" if first_line else ""
    return QwencError(f"{hub_id}: the Hugging Face Hub cannot be reached{detail}; give a local folder, or --offline for a cached model")


def _missing_bytes(fetch: dict[str, Any], folder: Path, weights: list[str]) -> int:
    """Bytes still to fetch, 0 when the Hub does not tell."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(fetch["repo_id"], revision=fetch["revision"], files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    except Exception:  # only the progress display depends on it
        return 0
    return sum(sizes.get(name, 0) for name in weights if not (folder / name).exists())


def _folder_bytes(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
    return total


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Turns off the Hub library's own progress bars and warnings, and back on."""
    from huggingface_hub import logging, utils

    verbosity = logging.get_verbosity()
    bars = not utils.are_progress_bars_disabled()
    logging.set_verbosity_error()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            utils.enable_progress_bars()
