"""Restoring a prompt against computing it: `python scripts/measure_prompt_cache.py MODEL [--tokens 8192] [--kv q8]`.

Random tokens; the prompt less its last token is saved, restored (the file is then in the page cache of the system) and compared with what
prefill made: the logits after the last token must be the same bits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import qwenc
from qwenc.kv_store.saved import SavedFile, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kv", default="q8")
    chosen = parser.parse_args()
    with qwenc.load(chosen.model, kv=chosen.kv) as engine, tempfile.TemporaryDirectory() as folder:
        ids = np.random.default_rng(0).integers(0, engine.config.vocab_size, chosen.tokens).tolist()
        session = engine.session(chosen.tokens)
        session.compile()
        began = time.perf_counter()
        session.prefill(ids[:-1])
        computed = time.perf_counter() - began
        path = Path(folder) / "prompt.qwenc-kv"
        began = time.perf_counter()
        size = save(path, session.ids, session.cache, {})
        saved = time.perf_counter() - began
        wanted = session.prefill(ids[-1:]).copy()
        times = []
        for _ in range(5):
            restored = engine.session(chosen.tokens)
            began = time.perf_counter()
            with SavedFile(path) as file:
                restored.restore(file)
            times.append(time.perf_counter() - began)
            if not np.array_equal(restored.prefill(ids[-1:]), wanted):
                raise SystemExit("the restored prompt gives other logits")
    restore = float(np.median(times))
    print(f"{chosen.tokens} tokens, {size / 1e6:.0f} MB: prefill {computed:.2f} s, save {saved:.2f} s, restore {restore:.3f} s", end="")
    print(f" ({computed / restore:.0f} x faster)")


if __name__ == "__main__":
    main()
