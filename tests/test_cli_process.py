"""The command as a process: pipes that close, full disks, terminals, signals, start-up time. The engine is tests/fake_engine.py's."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FAKE = [sys.executable, str(ROOT / "tests" / "fake_engine.py")]
REAL = [sys.executable, str(ROOT / "cli.py")]
HOME_FREE = {
    name: value for name, value in os.environ.items() if not name.startswith(("QWENC_", "VLLM_", "NO_COLOR", "FORCE_COLOR", "PYTHONUNB"))
}


def environment(script=None, **more) -> dict:
    return {**HOME_FREE, "FAKE_ENGINE": json.dumps(script or {}), **more}


def shell(line: str, script=None, **more) -> subprocess.CompletedProcess:
    """Runs a bash line in which $Q is the command with the fake engine; pipefail shows the command's own code."""
    variables = environment(script, Q=" ".join(FAKE), **more)
    return subprocess.run(["bash", "-o", "pipefail", "-c", line], env=variables, capture_output=True, timeout=60)


LONG = {"pieces": ["word "], "repeat": 20000}


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "line",
    [
        "$Q -m M hi | head -c1",
        "$Q -m M hi | true",
        "$Q -m M --no-stream hi | head -c1",
        "$Q -m M --json hi | head -c1",
        "$Q -m M --echo hi | head -n1",
        "$Q -m M -q hi 2>&1 | head -c1",
        "$Q run -h | true",
        "$Q --help | head -n1",
        "$Q --version | true",
    ],
)
def test_a_closed_pipe_ends_quietly_with_code_0(line, unbuffered):
    done = shell(line, LONG, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 0
    for noise in (b"Traceback", b"rror", b"ignored"):
        assert noise not in done.stderr


def test_a_closed_pipe_stops_generating_at_once():
    start = time.monotonic()
    done = shell("$Q -m M hi | head -c1", {"pieces": ["x"], "repeat": 1000, "delay": 0.05})
    assert done.returncode == 0 and time.monotonic() - start < 20
    assert b"[DECODE-TIMING]" not in done.stderr


def test_an_earlier_failure_keeps_its_code_when_nobody_reads():
    assert shell("$Q -m M hi 2>&1 | true", {"load_failure": "qwenc"}).returncode == 1
    assert shell("$Q -m M hi 2>&1 | true", {"load_failure": "usage"}).returncode == 2
    assert shell("$Q -m M hi 2>&1 >/dev/null | true", {"pieces": ["a"], "delay": 0.3}).returncode == 0  # only stderr is broken


needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")


@needs_dev_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", ["-m M hi", "-m M --json hi", "-m M --no-stream hi", "run -h", "--version"])
def test_a_full_disk_is_one_line_and_exit_1(args, unbuffered):
    done = shell(f"$Q -q {args} > /dev/full" if args.startswith("-m") else f"$Q {args} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == ["qwenc: error: cannot write the output: No space left on device"]


@needs_dev_full
def test_a_full_stderr_harms_nobody():
    done = shell("$Q -m M hi 2> /dev/full")
    assert (done.returncode, done.stdout.decode()) == (0, "Hello wörld\n")


def test_closed_standard_streams():
    done = shell("$Q -m M hi >&-")
    assert done.returncode == 1 and done.stderr.decode().splitlines()[-1] == "qwenc: error: cannot write the output: stdout is closed"
    assert shell("$Q -m M hi 2>&-").stdout.decode() == "Hello wörld\n"
    done = shell("$Q -m M <&-")
    assert done.returncode == 2 and b"stdin is closed" in done.stderr
    done = shell("$Q -m M < /dev/null")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_does_not_block_arrives_whole(unbuffered):
    """A reader that is slower than us on a non-blocking pipe: every write may be refused or partial."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    variables = environment({"pieces": ["wörd "], "repeat_text": 60000}, PYTHONUNBUFFERED=unbuffered)
    with subprocess.Popen([*FAKE, "-m", "M", "-q", "hi"], env=variables, stdout=write_end) as process:
        os.close(write_end)
        time.sleep(0.5)
        with open(read_end, "rb") as reader:
            assert reader.read().decode() == "wörd " * 60000 + "\n"
    assert process.returncode == 0


def test_bytes_do_not_depend_on_the_locale():
    for locale in ("C", "POSIX"):
        done = shell("$Q -m M -q hi", {"pieces": ["é👍🏽 \ud83d"[:-1]]}, LC_ALL=locale, PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
        assert done.stdout.decode() == "é👍🏽 \n"


@pytest.mark.parametrize("args", [[], ["--json"], ["--no-stream"]])
def test_ctrl_c_keeps_the_text(args):
    variables = environment({"pieces": ["tick "], "repeat": 1000, "delay": 0.05})
    process = subprocess.Popen([*FAKE, "-m", "M", *args, "hi"], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stderr.readline()  # the note that comes with the loaded engine
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    text = json.loads(out)["text"] if args == ["--json"] else out.decode()
    assert process.returncode == 130
    assert text.startswith("tick tick ")
    assert err.decode().splitlines()[-1].endswith("[interrupt]") and b"Traceback" not in err


# -- terminals


def on_terminal(args, script=None, out_too=True, **more) -> tuple[int, str, str]:
    """Runs with stderr (and stdout) on a pseudo terminal. Returns the code, what the terminal got, what the stdout pipe got."""
    master, slave = pty.openpty()
    variables = environment(script, **{"TERM": "xterm", **more})
    out = slave if out_too else subprocess.PIPE
    process = subprocess.Popen([*FAKE, *args], env=variables, stdin=slave, stdout=out, stderr=slave)
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not piece:
            break
        shown += piece
    piped = "" if out_too else process.stdout.read().decode()
    os.close(master)
    return process.wait(20), shown.decode().replace("\r\n", "\n"), piped


def test_a_line_end_is_added_on_a_terminal_only():
    assert on_terminal(["-m", "M", "-q", "hi"])[:2] == (0, "Hello wörld\n")
    assert on_terminal(["-m", "M", "-q", "--no-stream", "hi"])[:2] == (0, "Hello wörld\n")
    assert on_terminal(["-m", "M", "-q", "hi"], {"pieces": ["a\n"]})[:2] == (0, "a\n")
    assert on_terminal(["-m", "M", "-q", "hi"], {"pieces": []})[:2] == (0, "")
    failed = on_terminal(["-m", "M", "-q", "hi"], {"failure": "qwenc", "fail_at": 1})
    assert failed[:2] == (1, "Hel\nqwenc: error: the logits of layer 3 are not finite\n")


def test_lines_on_stderr_do_not_hang_on_the_text_of_a_terminal():
    shown = on_terminal(["-m", "M", "--dec-prof", "hi"])[1]
    assert shown.count("[DEC-SINGLE]") == 4 and all(line.startswith("[DEC-SINGLE]") for line in shown.splitlines() if "SINGLE" in line)
    assert "[DEC" not in on_terminal(["-m", "M", "--dec-prof", "hi"], out_too=False)[2]


def test_a_terminal_without_a_prompt_does_not_hang():
    code, shown, _ = on_terminal(["-m", "M"])
    assert code == 2 and shown.count("\n") == 1 and "no prompt" in shown


def test_stdout_in_a_file_holds_no_escape_whatever_stderr_is():
    for more in ({}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1"}):
        code, _, piped = on_terminal(["-m", "M", "hi"], out_too=False, **more)
        assert (code, piped) == (0, "Hello wörld\n")


@pytest.mark.parametrize(
    ("args", "more", "colored"),
    [
        ([], {}, True),
        ([], {"NO_COLOR": "1"}, False),
        ([], {"TERM": "dumb"}, False),
        ([], {"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        (["--color", "never"], {"FORCE_COLOR": "1"}, False),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
        ([], {"QWENC_COLOR": "never"}, False),
    ],
)
def test_color_of_notes_on_a_terminal(args, more, colored):
    shown = on_terminal(["-m", "M", *args, "hi"], **more)[1]
    assert ("\x1b[2mqwenc: load " in shown) == colored
    assert any(line.startswith("[PREFILL-TIMING] ") for line in shown.split("\n"))  # never coloured


def test_color_in_a_file_only_when_forced():
    assert b"\x1b" not in shell("$Q -m M hi").stderr
    forced = shell("$Q -m M hi", FORCE_COLOR="1")
    assert b"\x1b[2m" in forced.stderr and b"\x1b" not in forced.stdout
    assert b"\x1b" not in shell("$Q -m M hi", FORCE_COLOR="0").stderr


def test_progress_bars_are_drawn_on_terminals_only(tmp_path):
    program = tmp_path / "bar.py"
    program.write_text(
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from qwenc.commands.progress import ScreenReporter\n"
        "reporter = ScreenReporter(quiet='-q' in sys.argv)\n"
        "for done in range(8):\n"
        "    reporter.progress('[red]convert[/red] :smile:', done * 1e6, 7e6, 'B')\n"
        "    time.sleep(0.12)\n"
        "reporter.note('done [/x]')\n"
    )

    def run(*args, **more):
        master, slave = pty.openpty()
        variables = environment(None, **{"TERM": "xterm", "COLUMNS": "80", **more})
        process = subprocess.Popen([sys.executable, str(program), *args], env=variables, stderr=slave)
        os.close(slave)
        shown = b""
        while True:
            try:
                shown += os.read(master, 65536) or b""
            except OSError:
                break
        process.wait(20)
        os.close(master)
        return shown.decode()

    bar = run()
    assert "[red]convert[/red] :smile:" in bar and "/7.0 MB" in bar and bar.rstrip().endswith("qwenc: done [/x]")
    assert run("-q") == "" and run(TERM="dumb") == "qwenc: done [/x]\r\n"
    piped = subprocess.run([sys.executable, str(program)], env=environment(), capture_output=True, timeout=20)
    assert piped.stderr == b"qwenc: done [/x]\n" and piped.stdout == b""


# -- help and completion


def test_help_imports_nothing_heavy():
    heavy = "numba numpy rich tokenizers jinja2 huggingface_hub safetensors"
    probe = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['qwenc', '--help']\n"
        "from qwenc.commands.dispatch import run_command\n"
        "code = run_command(sys.argv[1:])\n"
        f"print([name for name in {heavy!r}.split() if name in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], env=environment(), capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and "Examples:" in done.stdout and done.stderr == "[]\n"


@pytest.mark.parametrize("args", [["-h"], ["--help"], ["run", "-h"], ["info", "-h"], ["env", "-h"], ["convert", "-h"], ["-m", "M", "-h"]])
def test_help(args):
    done = subprocess.run([*REAL, *args], env=environment(), capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and done.stdout.startswith("Usage: qwenc") and done.stderr == ""
    assert "\x1b" not in done.stdout


def test_version_from_another_folder(tmp_path):
    from qwenc.version import __version__

    for args in (["--version"], ["run", "--version"], ["-q", "--version"]):
        done = subprocess.run([*REAL, *args], env=environment(), capture_output=True, text=True, timeout=20, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"qwenc {__version__}\n", "")
    variables = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-m", "qwenc", "--version"], env=variables, capture_output=True, text=True, cwd=tmp_path, timeout=20
    )
    assert done.stdout == f"qwenc {__version__}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("qwenc ", {"run", "info", "env", "convert"}),
        ("qwenc in", {"info"}),
        ("qwenc --te", {"--temp"}),
        ("qwenc -m x --top", {"--top-k", "--top-p"}),
        ("qwenc run --wm", {"--wmode"}),
        ("qwenc --wmode ", {"dual", "q4", "q8", "f32"}),
        ("qwenc convert --fo", {"--force"}),
    ],
)
def test_completion(words, expected):
    parts = words.split(" ")
    variables = environment(_QWENC_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(len(parts) - 1))
    done = subprocess.run(REAL, env=variables, capture_output=True, text=True, timeout=20)
    offered = {line.split(",", 1)[1] for line in done.stdout.splitlines()}
    assert done.returncode == 0 and expected <= offered


def test_completion_script():
    done = subprocess.run(REAL, env=environment(_QWENC_COMPLETE="zsh_source"), capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and "#compdef qwenc" in done.stdout


@pytest.mark.parametrize("instruction", ["foo", "bash", "bash_foo", "_source", "foo_source"])
def test_an_unknown_completion_instruction_is_one_line(instruction):
    done = subprocess.run(REAL, env=environment(_QWENC_COMPLETE=instruction), capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith("qwenc: error: _QWENC_COMPLETE must be bash_source, zsh_source or fish_source")


@pytest.mark.parametrize("where", ["qwenc", "qwenc.commands.main", "click", "qwenc.commands.dispatch", "qwenc.commands.run", "json"])
@pytest.mark.parametrize("entry", ["cli.py", "-m", "script"])
def test_ctrl_c_while_the_program_starts_is_silent(entry, where):
    """The import of `where` is interrupted."""
    if entry != "cli.py" and where in ("qwenc", "qwenc.commands.main"):
        pytest.skip("Python imports it by itself")
    start = {
        "cli.py": f"import runpy; runpy.run_path({str(ROOT / 'cli.py')!r}, run_name='__main__')",
        "-m": "import runpy; runpy.run_module('qwenc', run_name='__main__', alter_sys=True)",
        "script": "from qwenc.commands.main import main; main()",
    }[entry]
    program = f"""
import sys
class Interrupt:
    def find_spec(name, path=None, target=None):
        if name == {where!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt)
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ["qwenc", "--help"]
assert {where!r} not in sys.modules
{"" if entry == "cli.py" else "import runpy"}
{start}
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_main_imports_next_to_nothing_before_it_looks_after_ctrl_c():
    probe = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import qwenc; before = set(sys.modules)\n"
        "import qwenc.commands.main; print(sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], env=environment(), capture_output=True, text=True, timeout=20)
    assert done.stdout == "['qwenc.commands', 'qwenc.commands.main']\n"
