"""Files of `qwenc batch`: items to write, records to read."""

import json

SIDECAR = ".settings.json"
ITEMS = [{"id": f"i{n}", "prompt": f"p{n}"} for n in range(5)]


def write(path, *items):
    """Items as JSON lines; bytes go in as they are."""
    data = [item if isinstance(item, bytes) else json.dumps(item).encode() + b"\n" for item in items]
    with open(path, "wb") as file:
        file.write(b"".join(data))
    return path


def records(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def content(path):
    with open(path, "rb") as file:
        return file.read()


def answers(found):
    """id -> text, or error."""
    return {record["id"]: record.get("text", record.get("error")) for record in found}
