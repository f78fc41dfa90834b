"""A session with a model that decodes in chunks: the same conversations, and the options that only it has."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gateway import messages as m
from gateway.config import ConfigError, load
from models.scripted_transducer import FRAME_SAMPLES, ScriptedToken, ScriptedTransducer
from vad.audio import SAMPLE_RATE_HZ

BYE = m.Bye()
LAYOUTS = st.lists(st.one_of(st.integers(1, 6), st.sampled_from([0.1, 0.5, 1.0, 2.0])), min_size=1, max_size=6)
CHUNKS_MS = st.sampled_from(range(160, 2_001, 80))


def of(seen, kind):
    return [item.message for item in seen if isinstance(item.message, kind)]


def text(finals):
    return " ".join(final.text for final in finals if final.text)


def engine_of(scene, **options) -> ScriptedTransducer:
    """Hears each word of the scene as two pieces, the second of them late in the word."""
    tokens = []
    for word in scene.words:
        middle = word.start_sample + 4_000
        tokens += [ScriptedToken(word.text, word.start_sample + 200, 2), ScriptedToken("'", middle, 2)]
    return ScriptedTransducer(tokens, edge_samples=4 * FRAME_SAMPLES, **options)


def play(world, scene, *, delay_s=0.0, n_bytes=3_200, tail=(), engine=None, hello=None):
    """The whole of a conversation: hello, the scene in real time, bye."""
    simulation = world.simulation(engine or engine_of(scene), delay_s)
    end_s = len(scene.samples) / SAMPLE_RATE_HZ
    begin = (0.0, hello or world.hello)
    inputs = [begin, *world.packets(scene.pcm(), n_bytes), *((end_s, item) for item in tail), (end_s, BYE)]
    return simulation.run(inputs), simulation


def said(scene) -> str:
    return " ".join(f"{word.text.strip()}'" for word in scene.words)


# ---------------------------------------------------------------- the main job


def test_a_partial_comes_with_every_chunk_and_the_final_right_with_the_end(world) -> None:
    scene = world.make_scene([0.5, 20, 1.5])
    seen, simulation = play(world, scene)
    partials = [item.at_s for item in seen if isinstance(item.message, m.Partial)]
    gaps = [after - before for before, after in pairwise(partials)]
    assert len(partials) > 20 and max(gaps) <= 0.45
    assert text(of(seen, m.Final)) == said(scene)
    [ended] = [item.at_s for item in seen if isinstance(item.message, m.SpeechEnded)]
    [final] = [item.at_s for item in seen if isinstance(item.message, m.Final)]
    assert final == ended
    assert sum(decode.job.chunk.is_final for decode in simulation.decodes) == 1, "no second pass"


@settings(max_examples=60, deadline=None)
@given(
    layout=LAYOUTS,
    n_bytes=st.sampled_from([1, 333, 3_200, 64_000]).map(lambda n: max(n, 300)),
    delay_s=st.sampled_from([0.0, 0.05, 0.4, 3.0]),
    chunk_ms=CHUNKS_MS,
    second_pass=st.booleans(),
    failing=st.frozensets(st.integers(1, 40), max_size=6),
)
def test_any_packets_delays_chunks_and_failures_give_the_same_words(
    world, layout, n_bytes, delay_s, chunk_ms, second_pass, failing
) -> None:
    scene = world.make_scene(layout)
    hello = structs.replace(world.hello, chunk_ms=chunk_ms, second_pass=second_pass)
    in_a_row = {n for n in failing if n - 1 in failing}
    engine = engine_of(scene, failing_decodes=failing - in_a_row)
    seen, _ = play(world, scene, delay_s=delay_s, n_bytes=n_bytes, engine=engine, hello=hello)
    assert text(of(seen, m.Final)) == said(scene)
    assert engine.n_open_streams == 0
    words = [word for final in of(seen, m.Final) for word in final.words]
    for word, true_word in zip(words, scene.words, strict=True):
        assert abs(word.start_s - true_word.start_sample / SAMPLE_RATE_HZ) <= 0.08 + 1e-3
    assert_settled_stays(seen)


def assert_settled_stays(seen) -> None:
    settled: dict[int, list[str]] = {}
    for segment in of(seen, m.Partial | m.Final):
        now = [word.text for word in segment.words[: segment.n_committed]]
        before = settled.get(segment.segment, [])
        carried = isinstance(segment, m.Final) and segment.reason == "max_span"
        assert now[: len(before)] == before or (carried and before[: len(now)] == now)
        settled[segment.segment] = now


def test_silence_never_reaches_the_model_and_the_pre_roll_does(world) -> None:
    scene = world.make_scene([3.0, 6, 4.0, 2, 3.0])
    _, simulation = play(world, scene)
    onset = scene.words[0].start_sample
    first = simulation.decodes[0].job.chunk
    assert onset - 6_000 <= first.span.start_sample <= onset - 4_800
    assert first.is_first
    voiced_s = sum(len(d.job.chunk.samples) - d.job.chunk.left_context_samples for d in simulation.decodes)
    assert all(np.any(decode.job.chunk.samples) for decode in simulation.decodes) and voiced_s
    starts = [d.job.chunk.span.start_sample for d in simulation.decodes if d.job.chunk.is_first]
    assert len(starts) == 2 and starts[1] >= scene.words[6].start_sample - 6_000


@pytest.mark.parametrize("gap_ms", [0, 20, 100, 200])
def test_a_last_word_just_before_the_flush_is_not_lost(world, gap_ms) -> None:
    scene = world.make_scene([0.5, 7, gap_ms / 1_000])
    seen, _ = play(world, scene, tail=[m.Flush("a")])
    finals = of(seen, m.Final)
    assert text(finals) == said(scene) and finals[-1].reason == "flush"
    kinds = [type(item.message) for item in seen if isinstance(item.message, m.Final | m.Flushed)]
    assert kinds == [m.Final, m.Flushed]


def test_a_monologue_is_cut_at_settled_words_and_memory_stays_bounded(world) -> None:
    scene = world.make_scene([0.5, 150, 1.0])
    simulation = world.simulation(engine_of(scene))
    retained = []
    simulation.tell(world.hello, 0.0)
    for at_s, message in world.packets(scene.pcm()):
        simulation.tell(message, at_s)
        while simulation.next_s <= at_s:
            simulation.step()
        retained.append(simulation.session.retained_s)
    seen = simulation.run([(len(scene.samples) / SAMPLE_RATE_HZ, BYE)])
    finals = of(seen, m.Final)
    assert text(finals) == said(scene) and len(finals) > 4
    assert {final.reason for final in finals[:-1]} == {"max_span"}
    assert max(retained) < 6.0, "left context, chunk and right context, not the whole segment"
    assert_settled_stays(seen)


def test_input_that_stalls_in_mid_word_ends_the_utterance(world) -> None:
    scene = world.make_scene([0.5, 4])
    simulation = world.simulation(engine_of(scene))
    seen = simulation.run([(0.0, world.hello), *world.packets(scene.pcm())])
    assert [final.reason for final in of(seen, m.Final)] == ["stall"] and text(of(seen, m.Final)) == said(scene)


def test_a_failed_decode_is_told_and_none_of_its_audio_is_lost(world) -> None:
    scene = world.make_scene([0.5, 12, 1.5])
    seen, _ = play(world, scene, engine=engine_of(scene, failing_decodes={3, 5}))
    assert [error.code for error in of(seen, m.Error)] == ["decode_failed"] * 2
    assert text(of(seen, m.Final)) == said(scene)


# ---------------------------------------------------------------- what a client may choose


def ready_of(world, engine, **chosen) -> m.Ready | m.Error:
    simulation = world.simulation(engine)
    seen = simulation.run([(0.0, structs.replace(world.hello, **chosen))][:1])
    return seen[0].message


def test_ready_states_chunk_right_context_and_latency(world) -> None:
    engine = engine_of(world.make_scene([1]))
    assert ready_of(world, engine).chunking == m.ChunkingItem(320, 800, 1_120, 0, False)
    assert ready_of(world, engine, chunk_ms=560, second_pass=True).chunking == m.ChunkingItem(560, 800, 1_360, 0, True)
    assert ready_of(world, engine, chunk_ms=None).chunking == m.ChunkingItem(320, 800, 1_120, 0, False)


def test_an_interval_above_the_usual_makes_chunks_longer_and_one_below_changes_nothing(world) -> None:
    engine = engine_of(world.make_scene([1]))
    assert ready_of(world, engine, partial_interval_ms=1_000).chunking.chunk_ms == 1_040
    assert ready_of(world, engine, partial_interval_ms=200).chunking.chunk_ms == 320


@pytest.mark.parametrize(("chunk_ms", "part"), [(500, "take 480 or 560"), (170, "take 160 or 240")])
def test_a_chunk_that_is_not_whole_frames_is_refused_and_the_neighbours_named(world, chunk_ms, part) -> None:
    refused = ready_of(world, engine_of(world.make_scene([1])), chunk_ms=chunk_ms)
    assert refused.code == "unsupported_option" and part in refused.message


@pytest.mark.parametrize("chosen", [{"chunk_ms": 320}, {"second_pass": True}])
def test_a_model_that_does_not_decode_in_chunks_refuses_options_about_them(world, chosen) -> None:
    refused = ready_of(world, world.Engine(()), **chosen)
    assert refused.code == "unsupported_option"
    assert f"reader does not decode in chunks, which {next(iter(chosen))} is about" in refused.message
    assert ready_of(world, world.Engine(())).chunking is None
    assert ready_of(world, world.Engine(()), chunk_ms=None, second_pass=False).chunking is None


@pytest.mark.parametrize("chunk_ms", [159, 2_001])
def test_chunks_outside_the_protocols_range_are_a_bad_message(chunk_ms) -> None:
    with pytest.raises(m.ClientError, match="chunk_ms"):
        m.parse({"type": "hello", "audio": {"encoding": "s16le", "sample_rate_hz": 16_000}, "chunk_ms": chunk_ms})


def test_an_update_holds_from_the_next_utterance_on_and_a_resume_states_it(world) -> None:
    scene = world.make_scene([0.5, 10, 2.0, 10, 1.5])
    simulation = world.simulation(engine_of(scene))
    update = m.Update("u", chunk_ms=800)
    packets = list(world.packets(scene.pcm()))
    inputs = [(0.0, world.hello), *packets[:20], (packets[19][0], update), *packets[20:]]
    seen = simulation.run(inputs)
    assert [updated.id for updated in of(seen, m.Updated)] == ["u"]
    steps: dict[bool, set[int]] = {False: set(), True: set()}
    for before, after in pairwise(decode.job.chunk for decode in simulation.decodes):
        if not before.is_final and not after.is_final and not after.is_first:
            second = after.span.start_sample > scene.words[9].start_sample
            steps[second].add(after.span.end_sample - before.span.end_sample)
    assert max(steps[False]) == 4 * FRAME_SAMPLES and min(steps[True]) == 10 * FRAME_SAMPLES
    simulation.session.peer_gone(20.0)
    [resumed, *_] = simulation.session.resume(1, 21.0)
    assert resumed.message.chunking.chunk_ms == 800


def test_a_refused_update_changes_nothing(world) -> None:
    scene = world.make_scene([0.5, 10, 1.5])
    seen, _ = play(world, scene, tail=[m.Update("u", chunk_ms=500)])
    [error] = of(seen, m.Error)
    assert (error.code, error.id) == ("unsupported_option", "u")


def test_a_deployment_chooses_for_models_that_decode_in_chunks_and_others_take_no_notice(world) -> None:
    session = world.session(engine_of(world.make_scene([1])), chunk_ms=640, second_pass=True)
    [ready, *_] = session.receive(world.hello, 0.0)
    assert ready.message.chunking == m.ChunkingItem(640, 800, 1_440, 0, True)
    [ready, *_] = world.session(world.Engine(()), chunk_ms=640, second_pass=True).receive(world.hello, 0.0)
    assert isinstance(ready.message, m.Ready) and ready.message.chunking is None


def test_a_chunk_in_the_configuration_is_checked_against_range_and_model(world) -> None:
    from gateway.app import build_app

    with pytest.raises(ConfigError, match="chunk_ms is 100"):
        load({"session.chunk_ms": "100"}, environ={})
    config = load({"session.chunk_ms": "500"}, environ={})
    with pytest.raises(
        ConfigError, match="chunk_ms or left_context_ms with model scripted-transducer: 500 ms is not whole"
    ):
        build_app(config, {"scripted-transducer": engine_of(world.make_scene([1]))}, world.Detector())


def test_a_deployment_may_have_less_heard_again_before_a_chunk(world) -> None:
    lefts = []
    for left_context_ms in (0, 800):
        engine = engine_of(scene := world.make_scene([0.5, 20, 1.0]))
        decode = engine.decode

        def keeping(batch, decode=decode):
            lefts.extend(chunk.left_context_samples for _, chunk in batch)
            return decode(batch)

        engine.decode = keeping
        simulation = world.simulation(engine, left_context_ms=left_context_ms)
        inputs = [(0.0, world.hello), *world.packets(scene.pcm()), (len(scene.samples) / SAMPLE_RATE_HZ, BYE)]
        assert text(of(simulation.run(inputs), m.Final)) == said(scene)
        assert max(lefts) == (10 * FRAME_SAMPLES if left_context_ms else 30 * FRAME_SAMPLES)
        lefts.clear()
