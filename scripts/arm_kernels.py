#!/usr/bin/env python3
"""Run the kernels of scripts/kernel_asm.py as an Arm CPU and here, on the same numbers, and compare what they write, to the bit.

    python scripts/arm_kernels.py build FOLDER --cpu cortex-a76     compile here, for that CPU: FOLDER/NAME.o, and arguments
    python scripts/arm_kernels.py run FOLDER                        in an emulated Python with NumPy: NAME.so on the arguments
    QWENC_SIMD=plain python scripts/arm_kernels.py compare FOLDER   run them here, and compare

Compiling under emulation takes minutes, this a second. `scripts/arm_check.sh` does all three, and links NAME.so in between. Plain
code takes its numbers in the form in which Arm has them: matrix tiles of 4 tokens, and two bytes for a number of 15 bits.
"""

from __future__ import annotations

import argparse
import ctypes
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "run", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cpu", default="cortex-a76")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.what == "build":
        build(args.folder, args.cpu)
    elif args.what == "run":
        run(args.folder)
    else:
        return compare(args.folder)
    return 0


def build(folder: Path, cpu: str) -> None:
    import kernel_asm
    import llvmlite.binding as llvm

    kernel_asm.target_arm(cpu)
    from numba import typeof

    machine = llvm.Target.from_triple(kernel_asm.ARM_TRIPLE)
    features = kernel_asm.ARM_FEATURES[cpu]

    def target() -> Any:
        return machine.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel="default")

    for name, kernel in kernel_asm.kernels().items():
        arguments = kernel.arguments()
        signature = tuple(typeof(argument) for argument in arguments)
        kernel.function.compile(signature)
        module = llvm.parse_assembly(kernel.function.inspect_llvm(signature))
        code = target().emit_object(module)
        (folder / f"{name}.o").write_bytes(code)
        stubs = llvm.parse_assembly(empty_symbols(module, kernel_asm.ARM_TRIPLE))
        (folder / f"{name}.stubs.o").write_bytes(target().emit_object(stubs))
        symbol = kernel.function.overloads[signature].fndesc.llvm_func_name
        save(folder / f"{name}.args", (symbol, list(flat(arguments))))


def empty_symbols(module: Any, triple: str) -> str:
    """LLVM code of whatever a module wants of Python and Numba, empty: its kernel counts no references and calls none of it."""
    functions = [f.name for f in module.functions if f.is_declaration and not f.name.startswith(("llvm.", "mem"))]
    variables = [v.name for v in module.global_variables if v.is_declaration]
    lines = [f'target triple = "{triple}"', *(f'define void @"{name}"() {{ ret void }}' for name in functions)]
    return "\n".join([*lines, *(f'@"{name}" = global i64 0' for name in variables)])


def run(folder: Path) -> None:
    """Numba's calling convention: where the result and an exception go, then each argument, an array as seven and more words."""
    for path in sorted(folder.glob("*.args")):
        symbol, arguments = load(path)
        function = getattr(ctypes.CDLL(str(path.with_suffix(".so"))), symbol)
        result, error = ctypes.c_int64(0), ctypes.c_int64(0)
        words: list[Any] = [ctypes.byref(result), ctypes.byref(error)]
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                fields = (0, 0, argument.size, argument.itemsize, argument.ctypes.data, *argument.shape, *argument.strides)
                words += [ctypes.c_int64(field) for field in fields]
            else:
                words.append(ctypes.c_int64(argument))
        if function(*words):
            raise SystemExit(f"{path.stem} failed")
        save(path.with_suffix(".arm"), arguments)


def compare(folder: Path) -> int:
    """Prints a line per kernel. Returns 1 if one differs, or writes nothing."""
    import kernel_asm

    bad = 0
    for name, kernel in kernel_asm.kernels().items():
        before = load(folder / f"{name}.args")[1]
        here = load(folder / f"{name}.args")[1]
        there = load(folder / f"{name}.arm")
        kernel.function(*refilled(kernel.arguments(), iter(here)))
        written = [i for i, (old, new) in enumerate(zip(before, here, strict=True)) if differ(old, new)]
        other = [i for i, (new, arm) in enumerate(zip(here, there, strict=True)) if differ(new, arm)]
        verdict = "DIFFERS" if other else "the same bits" if written else "writes NOTHING"
        bad += bool(other) or not written
        print(f"{name}: {verdict}")
    return 1 if bad else 0


def differ(a: Any, b: Any) -> bool:
    return isinstance(a, np.ndarray) and a.tobytes() != b.tobytes()


def flat(value: Any) -> Iterator[Any]:
    """The arrays and numbers of nested tuples."""
    if isinstance(value, tuple):
        for item in value:
            yield from flat(item)
    else:
        yield value


def refilled(value: Any, leaves: Iterator[Any]) -> Any:
    """The same nested tuples around other arrays and numbers."""
    if isinstance(value, tuple):
        items = [refilled(item, leaves) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return next(leaves)


def save(path: Path, value: Any) -> None:
    path.write_bytes(pickle.dumps(value))


def load(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
