"""Recorded machines (tests/data/machines): what `grep -H` prints of their files under /sys and /proc, laid out as a folder again."""

from pathlib import Path

RECORDED = Path(__file__).parent / "data" / "machines"


def machine(folder: Path, name: str) -> Path:
    """Writes the files of a recorded machine below `folder`, which then stands for /."""
    files: dict[str, list[str]] = {}
    for line in (RECORDED / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("/"):
            path, _, content = line.partition(":")
            files.setdefault(path, []).append(content)
    for path, lines in files.items():
        target = folder / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    import sys

    machine(Path(sys.argv[1]), sys.argv[2])
