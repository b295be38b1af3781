"""A name for what is in a packed file, which its copies share and another training of the same shape does not."""

from __future__ import annotations

import hashlib

import numpy as np

from qwenc.checkpoint.packed import Packed

WHOLE_BELOW = 1 << 20  # bytes: a smaller tensor is read whole
SAMPLE = 4096  # bytes
EVERY = 1 << 20  # one sample from each of these many bytes of a larger one, so from every layer


def fingerprint(packed: Packed) -> str:
    """32 hex digits. Small tensors and the metadata count to the byte, large ones by samples: reading them all would take as long as a
    prompt."""
    digest = hashlib.blake2b(digest_size=16)
    for key, text in sorted(packed.metadata.items()):
        if not key.startswith("source"):  # where it came from
            digest.update(f"{key}={len(text)}:{text}".encode("utf-8", "replace"))
    for name, tensor in sorted(packed.tensors.items()):
        digest.update(f"{name} {tensor.dtype.str} {tensor.shape}".encode())
        data = np.frombuffer(tensor, np.uint8) if tensor.size else np.zeros(0, np.uint8)
        if data.size < WHOLE_BELOW:
            digest.update(data.data)
            continue
        for part in np.array_split(np.arange(data.size // SAMPLE), -(-data.size // EVERY)):
            first = int(part[len(part) // 2]) * SAMPLE
            digest.update(data[first : first + SAMPLE].data)
    return digest.hexdigest()
