"""Sparse attention and small KV caches through the whole engine, on a tiny checkpoint."""

import numpy as np
import pytest

import qwenc
from tiny_model import *  # noqa: F403
