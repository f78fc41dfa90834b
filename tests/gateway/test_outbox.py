"""Messages for a slow reader: none is waited for, none is lost, all come in order."""

from multiprocessing import Pipe

from gateway.outbox import MAX_WAITING, Outbox

MESSAGES = [bytes([index % 251]) * 1_000 for index in range(2_000)]


def test_nothing_waits_for_a_reader_that_does_not_read_and_all_comes_in_order_once_it_does() -> None:
    ours, theirs = Pipe()
    outbox = Outbox(ours)
    for message in MESSAGES:  # two megabytes, of which no pipe holds a half
        outbox.put(message)
    assert outbox.is_waiting
    heard = []
    while theirs.poll(0):
        heard.append(theirs.recv_bytes())
        outbox.flush()
    assert heard == MESSAGES
    assert not outbox.is_waiting


def test_of_too_many_that_wait_the_oldest_are_lost() -> None:
    ours, theirs = Pipe()
    outbox = Outbox(ours)
    n_all = MAX_WAITING + 2_000
    for number in range(n_all):
        outbox.put(number.to_bytes(4, "big") * 100)
    heard = []
    while theirs.poll(0):
        heard.append(int.from_bytes(theirs.recv_bytes()[:4], "big"))
        outbox.flush()
    assert heard == sorted(heard)
    assert heard[-MAX_WAITING:] == list(range(n_all - MAX_WAITING, n_all))
    assert len(heard) < n_all


def test_a_reader_that_is_gone_gets_nothing_more_and_hurts_nobody() -> None:
    ours, theirs = Pipe()
    outbox = Outbox(ours)
    theirs.close()
    outbox.put(b"for nobody")
    assert not outbox.is_waiting
