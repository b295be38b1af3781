"""What the documents say is so: options, commands, versions, paths."""

import re
import subprocess
from pathlib import Path

import pytest

from qwenc.commands.dispatch import cli
from qwenc.version import __version__

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "README.zh-CN.md")
TEXT_SUFFIXES = {"", ".py", ".md", ".cfg", ".toml", ".sh", ".json", ".txt", ".jinja"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def shell_blocks(text: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)


def long_options(command: str) -> set[str]:
    found: set[str] = set()
    for parameter in cli.commands[command].params:
        found |= {name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--")}
    return found


def tree() -> list[Path]:
    """Every text file that is ours: tracked ones where there is git, else all outside ignored folders."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        skip = ("build", "models")
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(
                part in skip or part.endswith(".egg-info") or (part.startswith(".") and part != ".ci")
                for part in path.relative_to(ROOT).parts
            )
        ]
    return [path for path in paths if path.is_file() and path.suffix in TEXT_SUFFIXES]


def test_readme_names_every_option_of_run():
    text = read("README.md")
    missing = {name for name in long_options("run") - {"--help", "--version"} if not re.search(rf"{name}(?![\w-])", text)}
    assert missing == set()


@pytest.mark.parametrize("name", READMES)
def test_readme_names_no_option_that_does_not_exist(name):
    known = set().union(*(long_options(command) for command in cli.commands))
    for line in read(name).splitlines():
        if "qwenc" in line or line.startswith("| "):
            assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", line)) <= known | {"--no-think", "--no-pin"}, line


@pytest.mark.parametrize("name", READMES)
def test_the_commands_in_the_readme_exist(name):
    text = read(name)
    used = set(re.findall(r"^\$ qwenc ([a-z]+)", text, re.M))
    assert used <= set(cli.commands)
    for script in re.findall(r"\b((?:scripts|docs)/[\w.]+)", text):
        assert (ROOT / script).is_file(), script


def test_both_readmes_give_the_same_two_commands():
    english, chinese = (shell_blocks(read(name)) for name in READMES)
    assert len(english) == 2
    assert english == chinese
    assert all(block.count("\n") == 1 for block in english), "one line each"


def test_settings_file_has_the_extras_that_the_readme_installs():
    setup = read("setup.cfg")
    for extra in re.findall(r"pip install (?:-e )?'\.\[(\w+)\]'", read("README.md")):
        assert re.search(rf"^{extra} =$", setup, re.M), extra


def test_changelog_has_this_version():
    assert re.search(rf"^## \[{re.escape(__version__)}\]", read("CHANGELOG.md"), re.M)


def test_no_file_holds_a_path_of_one_machine():
    pattern = re.compile("/" + r"(?:work/(?:main|shared)|opt/q)\b")
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8", errors="replace") for path in tree()}
    assert [(name, match) for name, text in texts.items() for match in pattern.findall(text)] == []


def test_no_kernel_uses_fast_math():
    """Its flags remove NaN and infinity logic."""
    pattern = re.compile("fast" + r"math\s*=")
    assert [path.name for path in tree() if path.suffix == ".py" and pattern.search(path.read_text(encoding="utf-8"))] == []
