"""Brings a checkpoint from the Hugging Face Hub: only the files that are read, into the Hub's own cache."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

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
    from huggingface_hub import constants, snapshot_download  # take a while to import

    repo, _, revision = hub_id.partition("@")
    offline = offline or constants.HF_HUB_OFFLINE
    with _quiet(), _one_line_errors(hub_id, offline):
        if offline:
            return Path(snapshot_download(repo, revision=revision or None, local_files_only=True))
        small = snapshot_download(repo, revision=revision or None, allow_patterns=_SMALL_FILES, ignore_patterns=_SUBFOLDERS)
        folder = Path(small)
        missing = [name for name in _weight_files(folder) if not (folder / name).exists()]
        if missing:
            _fetch(hub_id, repo, folder, missing, reporter)
        return folder


def _weight_files(folder: Path) -> list[str]:
    """The shards that the index names, or the single file; a malformed index is told of later, where it is read in earnest."""
    try:
        return sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [SINGLE]


def _fetch(hub_id: str, repo: str, folder: Path, names: list[str], reporter: Reporter) -> None:
    """Downloads `names` into the snapshot `folder`, whose name is the commit, and meanwhile tells how much has arrived on disk.

    One file after the other in a daemon thread: Ctrl-C then ends the process at once, where a thread pool would be waited for.
    """
    from huggingface_hub import hf_hub_download

    failures: list[BaseException] = []

    def run() -> None:
        try:
            for name in names:
                hf_hub_download(repo, name, revision=folder.name)
        except BaseException as error:
            failures.append(error)

    total = _hub_bytes(repo, folder.name, names)
    reporter.note(f"downloading {hub_id}" + (f": {show_bytes(total)}" if total else ""))
    blobs = folder.parent.parent / "blobs"
    before = _folder_bytes(blobs)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        if total and thread.is_alive():
            reporter.progress("download", max(0, min(_folder_bytes(blobs) - before, total - 1)), total, "B")
    if failures:
        raise failures[0]
    if total:
        reporter.progress("download", total, total, "B")


@contextlib.contextmanager
def _one_line_errors(hub_id: str, offline: bool) -> Iterator[None]:
    """Turns what the Hub library raises into a QwencError."""
    from huggingface_hub import utils

    try:
        yield
    except QwencError:
        raise
    except utils.GatedRepoError:
        raise QwencError(f"{hub_id}: access is gated; accept its terms on huggingface.co and log in (`hf auth login`)") from None
    except utils.RepositoryNotFoundError:
        raise QwencError(f"{hub_id}: neither a local path nor a model on the Hugging Face Hub (or it is private)") from None
    except utils.RevisionNotFoundError:
        raise QwencError(f"{hub_id}: the Hugging Face Hub has no such revision of this model") from None
    except utils.HFValidationError:
        raise QwencError(f"{hub_id}: neither a local path nor a valid Hugging Face Hub id (owner/name)") from None
    except utils.LocalEntryNotFoundError:
        if offline:
            raise QwencError(
                f"{hub_id}: no such file or folder here, nor in the local Hugging Face cache, and offline mode forbids a download"
            ) from None
        raise _unreachable(hub_id, "") from None
    except utils.EntryNotFoundError:
        raise QwencError(f"{hub_id}: its safetensors weights are not (all) on the Hugging Face Hub") from None
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
    return QwencError(
        f"{hub_id}: no such folder here, and the Hugging Face Hub cannot be reached{detail}; give a local folder, or --offline for a "
        "cached model"
    )


def _hub_bytes(repo: str, revision: str, names: list[str]) -> int:
    """The size of these files on the Hub, 0 when it does not tell."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    except Exception:  # only the progress display depends on it
        return 0
    return sum(sizes.get(name, 0) for name in names)


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
