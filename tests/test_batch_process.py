"""`qwenc batch` as a process: signals, kill -9, full disks, closed pipes, two at a time. The engine is tests/fake_engine.py's."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli_process import FAKE, environment, needs_dev_full, shell

ITEMS = "".join(json.dumps({"id": n, "prompt": f"p{n}"}) + "\n" for n in range(20))
SLOW = {"delay": 0.02}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").write_text(ITEMS)
    return tmp_path


def start(folder, *args, script=None, **more):
    command = [*FAKE, "batch", "-m", "M", *args]
    return subprocess.Popen(command, cwd=folder, env=environment(script), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


def records(path):
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_results(path, count=1):
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= count


def resume(folder, *args):
    done = start(folder, "in", "-o", "out", "--resume", *args)
    assert done.wait(30) == 0
    found = records(folder / "out")
    assert [(record["id"], record["text"]) for record in found] == [(n, f"<p{n}>") for n in range(20)]


def test_a_signal_before_the_first_token_ends_at_once(folder):
    process = start(folder, "in", "-o", "out", script={"delay": 25})  # as if the kernels were compiling
    wait_for((folder / "out.settings.json").exists)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130 and records(folder / "out") == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("parallel", ["1", "3"])
def test_a_signal_finishes_the_items_at_work(folder, number, code, parallel):
    process = start(folder, "in", "-o", "out", "--parallel", parallel, script=SLOW)
    wait_for(has_results(folder / "out"))
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code and b"finishing the items at work" in err and b"Traceback" not in err
    found = records(folder / "out")
    assert 1 <= len(found) < 20 and [record["text"] for record in found] == [f"<p{n}>" for n in range(len(found))]
    resume(folder, "--parallel", parallel)


def test_a_second_signal_stops_at_once(folder):
    process = start(folder, "in", "-o", "out", script={"delay": 0.5})
    wait_for(lambda: (folder / "out").exists())
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in err and records(folder / "out") == []
    resume(folder)


def test_a_signal_with_nothing_at_work_ends_at_once(folder):
    process = start(folder, "-", "-o", "out", stdin=subprocess.PIPE)
    process.stdin.write(b'{"id": 0, "prompt": "p0"}\n')
    process.stdin.flush()
    wait_for(has_results(folder / "out"))  # answered while the input is still open
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143 and [record["text"] for record in records(folder / "out")] == ["<p0>"]


@pytest.mark.parametrize("parallel", ["1", "4"])
def test_kill_9_loses_only_the_items_at_work(folder, parallel):
    process = start(folder, "in", "-o", "out", "--parallel", parallel, script=SLOW)
    wait_for(has_results(folder / "out", 3))
    process.kill()
    process.wait(30)
    assert len(records(folder / "out")) >= 3
    resume(folder, "--parallel", parallel)


def test_kill_9_at_any_moment(folder):
    """An item that kills the process, over and over, with ever fewer of them left."""
    for last in range(0, 20, 5):
        items = [{"id": n, "prompt": f"p{n}" if n != last else "EXIT"} for n in range(20)]
        (folder / "bad").write_text("".join(json.dumps(item) + "\n" for item in items))
        assert start(folder, "bad", "-o", "out", "--resume").wait(30) == -signal.SIGKILL
        assert [record["id"] for record in records(folder / "out")] == list(range(last))
    resume(folder)


def test_two_runs_do_not_write_one_file(folder):
    process = start(folder, "in", "-o", "out", script=SLOW)
    wait_for(has_results(folder / "out"))
    second = start(folder, "in", "-o", "out", "--resume")
    _, err = second.communicate(timeout=30)
    assert second.returncode == 1 and b"being written by another run" in err
    assert process.wait(30) == 0 and len(records(folder / "out")) == 20


@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="needs RLIMIT_FSIZE to fail with an error")
def test_a_full_disk_leaves_whole_records(folder):
    """A file size limit fails as a full disk does, in the middle of a record."""
    done = shell(f"cd {folder}; trap '' XFSZ; ulimit -f 1; $Q batch in -m M -o out; echo code $?")
    assert b"code 1" in done.stdout and done.stderr.decode().splitlines()[-1].startswith("qwenc: error: cannot write ")
    assert 1 <= len(records(folder / "out")) < 20
    resume(folder)


@needs_dev_full
@pytest.mark.parametrize("out", ["-o /dev/full", "> /dev/full"])
def test_a_full_device(folder, out):
    done = shell(f"cd {folder}; $Q batch in -m M -q {out}")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and b"No space left" in done.stderr


def test_pipes(folder):
    done = shell(f"cd {folder}; $Q batch in -m M -q | head -n1")
    assert done.returncode == 0 and json.loads(done.stdout)["text"] == "<p0>" and done.stderr == b""
    done = shell("printf 'a\\r\\nb' | $Q batch --format lines -m M -q --parallel 4")
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["<a>", "<b>"]
    assert shell(f"cd {folder}; $Q batch < in -m M -q -o /dev/stdout | wc -l").stdout.strip() == b"20"
    done = shell("$Q batch -m M <&-")
    assert done.returncode == 2 and b"stdin is closed" in done.stderr
    done = shell(f"cd {folder}; $Q batch - -m M < in >> in")
    assert done.returncode == 2 and b"one file" in done.stderr and (folder / "in").read_text() == ITEMS


def test_a_slow_writer_keeps_nobody_waiting(folder):
    """While a pipe has no further line, what is at work goes on and comes out."""
    process = start(folder, "-", "--parallel", "4", stdin=subprocess.PIPE)
    for n in range(3):
        process.stdin.write(f'{{"prompt": "{n}"}}\n'.encode())
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["text"] == f"<{n}>"
    process.stdin.close()
    assert process.wait(30) == 0


def test_the_input_may_grow_while_it_is_read(folder):
    process = start(folder, "in", "-o", "out", script=SLOW)
    wait_for(has_results(folder / "out"))
    with open(folder / "in", "a") as file:
        file.write('{"id": "late", "prompt": "late"}\n')
    assert process.wait(60) == 0 and len(records(folder / "out")) == 20
    assert start(folder, "in", "-o", "out", "--resume").wait(30) == 0
    assert [record["text"] for record in records(folder / "out")][19:] == ["<p19>", "<late>"]


def test_a_bar_on_a_terminal_only(folder):
    main, end = pty.openpty()
    process = subprocess.Popen(
        [*FAKE, "batch", "in", "-m", "M", "-o", "out"], cwd=folder, env=environment(SLOW, TERM="xterm", COLUMNS="100"), stderr=end
    )
    os.close(end)
    seen = b""
    try:
        while chunk := os.read(main, 65536):
            seen += chunk
    except OSError:
        pass
    assert process.wait(30) == 0 and b"/20" in seen and b"tok/s" in seen and b"items" in seen
    done = start(folder, "in", "-o", "two")
    _, err = done.communicate(timeout=30)
    assert b"\x1b" not in err and b"/20" not in err


def test_start_up_needs_no_numba(folder):
    code = "import sys; import qwenc.commands.batch; print('numba' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, timeout=60)
    assert done.stdout.split() == [b"False", b"False"]
