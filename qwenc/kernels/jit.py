"""The one place for JIT options and the JIT cache.

Every kernel is compiled with the same flags: it frees the GIL, divides as NumPy does and never checks bounds. No fast-math flag is
used: they would remove NaN and infinity logic and let the target decide about contraction, so results would differ from one SIMD level
to the next.

The cache folder is named after a hash of all kernel sources, the Numba version, the SIMD level and the CPU: Numba itself looks only at
the file that a function stands in and would serve stale code after an edit of a helper elsewhere. A cache that cannot be written is read
(another user may have filled it); an entry that cannot be read is compiled again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from qwenc.errors import UsageError

try:
    import numba
    from numba.core import caching, codegen
    from numba.core.registry import cpu_target
    from numba.extending import overload
except ValueError as error:  # a NUMBA_* variable that it cannot read
    raise UsageError(f"numba does not start: {error}") from None

from qwenc.kernels.level import LEVEL, arm_features, named_features
from qwenc.machine.folders import cache_root

F = TypeVar("F", bound=Callable[..., Any])

PACKAGE = Path(__file__).resolve().parent.parent
KERNEL_ROOMS = ("kernels", "attention", "model", "checkpoint")

if arm_features() and named_features() is None:  # else LLVM ends the process at the first `sdot` for a CPU that it does not know by name
    numba.config.CPU_FEATURES = ",".join([codegen.get_host_cpu_features(), *(f"+{name}" for name in sorted(arm_features()))]).strip(",")


FLAGS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
UNCOUNTED = {**FLAGS, "_nrt": False}


def jit(function: F) -> F:
    """Compile `function` on first use, and keep the machine code in the cache."""
    dispatcher = numba.njit(**FLAGS)(function)
    if CACHE_DIR is not None:
        dispatcher._cache = _ForgivingCache(function)
    return dispatcher


# Numba counts the references to every array of a record that a function takes apart: tens of locked additions a call, more than most
# helpers do else. The arrays outlive the step anyway, so helpers do without; one that makes arrays of its own cannot.
def helper(function: F) -> F:
    """A function that is only ever called from other kernels: compiled into them, not cached by itself. It makes no arrays, and returns
    none to a kernel that counts references: that would let go of what it was never given."""
    return numba.njit(**UNCOUNTED)(function)


def inlined(function: F) -> F:
    """A helper that is always merged into its caller: what runs once per page or tile."""
    return numba.njit(forceinline=True, **UNCOUNTED)(function)


def allocating(function: F) -> F:
    """A helper that makes arrays."""
    return numba.njit(**FLAGS)(function)


def by_type(stub: Callable[..., Any], *, allocates: bool = False, inline: bool = False) -> Callable[[F], F]:
    """Decorates a function that picks, at compile time, the code for a call of `stub` by the types of its arguments."""
    return overload(stub, jit_options=(FLAGS if allocates else UNCOUNTED) | ({"forceinline": True} if inline else {}))


class _Locator(caching._CacheLocator):
    """All kernels in one folder, whose name tells their version: where the sources stand and when they were installed does not matter."""

    def __init__(self, function: Any, _file: str):
        self._line = function.__code__.co_firstlineno

    def ensure_cache_path(self) -> None:
        pass  # made when it was chosen

    def get_cache_path(self) -> str:
        return str(CACHE_DIR)

    def get_source_stamp(self) -> Any:
        return CACHE_DIR.name if CACHE_DIR else None

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, function: Any, file: str) -> Any:
        return cls(function, file)


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012 (as the base class has it)


class _ForgivingCache(caching.FunctionCache):
    """Numba's cache, except that a damaged entry or a full disk costs a compilation instead of the run."""

    _impl_class = _Implementation

    def holds(self, types: tuple) -> bool:
        """Whether the index names code for arguments of these types."""
        try:
            return self._index_key(types, cpu_target.target_context.codegen()) in self._cache_file._load_index()
        except Exception:
            return False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
        except Exception:  # a truncated pickle can raise anything; whatever it is, the cure is to compile
            found = None
        if found is None:
            _on_compile()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        with _one_writer():
            try:
                super().save_overload(sig, data)
            except Exception:  # a damaged index, a full disk, a read-only folder: start the index anew, else go without
                try:
                    self.flush()
                    super().save_overload(sig, data)
                except Exception:
                    return


@contextmanager
def _one_writer() -> Iterator[None]:
    """No other process saves meanwhile: two that save one kernel for different types at once would both take the same name for its code."""
    with ExitStack() as stack:
        with suppress(OSError):
            file = stack.enter_context((CACHE_DIR / "lock").open("a"))  # type: ignore[operator]
            fcntl.flock(file, fcntl.LOCK_EX)  # let go of when it is closed
        yield


def is_cached(kernel: Any, types: tuple) -> bool:
    """Whether a kernel need not be compiled for arguments of these Numba types."""
    return isinstance(kernel._cache, _ForgivingCache) and kernel._cache.holds(types)


_on_compile: Callable[[], None] = lambda: None  # noqa: E731


@contextmanager
def compiling(told: Callable[[], None]) -> Iterator[None]:
    """While inside, `told` is called whenever a kernel is not in the cache and has to be compiled; so is that of an outer one."""
    global _on_compile
    before = _on_compile

    def tell() -> None:
        told()
        before()

    _on_compile = tell
    try:
        if CACHE_DIR is None:
            tell()
        yield
    finally:
        _on_compile = before


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{numba.__version__} {LEVEL.name}".encode())
    for room in KERNEL_ROOMS:
        for source in sorted((PACKAGE / room).glob("*.py")):
            digest.update(source.name.encode())
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def kernels_name() -> str:
    """Names the kernels that run: what they compute may change, bit by bit, when this does."""
    return f"{LEVEL.name}-{_fingerprint()}"


def _choose_cache_dir() -> tuple[Path | None, bool]:
    """A folder in the user's NUMBA_CACHE_DIR, else in the qwenc cache, and whether it can be written; None where there is nothing to read
    either."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    base = Path(named) if named else cache_root() / "jit"
    folder = base / kernels_name()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError):
        return (folder if os.access(folder, os.R_OK | os.X_OK) else None), False
    return folder, True


try:
    CACHE_DIR, CAN_KEEP = _choose_cache_dir()
except OSError:  # the sources cannot be read (a zip install): nothing to name the folder after
    CACHE_DIR, CAN_KEEP = None, False
