"""The tables of docs/clients.md, made from the marks on the tests: which client does what through which door.

    python -m tests.conformance.table         # prints them
    python -m tests.conformance.table --write # puts them into the document

A test says with ``@pytest.mark.proves(client=..., door=..., feature=...)`` what a client's users can rely on, and with
``@pytest.mark.behaviour(kind, door=...)`` which kind of behaviour it shows through a door.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCUMENT = REPOSITORY / "docs" / "clients.md"
REQUIREMENTS = Path(__file__).parent / "requirements"
BEGIN, END = "<!-- made by tests/conformance/table.py -->", "<!-- end -->"
KINDS = {
    "C": "last words before a flush, an end or a cut are heard",
    "I": "text is cut between words only, in every script",
    "J": "any packets, rates and encodings; odd input",
    "K": "settings change without losing audio; sessions and keys stay apart; resuming",
}
# What a protocol has no words for, by door and kind; beside the tests that show the rest of the kind.
BEYOND = {
    ("deepgram", "K"): "no resuming",
    ("deepgram_file", "C"): "no flush: a request is whole",
    ("deepgram_file", "K"): "no settings that change, no resuming",
    ("deepgram_turns", "K"): "no resuming",
    ("openai_realtime", "K"): "no resuming",
    ("telephony", "K"): "no settings that change, no resuming",
    ("openai_rest", "C"): "no flush: a request is whole",
    ("openai_rest", "K"): "no settings that change, no resuming",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """One decorator: its name and its literal arguments."""

    name: str
    values: dict[str, str]


def marks() -> Iterator[Mark]:
    """Every ``proves`` and ``behaviour`` on a test, in the order of the files."""
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield from filter(None, map(_mark, node.decorator_list))


def _mark(node: ast.expr) -> Mark | None:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="mark"), attr="proves" | "behaviour" as name)):
            given = {f"{index}": ast.literal_eval(value) for index, value in enumerate(node.args)}
            named = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in node.keywords}
            return Mark(name, given | named)
    return None


def clients_table() -> str:
    """Client and version, door, and what is proved of them."""
    found: dict[tuple[str, str], list[str]] = {}
    for mark in marks():
        if mark.name == "proves":
            place = (mark.values["client"], mark.values["door"])
            features = found.setdefault(place, [])
            if mark.values["feature"] not in features:
                features.append(mark.values["feature"])
    rows = [
        f"| `{client}` {version_of(client)} | {door} | {'; '.join(features)} |"
        for (client, door), features in sorted(found.items())
    ]
    return "\n".join(["| client | door | shown by a test with the unmodified client |", "|---|---|---|", *rows])


def version_of(client: str) -> str:
    """The version that the tests run with, from the first requirements that name it."""
    for path in sorted(REQUIREMENTS.glob("*.txt")):
        if found := re.search(rf"^{re.escape(client)}(?:\[.*?\])?==(\S+)", path.read_text(), re.MULTILINE):
            return found[1]
    raise ValueError(f"no requirements name {client}")


def behaviours_table() -> str:
    """How many tests show each kind of behaviour through each door, and what its protocol can't express."""
    counts: dict[tuple[str, str], int] = {}
    for mark in marks():
        if mark.name == "behaviour":
            place = (mark.values["door"], mark.values["0"])
            counts[place] = counts.get(place, 0) + 1
    doors = sorted({door for door, _ in counts})
    head = ["| door | " + " | ".join(f"{kind}: {text}" for kind, text in KINDS.items()) + " |", "|---" * 5 + "|"]
    rows = [f"| `{door}` | " + " | ".join(_cell(counts, door, kind) for kind in KINDS) + " |" for door in doors]
    return "\n".join([*head, *rows])


def _cell(counts: dict[tuple[str, str], int], door: str, kind: str) -> str:
    n_tests = counts.get((door, kind), 0)
    shown = f"{n_tests} test{'s' if n_tests > 1 else ''}" if n_tests else ""
    return "; ".join(part for part in (shown, BEYOND.get((door, kind), "")) if part)


def tables() -> str:
    """Both, as they stand in the document."""
    return f"{BEGIN}\n{clients_table()}\n\n{behaviours_table()}\n{END}"


def in_document() -> str:
    """What stands in the document now."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def main() -> None:
    """Print, or write."""
    if "--write" in sys.argv:
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(text.replace(in_document(), tables()), encoding="utf-8")
    else:
        sys.stdout.write(tables() + "\n")


if __name__ == "__main__":
    main()
