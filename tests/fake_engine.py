"""An engine that plays a script instead of running a model, for tests of the command: pieces of text, failures, slowness.

`python tests/fake_engine.py ARGS…` is the real command with this engine in place; the script is JSON in FAKE_ENGINE.
"""

import json
import os
import signal
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qwenc.errors import QwencError, UsageError
from qwenc.settings import Settings
from qwenc.timing import DecodeTiming, PrefillTiming, Timings, TokenTiming

calls = []  # (name, arguments) of everything the command asked for


def asked(name: str) -> dict:
    """The last call of the engine's `name`."""
    return next(arguments for called, arguments in reversed(calls) if called == name)


def started() -> list:
    """The arguments of all starts of the engine."""
    return [arguments for called, arguments in calls if called == "start"]


@dataclass
class Step:
    id: int | None = None
    text: str = ""
    logprob: float | None = None
    finish_reason: str | None = None
    timings: Timings | None = None
    usage: tuple[int, int] | None = None
    token_timing: TokenTiming | None = None


FAILURES = {
    "qwenc": lambda: QwencError("the logits of layer 3 are not finite"),
    "usage": lambda: UsageError("the prompt has 12 tokens, the context 8"),
    "memory": lambda: MemoryError("cannot hold 99 GB"),
    "zero": lambda: ZeroDivisionError("[/x] division"),
    "os": lambda: OSError(5, "Input/output error", "model[red].qwenc"),
    "interrupt": KeyboardInterrupt,
    "pipe": lambda: BrokenPipeError(32, "Broken pipe"),
}


class FakeEngine:
    def __init__(self, model, reporter, script, settings):
        self.script, self.settings = script, Settings.from_dict(settings)
        self.context_size, self.threads, self.cores = 4096, 2, [0, 1]
        self.eos_ids, self.has_chat_template = frozenset([5, 3]), script.get("chat", True)
        reporter.note(f"loaded [bold]{model}[/bold] :smile:")
        reporter.detail("a detail")
        for done in range(3):
            reporter.progress("compile", done, 2)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        calls.append(("close", None))

    def held_text(self):
        return self.script.get("held", "")

    def encode_prompt(self, text, raw=False, system=None, think=None, chat_template_kwargs=None):
        asked = {"text": text, "raw": raw, "system": system, "think": think, "chat_template_kwargs": chat_template_kwargs}
        calls.append(("encode_prompt", asked))
        return list(range(max(1, len(text))))

    def encode_messages(self, messages, think=None, chat_template_kwargs=None):
        calls.append(("encode_messages", {"messages": messages, "think": think, "chat_template_kwargs": chat_template_kwargs}))
        if not all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages):
            raise UsageError("message 1 must be an object with a role and a content")
        return [ord(char) for message in messages for char in message["content"]]

    def identity(self):
        return {"model": self.script.get("model", "fake"), **self.settings.deciding()}

    def lanes(self, count):
        calls.append(("lanes", count))
        return FakeLanes(self, count)

    def generate(self, prompt, **settings):
        calls.append(("generate", settings))
        self.timings = Timings(0.5, 0.0, PrefillTiming(len(prompt), 100.0, 10, 10, 20, 10, 30), DecodeTiming())
        pieces = self.script.get("pieces", ["Hel", "", "lo", " wörld"])[: settings["max_tokens"]] * self.script.get("repeat", 1)
        pieces = [piece * self.script.get("repeat_text", 1) for piece in pieces]
        for place, piece in enumerate(pieces):
            time.sleep(self.script.get("delay", 0))
            if place == self.script.get("fail_at", -1):
                raise FAILURES[self.script["failure"]]()
            timing = TokenTiming(len(prompt) + place + 1, {"qkv": 1.0}, 2.0) if settings["dec_prof"] else None
            yield Step(100 + place, piece, -0.5, token_timing=timing)
            self.timings.decode = DecodeTiming(place + 1, 50.0 * (place + 1), 40.0 * (place + 1), 5.0 * (place + 1))
        yield Step(None, self.script.get("rest", ""), None, "length", self.timings, (len(prompt), len(pieces)))


class FakeLanes:
    """Answers a prompt with "<prompt>", one character a step. A prompt that holds FAIL fails after two of them, BAD at once; EXIT kills
    the process (as kill -9 does)."""

    def __init__(self, engine, count):
        self.script, self.count, self.work = engine.script, count or 1, {}

    def fits(self, tokens):
        return tokens <= self.script.get("room", 1 << 40) or not self.work

    @property
    def free(self):
        return self.count - len(self.work)

    @property
    def working(self):
        return len(self.work)

    def start(self, key, prompt, **arguments):
        text = key.item.prompt[1] if isinstance(key.item.prompt[1], str) else "".join(map(chr, prompt))
        calls.append(("start", {"text": text, **arguments}))
        if "BAD" in text:
            raise UsageError("the prompt has 12 tokens, the context 8")
        if "MEMORY" in text:
            raise MemoryError
        timings = Timings(0.0, 0.0, PrefillTiming(len(prompt), 10.0, 1, 1, 2, 1, 3), DecodeTiming())
        self.work[id(key)] = [key, f"<{text}>"[: arguments["max_tokens"]], 0, timings, len(prompt)]
        return self.advance(id(key))

    def step(self):
        return [(self.work[at][0], self.advance(at)) for at in list(self.work)]

    def advance(self, at):
        _key, answer, place, timings, prompt = self.work[at]
        time.sleep(self.script.get("delay", 0))
        if "EXIT" in answer and place == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if "FAIL" in answer and place == 2:
            del self.work[at]
            return QwencError("the model's logits are not finite")
        self.work[at][2] += 1
        if place:
            timings.decode.n += 1
            timings.decode.total_ms += 5.0
        if place + 1 < len(answer):
            return Step(65, answer[place])
        del self.work[at]
        return Step(65, answer[place : place + 1], None, "length", timings, (prompt, len(answer)))


def load(model, *, reporter, **settings):
    calls.append(("load", {"model": model, **settings}))
    script = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
    if "load_failure" in script:
        raise FAILURES[script["load_failure"]]()
    return FakeEngine(model, reporter, script, settings)


def install(monkeypatch=None, load=load):
    module = types.ModuleType("qwenc.engine")
    module.load = load
    calls.clear()
    import qwenc

    if monkeypatch is None:
        sys.modules["qwenc.engine"] = module
        qwenc.engine = module
    else:
        monkeypatch.setitem(sys.modules, "qwenc.engine", module)
        monkeypatch.setattr(qwenc, "engine", module, raising=False)


if __name__ == "__main__":
    install()
    from qwenc.commands.main import main

    main()
