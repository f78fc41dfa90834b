"""The document's tables are those that the tests make."""

from tests.conformance.table import BEYOND, KINDS, in_document, marks, tables


def test_the_document_says_what_the_tests_show() -> None:
    assert in_document() == tables(), "python -m tests.conformance.table --write"


def test_every_kind_of_behaviour_is_shown_through_every_door_or_said_to_be_beyond_it() -> None:
    shown = {(mark.values["door"], mark.values["0"]) for mark in marks() if mark.name == "behaviour"}
    doors = {door for door, _ in shown}
    assert {(door, kind) for door in doors for kind in KINDS} <= shown | set(BEYOND)
