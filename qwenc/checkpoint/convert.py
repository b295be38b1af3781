"""A Hugging Face folder in, one packed file out: read by row chunks, quantised by a few threads, written in place."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qwenc.checkpoint.layout import FORMATS, TILE, TensorSpec, packed_tensors
from qwenc.checkpoint.packed import FORMAT, TOKENIZER, VERSION, is_packed
from qwenc.checkpoint.packed_writer import PackedWriter, show_bytes
from qwenc.checkpoint.quantise import pack_f32, pack_q4, pack_q8
from qwenc.checkpoint.safetensors_file import SafetensorsFile
from qwenc.checkpoint.shards import Shards, open_shards
from qwenc.checkpoint.source import Source, read_source, source_hash
from qwenc.checkpoint.weight_map import Gather, WeightMap
from qwenc.errors import QwencError, UsageError
from qwenc.machine.cpus import choose_cpus
from qwenc.report import SILENT, Reporter

CHUNK_WEIGHTS = 4 << 20  # weights a thread holds at once: 16 MB as float32, about three times that with its copies
MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Row tiles tile…stop of stack entry `entry` of a matrix."""

    gather: Gather
    entry: int
    tile: int
    stop: int


def convert(source_dir: str | Path, out_path: str | Path, wmode: str, reporter: Reporter = SILENT) -> Path:
    """Writes the packed file `out_path` with weights in `wmode` and returns its path. Raises QwencError.

    Everything about the checkpoint is checked before the first byte is written; `out_path` appears only when it is complete. A symbolic
    link stays, and the file that it leads to is written. UsageError for what is no regular file, or a file of the checkpoint itself.
    """
    folder, out_path = Path(source_dir), _writable(Path(out_path), Path(source_dir))
    source = read_source(folder)
    with open_shards(folder, reporter) as shards:
        weights = WeightMap(source.config, shards, reporter)
        tensors = packed_tensors(source.config, wmode)
        if source.tokenizer_json is not None:
            tensors[TOKENIZER] = TensorSpec("U8", (len(source.tokenizer_json),))
        size = sum(spec.nbytes for spec in tensors.values())
        reporter.note(f"converting {folder} to {wmode}, once: {show_bytes(size)} in {out_path}")
        with PackedWriter(out_path, tensors, _metadata(source, shards, wmode)) as writer:
            _write_small(writer, source, shards, weights)
            _write_matrices(writer, shards, weights, FORMATS[wmode], reporter)
    return out_path


def _writable(out: Path, folder: Path) -> Path:
    """The path to write: `out`, or what it leads to as a symbolic link. Raises UsageError if it must not be replaced."""
    target = Path(os.path.realpath(out)) if out.is_symlink() else out
    try:
        status = os.lstat(target)
    except OSError:  # not there yet; or not to be reached, which the writer tells
        return target
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{out}: is not a regular file, so it is not replaced")
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.exists() and path.samefile(target) and not _is_packed_file(path):
            raise UsageError(f"{out}: belongs to the checkpoint that is converted, so it is not replaced")
    return target


def _is_packed_file(path: Path) -> bool:
    try:
        with SafetensorsFile(path) as file:
            return is_packed(file.header)
    except QwencError:
        return False


def _metadata(source: Source, shards: Shards, wmode: str) -> dict[str, str]:
    described = {
        "format": FORMAT,
        "version": VERSION,
        "wmode": wmode,
        "source": os.fsencode(source.folder).decode("utf-8", "replace"),  # a file name may be any bytes
        "source_hash": source_hash(source, shards),
    }
    return described | source.metadata


def _write_small(writer: PackedWriter, source: Source, shards: Shards, weights: WeightMap) -> None:
    for name, stacked in weights.plain.items():
        writer.write(name, (), np.stack([shards.tensor(tensor) for tensor in stacked]))
    if source.tokenizer_json is not None:
        writer.write(TOKENIZER, (), np.frombuffer(source.tokenizer_json, np.uint8))


def _write_matrices(writer: PackedWriter, shards: Shards, weights: WeightMap, formats: tuple[str, ...], reporter: Reporter) -> None:
    """Chunks go to a thread pool: reading, quantising and writing all free the GIL. Progress counts bytes of output."""
    total = sum(spec.nbytes for gather in weights.gathers for fmt in formats for spec in gather.matrix.tensors(fmt).values())
    done = 0
    with ThreadPoolExecutor(choose_cpus(MAX_THREADS).threads) as pool:
        pending: list[Future[int]] = [
            pool.submit(_write_chunk, writer, shards, chunk, formats) for gather in weights.gathers for chunk in _chunks(gather)
        ]
        try:
            for future in as_completed(pending):
                done += future.result()
                reporter.progress("convert", done, total, "B")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _chunks(gather: Gather) -> Iterator[_Chunk]:
    tiles = gather.matrix.tiles
    step = max(1, CHUNK_WEIGHTS // (TILE * gather.matrix.padded_inputs))
    for entry in range(len(gather.parts)):
        for tile in range(0, tiles, step):
            yield _Chunk(gather, entry, tile, min(tile + step, tiles))


def _write_chunk(writer: PackedWriter, shards: Shards, chunk: _Chunk, formats: tuple[str, ...]) -> int:
    """Returns the bytes written."""
    matrix = chunk.gather.matrix
    rows = chunk.gather.read(shards, chunk.entry, chunk.tile, chunk.stop)
    stack = tuple(int(i) for i in np.unravel_index(chunk.entry, matrix.stack)) if matrix.stack else ()
    index = (*stack, chunk.tile)
    written = 0
    for fmt in formats:
        if fmt == "f32":
            packed = {"values": pack_f32(rows)}
        else:
            codes, scales = pack_q4(rows) if fmt == "q4" else pack_q8(rows)
            packed = {"codes": codes, "scales": scales}
        for field, values in packed.items():
            writer.write(f"{matrix.name}.{fmt}.{field}", index, values)
            written += values.nbytes
    return written
