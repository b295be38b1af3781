"""Sparse attention and small KV caches through the whole engine, on a tiny checkpoint."""

from tiny_model import *  # noqa: F403
