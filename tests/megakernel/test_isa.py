"""What host and device agree on, as the kernel includes it."""

from pathlib import Path

from megakernel import isa


def test_the_kernels_header_is_what_isa_makes() -> None:
    header = Path(isa.__file__).parent / "kernel" / "isa.h"
    assert header.read_text() == isa.isa_header(), "run `python -m megakernel.isa`"


def test_a_request_has_room_for_its_words() -> None:
    assert len(isa.Request) <= isa.REQUEST_HEAD_WORDS
    assert len(isa.Control) <= isa.CONTROL_WORDS
    assert len(isa.Record) == isa.RECORD_WORDS
    assert len(isa.Partial) == isa.PARTIAL_WORDS
