"""Races are found from what SMs have heard, even where the order of the day happened to be right."""

import numpy as np
import pytest

from megakernel.errors import OutOfBoundsError, RaceError, UninitialisedError
from megakernel.exchange import Exchange, Wait

A, B, C = 0, 1, 2


def words(*indices):
    return np.array(indices, np.int64)


def publish(exchange, sm, word, epoch, value=7):
    exchange.publish(sm, words(word), np.array([value], np.uint32), epoch, f"SM {sm}")


def take(exchange, sm, word, epoch):
    wait = Wait(words(word), epoch, f"SM {sm}")
    assert exchange.is_ready(wait)
    return exchange.take(sm, wait).tolist()


@pytest.fixture
def exchange():
    return Exchange(4, 3)


def test_a_word_is_ready_once_it_carries_the_epoch(exchange):
    wait = Wait(words(0, 1), 5, "SM 0")
    publish(exchange, B, 0, 5)
    assert not exchange.is_ready(wait)
    assert exchange.missing(wait) == 1
    publish(exchange, B, 1, 5, value=9)
    assert exchange.is_ready(wait)
    assert exchange.take(A, wait).tolist() == [7, 9]


def test_a_word_overwritten_before_it_was_read_is_a_race(exchange):
    publish(exchange, B, 0, 5)
    publish(exchange, B, 0, 6)
    with pytest.raises(RaceError, match="SM 0: word 0 carries epoch 6 before its epoch 5 was read"):
        exchange.is_ready(Wait(words(0), 5, "SM 0"))


def test_a_word_overwritten_without_word_of_its_reader_is_a_race(exchange):
    publish(exchange, B, 0, 5)
    take(exchange, A, 0, 5)
    with pytest.raises(RaceError, match="SM 1: writes word 0 without having heard that SM 0 read it"):
        publish(exchange, B, 0, 6)


def test_hearing_through_a_third_is_enough(exchange):
    publish(exchange, B, 0, 5)
    take(exchange, A, 0, 5)
    publish(exchange, A, 1, 5)
    take(exchange, C, 1, 5)
    publish(exchange, C, 2, 5)
    take(exchange, B, 2, 5)
    publish(exchange, B, 0, 6)
    assert take(exchange, A, 0, 6) == [7]


def test_what_was_said_before_the_read_does_not_count(exchange):
    publish(exchange, A, 1, 5)
    publish(exchange, B, 0, 5)
    take(exchange, A, 0, 5)
    take(exchange, B, 1, 5)
    with pytest.raises(RaceError, match="without having heard"):
        publish(exchange, B, 0, 6)


def test_an_own_word_may_be_written_again_if_nobody_else_read_it(exchange):
    publish(exchange, B, 0, 5)
    take(exchange, B, 0, 5)
    publish(exchange, B, 0, 6)


def test_two_writes_of_one_epoch_are_a_race(exchange):
    publish(exchange, B, 0, 5)
    with pytest.raises(RaceError, match="writes a word twice in epoch 5"):
        publish(exchange, C, 0, 5)


def test_epochs_go_on_past_the_largest_number(exchange):
    publish(exchange, B, 0, 0xFFFFFFFF)
    take(exchange, B, 0, 0xFFFFFFFF)
    publish(exchange, B, 0, 1)
    with pytest.raises(RaceError, match="carries epoch 1 before its epoch 4294967295"):
        exchange.is_ready(Wait(words(0), 0xFFFFFFFF, "SM 0"))


def test_a_word_that_was_never_written_is_not_ready_by_chance(exchange):
    with pytest.raises(UninitialisedError, match="SM 0: reads words that nobody has written"):
        exchange.is_ready(Wait(words(3), 0, "SM 0"))


def test_words_past_the_end_are_refused(exchange):
    with pytest.raises(OutOfBoundsError, match="SM 1: word 4 of 4"):
        publish(exchange, B, 4, 1)
    with pytest.raises(OutOfBoundsError, match="SM 0: word 4 of 4"):
        exchange.is_ready(Wait(words(3, 4), 1, "SM 0"))


def test_plain_memory_is_read_behind_the_word_that_says_so(exchange):
    exchange.write_plain(C, "request")
    with pytest.raises(RaceError, match="SM 0 reads request without having heard that SM 2 wrote it"):
        exchange.read_plain(A, "request")
    publish(exchange, C, 0, 1)
    take(exchange, A, 0, 1)
    exchange.read_plain(A, "request")


def test_plain_memory_is_written_behind_its_readers(exchange):
    exchange.read_plain(A, "request")  # as it was left by the launch before
    with pytest.raises(RaceError, match="SM 2 writes request without having heard that SM 0 read it"):
        exchange.write_plain(C, "request")
    publish(exchange, A, 0, 1)
    take(exchange, C, 0, 1)
    exchange.write_plain(C, "request")


def test_a_launch_orders_everything_before_it(exchange):
    publish(exchange, B, 0, 5)
    take(exchange, A, 0, 5)
    exchange.launch()
    publish(exchange, B, 0, 6)
