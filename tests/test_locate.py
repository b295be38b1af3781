"""From a model's name to a packed file: paths, the cache of conversions, and the Hub without a network."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.utils
import pytest
from checkpoints import DENSE, Notes, weights, write_checkpoint, write_safetensors

from qwenc.checkpoint import hub, locate, model_cache
from qwenc.checkpoint.convert import convert
from qwenc.checkpoint.locate import load_packed, resolve
from qwenc.checkpoint.packed import open_packed
from qwenc.errors import QwencError, UsageError
from qwenc.settings import Settings

ROOT = Path(__file__).parent.parent
COMMIT = "c0ffee" * 6 + "c0ff"
Q4, Q8, DUAL = Settings(wmode="q4"), Settings(wmode="q8"), Settings()
OFFLINE = Settings(wmode="q4", offline=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty qwenc cache, and a working folder without surprises."""
    monkeypatch.setenv("QWENC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "cache" / "models"


@pytest.fixture
def model(tmp_path):
    return write_checkpoint(tmp_path / "My Model")


def refused(name, settings, *words, kind=QwencError):
    with pytest.raises(kind) as error:
        resolve(name, settings)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), str(error.value)


# ---- paths -------------------------------------------------------------------------------------------------------------------
def test_a_packed_file_is_taken_as_it_is(model, tmp_path, cache):
    path = convert(model, tmp_path / "q4.qwenc", "q4")
    assert resolve(path, Q4) == path and resolve(str(path), Q4) == path
    assert load_packed(path, Q4).wmode == "q4"
    assert not cache.exists()


@pytest.mark.parametrize(
    "held, serves", [("dual", {"dual", "q4", "q8"}), ("q4", {"q4"}), ("q8", {"q8"}), ("f32", {"f32"})], ids=["dual", "q4", "q8", "f32"]
)
def test_which_wmode_serves_which(model, tmp_path, held, serves):
    path = convert(model, tmp_path / "x.qwenc", held)
    for wanted in ("dual", "q4", "q8", "f32"):
        if wanted in serves:
            assert resolve(path, Settings(wmode=wanted)) == path
        else:
            refused(path, Settings(wmode=wanted), f"holds {held} weights", f"--wmode {held}")


def test_paths_that_are_no_model(model, tmp_path):
    refused("", Q4, "no model given", kind=UsageError)
    refused("/nowhere/at/all", Q4, "no such file or folder")
    refused("./org/name", Q4, "no such file or folder")
    refused("gpt2", Q4, "no such file or folder", "owner/name")
    refused("a/b/c", Q4, "no such file or folder")
    refused("bad\0name", Q4, "no such file or folder")
    refused("x" * 5000, Q4)
    refused(model / "model.safetensors", Q4, "give the folder", str(model))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "x.gguf", Q4, "GGUF")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", Q4, "no config.json")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", Q4, "neither a file nor a folder")


def test_home_folder(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/My Model", Q4).exists()


def test_an_existing_path_wins_over_a_hub_id(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "work/Org/Name")
    monkeypatch.setattr(locate, "download", lambda *args: pytest.fail("asked the Hub"))
    assert resolve("Org/Name", Q4).exists()


# ---- the cache ---------------------------------------------------------------------------------------------------------------
def test_a_folder_is_converted_once(model, cache):
    first, again = Notes(), Notes()
    path = resolve(model, Q4, first)
    assert path.parent == cache and path.name.startswith("My--Model-q4-") and open_packed(path).wmode == "q4"
    assert any("converting" in note and "kB" in note for note in first.notes) and first.steps
    assert resolve(model, Q4, again) == path and again.notes == [] and again.steps == []
    assert resolve(f"{model}/", Q4) == path and resolve(os.path.relpath(model), Q4) == path
    assert sorted(os.listdir(cache)) == [path.name]


def test_a_dual_conversion_serves_its_halves(model, cache):
    dual = resolve(model, DUAL)
    assert resolve(model, Q4) == resolve(model, Q8) == dual
    assert resolve(model, Settings(wmode="f32")) != dual


@pytest.mark.parametrize("change", ["config", "weights", "same size", "tokenizer", "template"])
def test_a_changed_checkpoint_is_converted_again(model, change):
    before = resolve(model, Q4)
    if change == "config":
        (model / "config.json").write_text((model / "config.json").read_text().replace("1000000.0", "2000000.0"))
    elif change == "tokenizer":
        (model / "tokenizer.json").write_text("{}")
    elif change == "template":
        (model / "chat_template.jinja").write_text("{{ messages }}")
    else:
        tensors = weights(DENSE, seed=5) | ({"extra": weights(DENSE)["model.norm.weight"]} if change == "weights" else {})
        write_safetensors(model / "model.safetensors", tensors)
        os.utime(model / "model.safetensors", ns=(1, 1))
    assert resolve(model, Q4) != before
    assert resolve(model, Q4) == resolve(model, Q4)


def test_a_damaged_conversion_is_made_again(model):
    path = resolve(model, Q4)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert resolve(model, Q4) == path and path.read_bytes() == whole


def test_a_read_only_checkpoint(model):
    for path in model.iterdir():
        path.chmod(0o444)
    model.chmod(0o555)
    try:
        assert resolve(model, Q4).exists()
    finally:
        model.chmod(0o755)


def test_an_unwritable_cache_names_the_variable(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QWENC_CACHE", str(tmp_path / "file"))
    refused(model, Q4, str(tmp_path / "file"), "QWENC_CACHE")


def test_xdg_cache(model, tmp_path, monkeypatch):
    monkeypatch.delenv("QWENC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolve(model, Q4).parent == tmp_path / "xdg/qwenc/models"


def run_resolve(model, before="pass"):
    """Another process that resolves `model`, printing its notes and the result."""
    code = f"""
import sys, time, os, signal
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from checkpoints import Notes
from qwenc.checkpoint import convert as module
from qwenc.checkpoint.locate import resolve
from qwenc.settings import Settings
pack = module.pack_q4
def watched(rows):
    {before}
    return pack(rows)
module.pack_q4 = watched
notes = Notes()
path = resolve({str(model)!r}, Settings(wmode="q4"), notes)
print(path, len([n for n in notes.notes if n.startswith("converting")]), len([n for n in notes.notes if "waiting" in n]))
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_two_runs_at_once_convert_once(model, cache):
    runs = [run_resolve(model, "time.sleep(0.2)") for _ in range(3)]
    lines = [run.communicate(timeout=120)[0].rsplit(" ", 2) for run in runs]
    assert len({path for path, _, _ in lines}) == 1 and all(run.returncode == 0 for run in runs)
    assert sum(int(converted) for _, converted, _ in lines) == 1
    assert os.listdir(cache) == [Path(lines[0][0]).name]


def test_a_killed_conversion_is_cleaned_up_and_done_anew(model, cache):
    run = run_resolve(model, "os.kill(os.getpid(), signal.SIGKILL)")
    run.communicate(timeout=120)
    assert run.returncode == -signal.SIGKILL
    assert [name for name in os.listdir(cache) if name.endswith(".part")] and not [n for n in os.listdir(cache) if n.endswith(".qwenc")]
    path = resolve(model, Q4)
    assert os.listdir(cache) == [path.name] and open_packed(path).wmode == "q4"


def test_ctrl_c_while_waiting_for_another_run(model, cache, monkeypatch):
    monkeypatch.setattr(model_cache.fcntl, "flock", lambda fd, how: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        resolve(model, Q4)
    assert not list(cache.glob("*.qwenc"))


# ---- the Hub -----------------------------------------------------------------------------------------------------------------
def make_snapshot(home, repo="Org/Tiny-1", commit=COMMIT, **more):
    """A local stand-in for the Hub's cache: blobs, snapshots of links to them, refs."""
    base = home / "hub" / ("models--" + repo.replace("/", "--"))
    source = write_checkpoint(home / "source", **more)
    snapshot = base / "snapshots" / commit
    for folder in (base / "blobs", base / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        blob = path.rename(base / "blobs" / f"{commit}-{path.name}")
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    (base / "refs/main").write_text(commit)
    return snapshot


@pytest.fixture
def hf_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hf"


def test_offline_from_the_local_cache(hf_cache, cache):
    make_snapshot(hf_cache, shards=2)
    path = resolve("Org/Tiny-1", OFFLINE)
    assert path.parent == cache and path.name.startswith("Org--Tiny-1-q4-")
    assert resolve(f"Org/Tiny-1@{COMMIT}", OFFLINE).exists()
    refused("Org/Tiny-1@other", OFFLINE, "Org/Tiny-1@other", "nor in the local Hugging Face cache")
    refused("Org/Absent", OFFLINE, "nor in the local Hugging Face cache", "offline")


def test_hf_hub_offline_is_honoured(hf_cache, monkeypatch):
    make_snapshot(hf_cache)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve("Org/Tiny-1", Q4).exists()
    refused("Org/Absent", Q4, "nor in the local Hugging Face cache")


def test_hf_home_in_a_fresh_process(tmp_path):
    """The whole way with nothing but environment variables."""
    make_snapshot(tmp_path / "hf")
    code = "import sys; from qwenc.checkpoint.locate import *; print(resolve('Org/Tiny-1', Settings(wmode='q4')))"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("HF_HUB_CACHE", None)
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and Path(run.stdout.strip()).exists() and run.stderr == ""


def hub_error(name):
    """An error of the installed Hub library, made without a network."""
    kind = getattr(huggingface_hub.utils, name)
    error = kind.__new__(kind)
    Exception.__init__(error, f"{name}: a long text\nof several lines")
    return error


@pytest.mark.parametrize(
    "error, words",
    [
        ("RepositoryNotFoundError", ["neither a local path nor a model on the Hugging Face Hub"]),
        ("GatedRepoError", ["gated", "log in"]),
        ("RevisionNotFoundError", ["no such revision"]),
        ("LocalEntryNotFoundError", ["cannot be reached", "--offline", "local folder"]),
        ("HfHubHTTPError", ["cannot be reached"]),
        (ConnectionError("[Errno -2] Name or service not known"), ["cannot be reached", "Name or service not known"]),
        (RuntimeError(""), ["cannot be reached"]),
        (OSError(28, "No space left on device"), ["disk is full"]),
        (PermissionError(13, "Permission denied", "/root/hf"), ["cannot write /root/hf", "HF_HOME"]),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_hub_errors_are_one_line(hf_cache, monkeypatch, error, words):
    def fail(*args, **more):
        raise hub_error(error) if isinstance(error, str) else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refused("Org/Name", Q4, "Org/Name", *words)


def test_an_unreachable_hub_for_real(hf_cache, monkeypatch):
    """A port that nobody listens on; with a copy in the local cache the run goes on with it."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    refused("Org/Tiny-1", Q4, "Org/Tiny-1", "cannot be reached", "--offline")
    make_snapshot(hf_cache)
    assert resolve("Org/Tiny-1", Q4).exists()


class FakeHub:
    """Stands in for the Hub library: copies from `source` what is asked for, and remembers it."""

    def __init__(self, cache, source, monkeypatch):
        self.folder, self.source, self.calls = cache / "hub/models--Org--Tiny/snapshots" / COMMIT, source, []
        self.blobs = self.folder.parent.parent / "blobs"
        self.blobs.mkdir(parents=True)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.file)
        monkeypatch.setattr(hub, "_hub_bytes", lambda repo, revision, names: sum((source / name).stat().st_size for name in names))
        monkeypatch.setattr(hub, "_POLL_SECONDS", 0.01)

    def snapshot(self, repo, revision=None, allow_patterns=None, ignore_patterns=None):
        names = [str(path.relative_to(self.source)) for path in self.source.rglob("*") if path.is_file()]
        for name in huggingface_hub.utils.filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            self.copy(name)
        self.calls.append((repo, revision))
        return str(self.folder)

    def file(self, repo, name, revision=None):
        assert huggingface_hub.utils.are_progress_bars_disabled()
        time.sleep(0.05)
        if not (self.source / name).exists():
            raise hub_error("EntryNotFoundError")
        self.copy(name)
        self.calls.append((repo, revision))

    def copy(self, name):
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.blobs / name).write_bytes((self.source / name).read_bytes())
        (self.folder / name).unlink(missing_ok=True)
        (self.folder / name).symlink_to(self.blobs / name)


def test_only_needed_files_are_downloaded(hf_cache, tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "remote", shards=2)
    for name in (
        "pytorch_model.bin",
        "consolidated.safetensors",
        "README.md",
        "original/params.json",
        "onnx/model.safetensors",
        "chat_template.jinja",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    fake, notes = FakeHub(hf_cache, source, monkeypatch), Notes()
    shards = sorted(path.name for path in source.glob("model-*.safetensors"))
    size = sum((source / name).stat().st_size for name in shards)
    path = resolve("Org/Tiny@v1", Q4, notes)
    assert path.name.startswith("Org--Tiny--v1-q4-")
    fetched = sorted(str(path.relative_to(fake.folder)) for path in fake.folder.rglob("*") if path.is_symlink())
    assert fetched == ["chat_template.jinja", "config.json", *shards, "model.safetensors.index.json"]
    assert fake.calls == [("Org/Tiny", "v1"), ("Org/Tiny", COMMIT), ("Org/Tiny", COMMIT)]
    download = [step for step in notes.steps if step[0] == "download"]
    assert download[-1] == ("download", size, size, "B") and len(download) > 1 and all(step[1] < size for step in download[:-1])
    assert [step[1] for step in download] == sorted(step[1] for step in download)
    assert any(note.startswith("downloading Org/Tiny@v1: ") for note in notes.notes)
    assert not huggingface_hub.utils.are_progress_bars_disabled()  # as it was before

    again = Notes()
    assert resolve("Org/Tiny@v1", Q4, again) == path
    assert len(fake.calls) == 4 and not again.steps and not again.notes  # only the small files are checked


def test_failures_in_the_download_thread(hf_cache, tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "remote")
    FakeHub(hf_cache, source, monkeypatch)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    monkeypatch.setattr(hub, "_hub_bytes", lambda *args: 0)
    refused("Org/Tiny", Q4, "Org/Tiny: its safetensors weights are not")

    def full(*args, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    refused("Org/Tiny", Q4, "disk is full")


def test_hub_bytes(monkeypatch):
    class Api:
        def model_info(self, repo, revision, files_metadata):
            sizes = {"a.safetensors": 7, "b.safetensors": 5, "config.json": None}
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()])

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert hub._hub_bytes("a/b", COMMIT, ["b.safetensors", "config.json", "c.safetensors"]) == 5
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: 1 / 0)
    assert hub._hub_bytes("a/b", COMMIT, ["b.safetensors"]) == 0
