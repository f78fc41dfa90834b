"""One caller's state machine, on a virtual clock with an engine that reads the words out of the sound."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gateway import messages as m
from gateway.effects import Close, Send
from gateway.errors import ClientError
from gateway.session import HELLO_TIMEOUT_S, MAX_BARRIERS, MAX_ERROR_CHARACTERS, MAX_RETAINED_S, STALL_S, State
from gateway.simulation import Simulation
from streaming.engine import DecodeOptions, StreamWarning
from vad.audio import SAMPLE_RATE_HZ

BYE = m.Bye()
LAYOUTS = st.lists(st.one_of(st.integers(1, 6), st.sampled_from([0.1, 0.5, 1.0, 2.0])), min_size=1, max_size=6)


def of(seen, kind):
    return [item.message for item in seen if isinstance(item.message, kind)]


def text(finals):
    return " ".join(final.text for final in finals if final.text)


def play(world, scene, *, delay_s=0.0, n_bytes=3_200, tail=(), engine=None):
    """The whole of a conversation: hello, the scene in real time, bye."""
    engine = engine or world.Engine(scene.words)
    simulation = world.simulation(engine, delay_s)
    end_s = len(scene.samples) / SAMPLE_RATE_HZ
    inputs = [(0.0, world.hello), *world.packets(scene.pcm(), n_bytes), *((end_s, item) for item in tail), (end_s, BYE)]
    return simulation.run(inputs), simulation


# ---------------------------------------------------------------- the main job


def test_speech_comes_back_as_partials_and_a_final(world) -> None:
    scene = world.make_scene([0.5, 6, 1.5])
    seen, _ = play(world, scene)
    assert [type(item.message) for item in seen[:3]] == [m.Ready, m.Ack, m.Ack]
    kinds = [type(item.message) for item in seen if not isinstance(item.message, m.Ack)]
    assert kinds[:3] == [m.Ready, m.SpeechStarted, m.Partial]
    assert kinds[-4:] == [m.SpeechEnded, m.Final, m.Farewell, Close]
    assert text(of(seen, m.Final)) == "w0 w1 w2 w3 w4 w5"
    assert of(seen, m.Final)[0].reason == "silence"


def test_final_comes_right_with_the_end_since_the_pause_was_decoded_already(world) -> None:
    scene = world.make_scene([0.5, 6, 1.5])
    seen, simulation = play(world, scene, delay_s=0.1)
    [ended] = [item.at_s for item in seen if isinstance(item.message, m.SpeechEnded)]
    [final] = [item.at_s for item in seen if isinstance(item.message, m.Final)]
    assert final == ended
    assert sum(decode.job.chunk.is_final for decode in simulation.decodes) == 1


def test_silence_and_noise_below_the_detector_never_reach_the_model(world) -> None:
    scene = world.make_scene([20.0])
    seen, simulation = play(world, scene)
    assert simulation.decodes == []
    assert not of(seen, m.Partial) and not of(seen, m.Final)


def test_audio_before_the_onset_reaches_the_model(world) -> None:
    scene = world.make_scene([1.0, 3, 1.0])
    _, simulation = play(world, scene)
    for decode in simulation.decodes:
        assert decode.job.chunk.span.start_sample <= SAMPLE_RATE_HZ - 0.3 * SAMPLE_RATE_HZ


@settings(max_examples=25, deadline=None)
@given(
    layout=LAYOUTS,
    n_bytes=st.sampled_from([97, 640, 3_200, 48_000]),
    delay_s=st.sampled_from([0.0, 0.3, 1.7]),
)
def test_any_packet_cuts_and_engine_delays_give_the_same_words(world, layout, n_bytes, delay_s) -> None:
    scene = world.make_scene(layout)
    if n_bytes == 97:
        scene = world.make_scene(layout[:2])
    seen, _ = play(world, scene, delay_s=delay_s, n_bytes=n_bytes)
    assert text(of(seen, m.Final)).split() == [word.text.strip() for word in scene.words]


@pytest.mark.parametrize("trail_samples", range(0, 8_001, 800))
def test_a_word_that_trails_off_is_heard_the_same_whatever_the_engine_delay(world, trail_samples) -> None:
    scene = world.make_scene([0.5, 5, 1.5])
    *words, last = scene.words
    script = (*words, replace(last, end_sample=last.end_sample + trail_samples))
    texts = set()
    for delay_s in (0.0, 0.05, 0.15, 0.3, 0.6, 1.5):
        seen, _ = play(world, scene, delay_s=delay_s, engine=world.Engine(script))
        texts.add(text(of(seen, m.Final)))
    assert len(texts) == 1


@settings(max_examples=25, deadline=None)
@given(layout=LAYOUTS, delay_s=st.sampled_from([0.0, 0.4, 2.0]))
def test_committed_words_never_change_and_begin_the_final(world, layout, delay_s) -> None:
    seen, _ = play(world, world.make_scene(layout), delay_s=delay_s)
    committed: dict[int, list[str]] = {}
    for event in of(seen, m.Partial | m.Final):
        words = [word.text for word in event.words[: event.n_committed]]
        before = committed.get(event.segment, [])
        assert words[: len(before)] == before
        committed[event.segment] = words


@settings(max_examples=25, deadline=None)
@given(layout=LAYOUTS, delay_s=st.sampled_from([0.0, 0.4, 2.0]))
def test_events_are_numbered_segments_ordered_and_words_never_go_back_in_time(world, layout, delay_s) -> None:
    seen, _ = play(world, world.make_scene(layout), delay_s=delay_s)
    events = [item.message.event for item in seen if hasattr(item.message, "event")]
    assert events == list(range(1, len(events) + 1))
    finals = of(seen, m.Final)
    for before, after in pairwise(finals):
        assert before.segment < after.segment and before.end_s <= after.start_s
    starts = [word.start_s for final in finals for word in final.words]
    assert starts == sorted(starts)


def test_a_monologue_is_cut_at_settled_words_and_no_word_is_doubled_or_lost(world) -> None:
    scene = world.make_scene([0.5, 150, 1.0])
    seen, simulation = play(world, scene, delay_s=0.2)
    finals = of(seen, m.Final)
    assert [final.reason for final in finals[:-1]] == ["max_span"] * (len(finals) - 1) and len(finals) >= 4
    assert text(finals).split() == [word.text.strip() for word in scene.words]
    longest = max(decode.job.chunk.span.n_samples for decode in simulation.decodes)
    assert longest <= 24 * SAMPLE_RATE_HZ  # 15 s, the lead, and the pause before it


def test_times_do_not_drift_after_an_hour_of_skipped_silence(world) -> None:
    scene = world.make_scene([2.0, 2, 600.0, 2, 1.0])
    seen, _ = play(world, scene, n_bytes=32_000)
    heard = [word.start_s for final in of(seen, m.Final) for word in final.words]
    assert heard == pytest.approx([word.start_sample / SAMPLE_RATE_HZ for word in scene.words], abs=0.001)


# ---------------------------------------------------------------- barriers


def test_flush_is_answered_behind_the_finals_and_the_session_goes_on(world) -> None:
    first, second = world.make_scene([0.5, 3]), world.make_scene([0.5, 3, 3, 1.0])
    engine = world.Engine(second.words)
    simulation = world.simulation(engine, delay_s=0.5)
    cut = len(first.pcm())
    inputs = [(0.0, world.hello), *world.packets(second.pcm()[:cut])]
    at_s = inputs[-1][0]
    inputs += [(at_s, m.Flush("a")), *world.packets(second.pcm()[cut:], start_s=at_s), (at_s + 5, BYE)]
    seen = simulation.run(inputs)
    order = [type(item.message) for item in seen if isinstance(item.message, m.Final | m.Flushed)]
    assert order == [m.Final, m.Flushed, m.Final]
    assert of(seen, m.Flushed)[0].at_s == pytest.approx(cut / 2 / SAMPLE_RATE_HZ)
    assert text(of(seen, m.Final)).split() == [word.text.strip() for word in second.words]


@pytest.mark.parametrize("silence_ms", range(1_000, 1_064, 9))
def test_speech_right_behind_a_flush_in_silence_keeps_its_audio(world, silence_ms) -> None:
    scene = world.make_scene([silence_ms / 1_000, 3, 1.0])
    pcm, cut = scene.pcm(), 2 * silence_ms * SAMPLE_RATE_HZ // 1_000
    simulation = world.simulation(world.Engine(scene.words))
    inputs = [(0.0, world.hello), (1.0, m.Audio(pcm[:cut])), (1.0, m.Flush("a"))]
    seen = simulation.run([*inputs, *world.packets(pcm[cut:], start_s=1.0)])
    assert text(of(seen, m.Final)) == "w0 w1 w2"


@pytest.mark.parametrize("gap_ms", range(0, 201, 20))
def test_a_last_word_just_before_the_flush_is_not_lost(world, gap_ms) -> None:
    scene = world.make_scene([1.0, 1, gap_ms / 1000])
    seen, _ = play(world, scene, tail=[m.Flush("a")])
    assert text(of(seen, m.Final)) == "w0"


def test_flush_without_any_audio_or_speech_is_answered(world) -> None:
    seen, _ = play(world, world.make_scene([]), tail=[m.Flush("a"), m.Flush("b")])
    assert [flushed.id for flushed in of(seen, m.Flushed)] == ["a", "b"]
    seen, _ = play(world, world.make_scene([2.0]), tail=[m.Flush("a")])
    assert [flushed.id for flushed in of(seen, m.Flushed)] == ["a"]


def test_two_finals_in_flight_keep_their_order(world) -> None:
    scene = world.make_scene([0.5, 2, 0.7, 2, 0.7, 2, 0.7])
    seen, _ = play(world, scene, delay_s=3.0)
    assert [final.text for final in of(seen, m.Final)] == ["w0 w1", "w2 w3", "w4 w5"]


def test_update_takes_effect_behind_the_audio_before_it(world) -> None:
    scene = world.make_scene([0.5, 3, 1.0, 3, 1.0])
    engine = world.Engine(scene.words)
    simulation = world.simulation(engine)
    pcm = list(world.packets(scene.pcm()))
    middle = next(i for i, (at_s, _) in enumerate(pcm) if at_s > 1.2)  # inside the first utterance
    update = m.Update(id="u", language="de", hangover_ms=300)
    inputs = [(0.0, world.hello), *pcm[:middle], (pcm[middle][0], update), *pcm[middle:], (pcm[-1][0], BYE)]
    seen = simulation.run(inputs)
    assert of(seen, m.Updated)[0].id == "u"
    assert text(of(seen, m.Final)).split() == [word.text.strip() for word in scene.words]
    streams = [decode.job.stream_id for decode in simulation.decodes]
    assert streams == sorted(streams) and set(streams) == {1, 2}  # the utterance in progress kept its stream
    assert not next(d for d in simulation.decodes if d.job.stream_id == 2).job.chunk.left_context_samples
    assert engine.n_open == 0


@pytest.mark.parametrize("hangover_ms", [150, 3_000])
def test_speech_in_progress_ends_with_the_old_hangover(world, hangover_ms) -> None:
    scene = world.make_scene([0.5, 3, 0.3, 3, 1.5])
    simulation = world.simulation(world.Engine(scene.words))
    pcm = list(world.packets(scene.pcm()))
    update = (pcm[10][0], m.Update(id="u", hangover_ms=hangover_ms))
    seen = simulation.run([(0.0, world.hello), *pcm[:10], update, *pcm[10:]])
    assert [final.text for final in of(seen, m.Final)] == ["w0 w1 w2 w3 w4 w5"]


def test_what_reads_as_a_finished_sentence_ends_sooner(world) -> None:
    scene = world.make_scene([0.5, 2, 1.0, 2, 1.0, 1, 4.0])
    words = [replace(word, text=word.text + ("." if index == 3 else "")) for index, word in enumerate(scene.words)]
    simulation = world.simulation(world.Engine(tuple(words)), 0.1)
    hello = structs.replace(world.hello, hangover_ms=3_000, sentence_hangover_ms=400)
    seen = simulation.run([(0.0, hello), *world.packets(scene.pcm())])
    assert [final.text for final in of(seen, m.Final)] == ["w0 w1 w2 w3.", "w4"]


def test_a_model_that_writes_no_marks_can_not_go_by_sentences(world) -> None:
    engine = world.Engine(())
    engine.card = replace(engine.card, capabilities=frozenset())
    session = world.session(engine)
    [effect] = session.receive(structs.replace(world.hello, sentence_hangover_ms=400), 0.0)
    assert effect.message.code == "unsupported_option" and "punctuation" in effect.message.message


# ---------------------------------------------------------------- the model of turns

TURNS = {"hangover_ms": 3_000, "turn_hangover_ms": 300, "turn_threshold": 0.6}


def judged(world, scene, probabilities, *, n_bytes=640, delay_s=0.0, then=(), **options):
    """The scene in real time, its pauses judged; what is seen, and the simulation."""
    judge = world.TurnJudge(list(probabilities))
    simulation = world.simulation(world.Engine(scene.words), delay_s, judge)
    hello = structs.replace(world.hello, **{**TURNS, **options})
    end_s = len(scene.samples) / SAMPLE_RATE_HZ
    inputs = [(0.0, hello), *world.packets(scene.pcm(), n_bytes), *((end_s, item) for item in then)]
    return simulation.run(inputs), judge


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
@pytest.mark.parametrize("n_bytes", [333, 640, 96_000])
def test_a_pause_that_is_judged_to_be_the_end_ends_the_utterance_sooner(world, delay_s, n_bytes) -> None:
    scene = world.make_scene([0.5, 2, 1.0, 2, 1.0, 1, 4.0])
    seen, judge = judged(world, scene, [0.59, 0.6, 0.1], delay_s=delay_s, n_bytes=n_bytes)
    assert [final.text for final in of(seen, m.Final)] == ["w0 w1 w2 w3", "w4"]
    assert len(judge.heard) == 3


def test_the_judge_hears_the_turn_up_to_the_pause_and_eight_seconds_at_most(world) -> None:
    scene = world.make_scene([2.0, 1, 0.5, 30, 1.0, 80, 3.5])
    _, judge = judged(world, scene, [0.0, 1.0])
    lengths_s = [len(samples) / SAMPLE_RATE_HZ for samples in judge.heard]
    assert lengths_s[0] == pytest.approx(0.32 + 0.35 + 0.2, abs=0.07)  # padding, the word, and the pause so far
    assert lengths_s[1:] == [8.0, 8.0]
    for samples in judge.heard:
        assert not samples[-2_500:].any() and samples[-6_000:].any()


def test_the_judge_hears_long_turns_whole_though_their_segments_were_cut(world) -> None:
    scene = world.make_scene([0.5, 120, 2.0])
    seen, judge = judged(world, scene, [1.0])
    assert len(of(seen, m.Final)) > 1
    assert [len(samples) / SAMPLE_RATE_HZ for samples in judge.heard] == [8.0]


def test_of_what_the_text_says_and_what_the_judge_says_the_sooner_end_holds(world) -> None:
    scene = world.make_scene([0.5, 2, 0.7, 2, 1.3, 1, 1.6])
    words = [replace(word, text=word.text + ".") for word in scene.words]
    finals = of(judged(world, type(scene)(scene.samples, tuple(words)), [0.1], sentence_hangover_ms=900)[0], m.Final)
    assert [final.text for final in finals] == ["w0. w1. w2. w3.", "w4."]
    finals = of(judged(world, type(scene)(scene.samples, tuple(words)), [0.9], sentence_hangover_ms=900)[0], m.Final)
    assert [final.text for final in finals] == ["w0. w1.", "w2. w3.", "w4."]


def test_a_pause_that_can_not_be_judged_ends_nothing_sooner(world) -> None:
    scene = world.make_scene([0.5, 2, 1.0, 2, 4.0])
    session = world.session(world.Engine(scene.words), world.TurnJudge([1.0]))
    simulation = Simulation(session, world.Engine(scene.words), world.Detector())  # nobody judges
    seen = simulation.run([(0.0, structs.replace(world.hello, **TURNS)), *world.packets(scene.pcm(), 640)])
    assert [final.text for final in of(seen, m.Final)] == ["w0 w1 w2 w3"]


def test_a_flush_while_a_pause_is_judged_loses_nothing(world) -> None:
    scene = world.make_scene([0.5, 2, 0.25])
    session = world.session(world.Engine(scene.words), world.TurnJudge([1.0]))
    session.receive(structs.replace(world.hello, **TURNS), 0.0)
    session.receive(m.Audio(scene.pcm()), 1.5)

    def score() -> None:
        while (work := session.windows_to_score()) is not None:
            [(probabilities, state)] = world.Detector().score([work])
            session.scored(probabilities, state, 1.5)

    score()
    assert session.wants_judgement and session.pause_to_judge() is not None and not session.wants_judgement
    session.receive(m.Flush("f"), 1.5)
    session.judged(1.0, 1.6)
    score()
    assert session.pause_to_judge() is None
    job = session.next_decode()
    [answer] = world.Engine(scene.words).decode([(None, job.chunk)])
    said = [effect.message for effect in session.decoded(answer, 1.7) if isinstance(effect, Send)]
    assert [item.text for item in said if isinstance(item, m.Final)] == ["w0 w1"]
    assert any(isinstance(item, m.Flushed) for item in said)


@settings(max_examples=30, deadline=None)
@given(layout=LAYOUTS, probabilities=st.lists(st.sampled_from([0.1, 0.9]), min_size=1, max_size=8))
def test_what_is_judged_does_not_hang_on_packets_or_the_engine(world, layout, probabilities) -> None:
    scene = world.make_scene([*layout, 0.5])
    said = [
        [
            (final.text, final.start_s)
            for final in of(judged(world, scene, probabilities, then=[BYE], **more)[0], m.Final)
        ]
        for more in ({}, {"n_bytes": 333}, {"n_bytes": 64_000}, {"delay_s": 0.4})
    ]
    assert said[0] == said[1] == said[2] == said[3]


def test_a_server_without_a_model_of_turns_refuses_to_judge(world) -> None:
    session = world.session(world.Engine(()))
    [effect] = session.receive(structs.replace(world.hello, turn_hangover_ms=300), 0.0)
    assert effect.message.code == "unsupported_option" and "turn_hangover_ms" in effect.message.message


def test_ready_names_the_model_of_turns(world) -> None:
    for judge, name in ((None, None), (world.TurnJudge([1.0]), "judge")):
        ready = world.session(world.Engine(()), judge).receive(world.hello, 0.0)[0].message
        assert ready.turn_model == name


def test_an_update_that_the_model_can_not_honour_changes_nothing(world) -> None:
    session = world.session(world.Engine(()))
    session.receive(world.hello, 0.0)
    [effect] = session.receive(m.Update(id="u", language="xx"), 1.0)
    assert effect.message.code == "unsupported_option" and not effect.message.fatal


# ---------------------------------------------------------------- when things go wrong


def test_input_that_stalls_in_mid_word_ends_the_utterance(world) -> None:
    scene = world.make_scene([0.5, 3])
    simulation = world.simulation(world.Engine(scene.words))
    seen = simulation.run([(0.0, world.hello), *world.packets(scene.pcm())])
    [final] = of(seen, m.Final)
    assert final.reason == "stall" and final.text == "w0 w1 w2"
    [at_s] = [item.at_s for item in seen if isinstance(item.message, m.Final)]
    assert at_s == pytest.approx(len(scene.samples) / SAMPLE_RATE_HZ + STALL_S, abs=0.11)  # a packet is 0.1 s
    assert simulation.session.state is State.OPEN


def test_a_failed_decode_is_told_and_later_audio_is_decoded(world) -> None:
    scene = world.make_scene([0.5, 3, 1.0, 3, 1.0])
    n_first = play(world, world.make_scene([0.5, 3, 1.0]))[1].decodes
    engine = world.Engine(scene.words, fail_on=frozenset(range(1, len(n_first) + 2)))
    seen, _ = play(world, scene, engine=engine)
    assert {error.code for error in of(seen, m.Error)} == {"decode_failed"}
    assert text(of(seen, m.Final)) == "w3 w4 w5"


def test_a_decoder_that_loops_is_asked_again_without_prefix_and_ends(world) -> None:
    scene = world.make_scene([0.5, 8, 1.0])
    script = scene.words

    def loop_after_a_prefix(chunk, words):
        return words if not chunk.prefix else words + script[:2] * 60

    engine = world.Engine(script, garble=loop_after_a_prefix)
    seen, simulation = play(world, scene, engine=engine)
    # An engine without the prefix hears everything: what was settled is left out by time.
    assert text(of(seen, m.Final)).split() == [word.text.strip() for word in script]
    assert any(not chunk.prefix and index for index, chunk in enumerate(engine.chunks))


def test_a_decoder_that_always_loops_gives_no_endless_text(world) -> None:
    scene = world.make_scene([0.5, 4, 1.0])
    engine = world.Engine(scene.words, garble=lambda chunk, words: scene.words[:2] * 80)
    seen, simulation = play(world, scene, engine=engine)
    assert len(text(of(seen, m.Final)).split()) <= 4
    assert len(simulation.decodes) < 20


def test_a_partial_that_nothing_comes_of_is_taken_back(world) -> None:
    scene = world.make_scene([0.5, 3, 1.0])
    engine = world.Engine(scene.words)
    engine.garble = lambda chunk, words: words[:1] if engine.n_decodes == 1 else ()
    seen, _ = play(world, scene, engine=engine)
    assert of(seen, m.Partial)[0].text
    assert of(seen, m.Final)[-1].text == ""


@settings(max_examples=20, deadline=None)
@given(layout=LAYOUTS, delay_s=st.sampled_from([0.0, 0.7]), data=st.data())
def test_whatever_times_an_engine_gives_its_words_the_session_ends_and_they_lie_in_their_segment(
    world, layout, delay_s, data
) -> None:
    scene = world.make_scene([*layout, 45, 0.6, 3])
    random = data.draw(st.randoms(use_true_random=False))

    def anywhere(chunk, words):
        def time():
            reach = 40_000
            at = random.randint(chunk.span.start_sample - reach, chunk.span.end_sample + reach)
            return random.choice([None, chunk.span.start_sample, at, at])

        return tuple(replace(word, start_sample=time(), end_sample=time()) for word in words)

    engine = world.Engine(scene.words, garble=anywhere)
    seen, simulation = play(world, scene, delay_s=delay_s, engine=engine)
    assert simulation.session.state is State.CLOSED and engine.n_open == 0
    for event in of(seen, m.Partial | m.Final):
        for word in event.words:
            if word.start_s is not None and word.end_s is not None:
                assert event.start_s <= word.start_s <= word.end_s <= event.end_s


def test_hello_must_come_first_and_only_once(world) -> None:
    session = world.session(world.Engine(()))
    [effect] = session.receive(m.Audio(b"12"), 0.0)
    assert effect.message.code == "hello_required"
    session.receive(world.hello, 0.0)
    [effect] = session.receive(world.hello, 0.0)
    assert effect.message.code == "already_greeted"
    assert session.state is State.OPEN


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (m.Hello(audio=m.AudioSpec("pcm", 16_000)), "unsupported_audio"),
        (m.Hello(audio=m.AudioSpec("s16le", 7_000)), "unsupported_audio"),
        (m.Hello(audio=m.AudioSpec("s16le", 96_000)), "unsupported_audio"),
        (m.Hello(audio=m.AudioSpec("s16le", 16_000, 0)), "unsupported_audio"),
        (m.Hello(audio=m.AudioSpec("s16le", 16_000, 2, 2)), "unsupported_audio"),
        (m.Hello(audio=m.AudioSpec("s16le", 16_000), model="whisper-vast"), "unknown_model"),
        (m.Hello(audio=m.AudioSpec("s16le", 16_000), require=("mind_reading",)), "missing_capability"),
        (m.Hello(audio=m.AudioSpec("s16le", 16_000), language="xx"), "unsupported_option"),
        (m.Hello(audio=m.AudioSpec("s16le", 16_000), task="sing"), "unsupported_option"),
    ],
)
def test_a_hello_that_can_not_be_granted_says_why_and_may_be_said_again(world, hello, code) -> None:
    session = world.session(world.Engine(()))
    [effect] = session.receive(hello, 0.0)
    assert effect.message.code == code and not effect.message.fatal
    assert isinstance(session.receive(world.hello, 0.0)[0].message, m.Ready)


def test_wishes_that_can_not_be_granted_stand_in_ready(world) -> None:
    session = world.session(world.Engine(()))
    hello = m.Hello(audio=m.AudioSpec("s16le", 16_000), prefer=("word_times", "mind_reading"))
    ready = session.receive(hello, 0.0)[0].message
    assert ready.granted == ("word_times",) and ready.declined == ("mind_reading",)


def test_without_hello_the_connection_ends(world) -> None:
    simulation = world.simulation(world.Engine(()))
    seen = simulation.run([])
    assert [item.at_s for item in seen] == [HELLO_TIMEOUT_S] * 2
    assert seen[0].message.code == "hello_timeout" and seen[1].message.code == 4408


def test_an_empty_frame_is_an_error_and_nothing_else(world) -> None:
    session = world.session(world.Engine(()))
    session.receive(world.hello, 0.0)
    [effect] = session.receive(m.Audio(b""), 0.0)
    assert effect.message.code == "empty_audio"


def test_non_finite_floats_are_silence_and_said_once(world) -> None:
    session = world.session(world.Engine(()))
    session.receive(m.Hello(audio=m.AudioSpec("f32le", 16_000)), 0.0)
    nan = bytes.fromhex("0000c07f") * 100
    effects = session.receive(m.Audio(nan), 0.0) + session.receive(m.Audio(nan), 0.0)
    warnings = [e.message.code for e in effects if isinstance(e, Send) and isinstance(e.message, m.Warning)]
    assert warnings == ["non_finite_samples"]


@pytest.mark.parametrize(
    ("declared_hz", "true_hz"), [(8_000, 16_000), (16_000, 8_000), (16_000, 48_000), (48_000, 16_000)]
)
def test_live_audio_at_another_rate_than_declared_is_noticed_within_two_seconds(world, declared_hz, true_hz) -> None:
    packet = bytes(2 * true_hz // 20)  # 50 ms as it really is
    warned_s = [
        at_s for at_s, code in warnings_of(world, declared_hz, [packet] * 50, every_s=0.05) if code == "audio_suspect"
    ]
    assert len(warned_s) == 1 and warned_s[0] <= 2.1


@pytest.mark.parametrize("every_s", [0.0, 0.01, 0.043, 0.05, 0.057, 0.011])
def test_live_audio_and_files_sent_fast_raise_no_doubt_of_their_rate(world, every_s) -> None:
    packets = [bytes(1_600)] * 60  # 50 ms each
    assert not warnings_of(world, 16_000, packets, every_s=every_s)


def warnings_of(world, rate_hz: int, packets: list[bytes], every_s: float) -> list[tuple[float, str]]:
    session = world.session(world.Engine(()))
    session.receive(m.Hello(audio=m.AudioSpec("s16le", rate_hz)), 0.0)
    effects = [
        (at_s, effect)
        for at_s, packet in ((i * every_s, packet) for i, packet in enumerate(packets))
        for effect in session.receive(m.Audio(packet), at_s)
    ]
    return [(at_s, e.message.code) for at_s, e in effects if isinstance(e, Send) and isinstance(e.message, m.Warning)]


def test_bytes_left_over_at_the_end_are_named(world) -> None:
    session = world.session(world.Engine(()))
    session.receive(world.hello, 0.0)
    session.receive(m.Audio(b"123"), 0.0)
    effects = session.receive(BYE, 0.1)
    assert any(isinstance(e, Send) and getattr(e.message, "code", "") == "incomplete_sample" for e in effects)


def test_an_error_never_repeats_all_of_a_long_value(world) -> None:
    session = world.session(world.Engine(()))
    session.receive(world.hello, 0.0)
    [effect] = session.receive(m.Update(id="u", language="x" * 1_000_000), 0.1)
    assert len(effect.message.message) <= MAX_ERROR_CHARACTERS


def test_a_packet_in_pieces_is_judged_as_one(world) -> None:
    """A client that sends a second at a time is not too fast and has not stalled, in whatever pieces it is taken."""
    packet = bytes(32_000)
    effects = []
    session = world.session(world.Engine(()))
    session.receive(world.hello, 0.0)
    for at_s in range(1, 5):
        for start in range(0, len(packet), session.piece_bytes):
            piece = m.Audio(packet[start : start + session.piece_bytes])
            to_come = len(packet) - start - len(piece.data)
            effects += session.receive(piece, float(at_s), n_bytes_to_come=to_come)
    assert session.piece_bytes == 3_200
    assert not [e for e in effects if isinstance(e, Send) and isinstance(e.message, m.Warning)]

    scene = world.make_scene([0.5, 3])
    pcm = scene.pcm()
    session.receive(m.Audio(pcm[:16_000]), 5.0, n_bytes_to_come=len(pcm) - 16_000)
    session.receive(m.Audio(pcm[16_000:]), 5.0)
    while work := session.windows_to_score():
        [(probabilities, state)] = world.Detector().score([work])
        session.scored(probabilities, state, 5.0)
    assert session.next_wake_s == pytest.approx(5.0 + STALL_S + len(pcm) / 2 / SAMPLE_RATE_HZ)


def test_vocabulary_that_does_not_fit_is_named(world) -> None:
    session = world.session(world.Engine(()))
    session.receive(world.hello, 0.0)
    [effect] = session.opened([StreamWarning("vocabulary_truncated", "Zwolle did not fit")])
    assert effect.message.code == "vocabulary_truncated"


# ---------------------------------------------------------------- back-pressure and lag


def test_audio_far_ahead_of_decoding_is_neither_acknowledged_nor_wanted(world) -> None:
    scene = world.make_scene([0.5, 400])
    session = world.session(world.Engine(scene.words))
    session.receive(world.hello, 0.0)
    acked = 0
    pcm, at = scene.pcm(), 0
    while session.wants_audio:
        effects = session.receive(m.Audio(pcm[at : at + 32_000]), 0.0)
        at += 32_000
        while work := session.windows_to_score():
            [(probabilities, state)] = world.Detector().score([work])
            effects += session.scored(probabilities, state, 0.0)
        acked = max(
            [acked, *(e.message.samples for e in effects if isinstance(e, Send) and isinstance(e.message, m.Ack))]
        )
    assert at / 2 / SAMPLE_RATE_HZ <= MAX_RETAINED_S + 2
    assert acked / SAMPLE_RATE_HZ <= MAX_RETAINED_S / 2 + 1


def test_flushes_and_updates_that_wait_are_bounded_too(world) -> None:
    scene = world.make_scene([0.5, 3])
    session = world.session(world.Engine(scene.words))
    session.receive(world.hello, 0.0)
    session.receive(m.Audio(scene.pcm()), 0.0)
    for index in range(MAX_BARRIERS):
        assert session.wants_audio
        session.receive(m.Flush("f") if index % 2 else m.Update("u", hangover_ms=300), 0.0)
    assert not session.wants_audio
    while work := session.windows_to_score():
        [(probabilities, state)] = world.Detector().score([work])
        session.scored(probabilities, state, 0.0)
    session.next_decode()
    answers = [e.message for e in session.decode_failed("", 1.0) if isinstance(e, Send)]
    assert sum(isinstance(answer, m.Flushed) for answer in answers) == MAX_BARRIERS // 2
    assert session.wants_audio


def test_a_client_held_back_by_us_has_not_stalled(world) -> None:
    """Sent as fast as acknowledgements allow, speech is never cut off as a stall."""
    scene = world.make_scene([0.5, 300, 1.0])
    seen, _ = play_at_once(world, scene, delay_s=2.0)
    assert {final.reason for final in of(seen, m.Final)} <= {"max_span", "end", "silence"}
    assert text(of(seen, m.Final)).split() == [word.text.strip() for word in scene.words]


def play_at_once(world, scene, delay_s):
    """A client that keeps 20 s unacknowledged at most, on a line without delay."""
    simulation = world.simulation(world.Engine(scene.words), delay_s)

    def inputs():
        yield 0.0, world.hello
        now_s, sent, pcm = 0.0, 0, scene.pcm()
        while sent < len(pcm):
            acked = max((ack.samples for ack in of(simulation.seen, m.Ack)), default=0)
            if sent / 2 - acked > 20 * SAMPLE_RATE_HZ:
                now_s += 0.25
                yield now_s, m.Audio(b"")  # nothing to send yet: an empty frame moves the clock and is refused
                continue
            yield now_s, m.Audio(pcm[sent : sent + 32_000])
            sent += 32_000
        yield now_s, BYE

    return simulation.run(inputs()), simulation


def test_finals_that_come_late_are_reported(world) -> None:
    scene = world.make_scene([0.5, 3, 1.0, 3, 1.0, 3, 4.0])
    seen, _ = play(world, scene, delay_s=4.0)
    assert "lagging" in {warning.code for warning in of(seen, m.Warning)}


# ---------------------------------------------------------------- resume


def test_a_lost_connection_is_taken_up_with_every_event_once(world) -> None:
    scene = world.make_scene([0.5, 3, 1.0, 3, 1.0])
    expected, _ = play(world, scene)
    engine = world.Engine(scene.words)
    simulation = world.simulation(engine)
    inputs = [(0.0, world.hello), *world.packets(scene.pcm())]
    cut = len(inputs) // 2
    before = list(simulation.run(inputs[:cut]))
    session = simulation.session
    at_s = inputs[cut][0]
    session.peer_gone(at_s)
    last_seen = before[len(before) // 2].message
    last_event = getattr(last_seen, "event", 0)
    effects = session.resume(last_event, at_s)
    ready = effects[0].message
    assert ready.resumed and ready.taken_samples == cut * 1_600 - 1_600
    replayed = [e.message.event for e in effects[1:] if isinstance(e, Send)]
    assert replayed == sorted(set(replayed)) and all(event > last_event for event in replayed)
    simulation.run([*inputs[cut:], (at_s + 10, BYE)])
    assert text(of(simulation.seen, m.Final)) == text(of(expected, m.Final))


def test_a_session_nobody_takes_up_ends_as_with_bye(world) -> None:
    scene = world.make_scene([0.5, 3])
    engine = world.Engine(scene.words)
    simulation = world.simulation(engine, resume_window_s=5)
    simulation.run([(0.0, world.hello), *world.packets(scene.pcm())][:-1])
    simulation.session.peer_gone(2.0)
    simulation.run([])
    assert simulation.session.state is State.CLOSED
    assert engine.n_open == 0
    assert simulation.session.is_forgettable(100.0)


def test_after_the_window_a_session_is_over_though_it_still_decodes(world) -> None:
    scene = world.make_scene([0.5, 3])
    session = world.session(world.Engine(scene.words), resume_window_s=5)
    session.receive(world.hello, 0.0)
    session.receive(m.Audio(scene.pcm()), 1.0)
    session.peer_gone(1.0)
    session.wake(6.0)
    assert session.state is State.DRAINING
    with pytest.raises(ClientError) as caught:
        session.resume(0, 6.1)
    assert caught.value.code == "unknown_session"


def test_a_connection_lost_before_hello_leaves_nothing_to_wait_for(world) -> None:
    session = world.session(world.Engine(()))
    session.peer_gone(1.0)
    assert session.is_forgettable(1.0)


def test_a_session_that_ended_while_its_client_was_away_is_forgotten_after_the_window(world) -> None:
    session = world.session(world.Engine(()), resume_window_s=5)
    session.receive(world.hello, 0.0)
    session.receive(m.Audio(b"123"), 0.0)
    session.receive(BYE, 0.0)
    session.peer_gone(0.1)
    [(probabilities, state)] = world.Detector().score([session.windows_to_score()])
    session.scored(probabilities, state, 0.2)
    assert session.state is State.CLOSED and not session.is_forgettable(5.0)
    assert session.next_wake_s == pytest.approx(5.1)
    session.wake(5.1)
    assert session.is_forgettable(5.1) and session.next_wake_s is None


def test_a_sample_cut_by_the_loss_of_the_connection_is_sent_again_whole(world) -> None:
    scene = world.make_scene([0.5, 3, 1.0])
    simulation = world.simulation(world.Engine(scene.words))
    simulation.run([(0.0, world.hello), (0.1, m.Audio(scene.pcm()[:3_201]))])
    simulation.session.peer_gone(0.2)
    ready = simulation.session.resume(0, 0.3)[0].message
    assert ready.taken_samples == 1_600
    simulation.run(world.packets(scene.pcm()[3_200:], start_s=0.3))
    assert text(of(simulation.seen, m.Final)) == "w0 w1 w2"
    assert not of(simulation.seen, m.Warning)
    heard = [decode.job.chunk for decode in simulation.decodes][-1]
    assert heard.samples == pytest.approx(scene.samples[heard.span.start_sample : heard.span.end_sample], abs=1e-3)


def test_events_never_seen_or_never_sent_can_not_be_resumed_from(world) -> None:
    session = world.session(world.Engine(()))
    session.receive(world.hello, 0.0)
    with pytest.raises(ClientError) as caught:
        session.resume(99, 1.0)
    assert caught.value.code == "unknown_session"


def test_partials_that_a_newer_one_replaced_are_not_sent_again(world) -> None:
    scene = world.make_scene([0.5, 20])
    simulation = world.simulation(world.Engine(scene.words))
    simulation.run([(0.0, world.hello), *world.packets(scene.pcm())][:-3])
    effects = simulation.session.resume(0, 10.0)
    assert len([e for e in effects if isinstance(e.message, m.Partial)]) <= 1


def test_a_client_lost_during_its_last_decode_still_gets_everything(world) -> None:
    scene = world.make_scene([0.5, 3])
    engine = world.Engine(scene.words)
    session = world.session(engine)
    session.receive(world.hello, 0.0)
    session.receive(m.Audio(scene.pcm()), 1.0)
    session.receive(BYE, 1.0)
    while work := session.windows_to_score():
        [(probabilities, state)] = world.Detector().score([work])
        session.scored(probabilities, state, 1.0)
    job = session.next_decode()
    session.peer_gone(1.1)
    [hypothesis] = engine.decode([(engine.open(DecodeOptions()), job.chunk)])
    session.decoded(hypothesis, 1.2)
    assert session.state is State.CLOSED and not session.is_forgettable(1.3)
    effects = session.resume(0, 2.0)
    assert [
        final.message.text for final in effects if isinstance(final, Send) and isinstance(final.message, m.Final)
    ] == ["w0 w1 w2"]
    assert isinstance(effects[-1], Close)
