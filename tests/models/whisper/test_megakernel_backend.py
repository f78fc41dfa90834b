"""The whole backend on a runtime without a device: the reference's words, whoever shares the batch and whatever fails.

``NetworkRuntime`` decides as the kernel does (``megakernel.select``) on logits of the reference network in float32, so
that the CPU backend must be met token for token; with ``EvaluatedRuntime`` the logits are those of the compiled graph.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from megakernel.errors import FaultError, RequestError
from megakernel.evaluate import Memory, evaluate, merged_partials, network_of
from megakernel.fuse import fuse
from megakernel.isa import MAX_ROWS, EndReason
from megakernel.mailbox import DoneRecord, Record, decode_record
from megakernel.ops import Sizes
from megakernel.request import Request, encode_request
from megakernel.select import Row, Slot, Slots, accept, record_words, rows_of_step
from models.backends import Backends, Offer
from models.store import find_model, recording
from models.tokenizer import WhisperTokenizer
from models.whisper.backend import Backend, Writing
from models.whisper.decode import Request as WhisperRequest
from models.whisper.decode import RuleBook
from models.whisper.engine import WhisperEngine, WhisperStream
from models.whisper.graph import as_arrays, decoder_graph, graph_constants
from models.whisper.loading import read_model
from models.whisper.megakernel_backend import MegakernelBackend, bitmaps
from models.whisper.reference import DecoderCache, Whisper
from models.whisper.stage import Listener, Stage
from models.whisper.torch_backend import TorchBackend, silent_tail
from models.whisper.vocabulary import rule_book
from streaming.engine import Chunk, DecodeOptions
from streaming.transcript import Hypothesis, text_of
from tests.models.whisper.small import noise, small_checkpoint
from vad.audio import SAMPLE_RATE_HZ, SpeechSpan

Logits = Callable[[Sequence[Row]], NDArray[np.float32]]  # [rows, n_tokens]


class HostRuntime:
    """What ``megakernel.runtime`` does with slots, a step whenever somebody waits. ``fault_at_step`` breaks it."""

    def __init__(self, sizes: Sizes, logits_of: Logits, bits: NDArray[np.uint32]) -> None:
        self._sizes, self._logits_of, self._bits = sizes, logits_of, bits
        self._slots: Slots = (None,) * sizes.max_slots
        self._n_tickets = 0
        self._cancelled: list[Record] = []
        self.n_steps = 0
        self.fault_at_step: int | None = None
        self.is_closed = False

    def open(self, slot: int, request: Request) -> int:
        encode_request(request, ticket=1, sizes=self._sizes, n_rules=len(self._bits))  # refuses as the runtime does
        if self._slots[slot] is not None:
            raise RequestError(f"slot {slot} is open")
        self._n_tickets += 1
        self._put(slot, Slot.of(request, self._n_tickets))
        return self._n_tickets

    def cancel(self, slot: int) -> None:
        state = self._slots[slot]
        assert state is not None, "only what is open is cancelled"
        self._cancelled.append(DoneRecord(slot, state.ticket, EndReason.CANCELLED, 0.0, 0, 0))
        self._slots = (*self._slots[:slot], None, *self._slots[slot + 1 :])

    def burst(self) -> None:
        """Nothing to launch."""

    def wait(self, timeout_s: float) -> list[Record]:
        records, self._cancelled = self._cancelled, []
        while any(self._slots) and not records:
            if self.n_steps == self.fault_at_step:
                raise FaultError("TIMEOUT on SM 3")
            rows = rows_of_step(self._slots, MAX_ROWS, self._sizes)
            ranges = [(0, self._sizes.n_tokens)]
            merged = merged_partials(self._logits_of(rows), rows, self._bits, self._sizes, ranges)
            self._slots, emitted = accept(self._slots, rows, merged, self._sizes)
            self.n_steps += 1
            records = [decode_record(record_words(one, step=0, sequence=1)) for one in emitted]
        return records

    def leave(self) -> None:
        assert not any(self._slots), "left with open slots"

    def close(self) -> None:
        self.is_closed = True

    def _put(self, index: int, slot: Slot) -> None:
        self._slots = (*self._slots[:index], slot, *self._slots[index + 1 :])


class NetworkLogits:
    """The reference decoder, row by row, over the slots' part of a cross cache."""

    def __init__(self, model: Whisper, cross_cache: torch.Tensor, scores: torch.Tensor) -> None:
        config = model.config
        self._model, self._cross_cache, self._scores = model, cross_cache, scores
        room = (1, config.n_heads, config.n_text_positions, 64)
        self._own = [
            [[torch.zeros(room) for _ in range(config.n_decoder_layers)] for _ in ("keys", "values")]
            for _ in cross_cache
        ]

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        return np.stack([self._logits(row) for row in rows])

    def _logits(self, row: Row) -> NDArray[np.float32]:
        n, n_plain = row.request.n_positions, row.request.n_plain
        bias = torch.zeros(n)
        bias[n_plain:] = row.request.tail_bias
        crossed = self._cross_cache[row.slot, :, :, None, :, :n]  # [layer, 2, 1, H, n, D]
        keys, values = self._own[row.slot]
        cache = DecoderCache(list(crossed[:, 0]), list(crossed[:, 1]), keys, values, bias, n_tokens=row.position)
        hidden = self._model.decoder(torch.tensor([[row.token]]), cache)
        self._scores[row.slot, :, row.position, :n] = torch.stack(cache.alignment_scores)[:, 0, 0] - bias
        return self._model.logits(hidden)[0, 0].numpy()


def on_network(model: Whisper, rules: RuleBook) -> tuple[MegakernelBackend, HostRuntime]:
    """The backend over ``NetworkLogits``."""
    config = model.config
    sizes = decoder_graph(config, rules.special, n_cross_positions=config.n_audio_positions).sizes
    cross_cache = torch.zeros(
        sizes.max_slots, sizes.n_layers, 2, config.n_heads, sizes.n_cross_positions, sizes.head_size
    )
    scores = torch.zeros(sizes.max_slots, 2, sizes.n_positions, sizes.n_cross_positions)
    runtime = HostRuntime(sizes, NetworkLogits(model, cross_cache, scores), bitmaps(rules))
    return backend_on(model, rules, runtime, cross_cache, scores), runtime


def on_evaluate(model: Whisper, rules: RuleBook) -> MegakernelBackend:
    """The backend over the compiled graph's own arithmetic."""
    config = model.config
    graph = decoder_graph(config, rules.special, n_cross_positions=config.n_audio_positions)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    network = network_of(fuse(graph), graph.sizes, as_arrays(graph_constants(graph, tensors)))
    memory = Memory.empty(graph.sizes, network.n_score_heads)

    def logits_of(rows: Sequence[Row]) -> NDArray[np.float32]:
        return evaluate(network, memory, rows)["head"]

    cross_cache, scores = torch.from_numpy(memory.cross_cache), torch.from_numpy(memory.scores)
    return backend_on(model, rules, HostRuntime(graph.sizes, logits_of, bitmaps(rules)), cross_cache, scores)


def backend_on(
    model: Whisper, rules: RuleBook, runtime: HostRuntime, cross_cache: torch.Tensor, scores: torch.Tensor
) -> MegakernelBackend:
    listener = Listener(Stage(model, silent_tail(model), cross_cache), None)
    return MegakernelBackend(runtime, scores, listener, model.config, rules, stream=None)


def engine(model: Whisper, tokenizer: WhisperTokenizer, *offers: Offer[Backend]) -> WhisperEngine:
    return WhisperEngine(Backends(offers, model="small"), model.config, tokenizer, name="small")


@cache
def small() -> tuple[WhisperEngine, WhisperEngine]:
    """The small checkpoint in slots, and on the CPU."""
    model, tokenizer = small_checkpoint()
    rules = rule_book(tokenizer, model.config.n_vocab)
    in_slots = engine(model, tokenizer, Offer("megakernel", lambda: on_network(model, rules)[0]))
    return in_slots, engine(model, tokenizer, Offer("torch-cpu", lambda: TorchBackend(model, rules)))


def chunk(samples: NDArray[np.float32], *, is_final: bool = False) -> Chunk:
    return Chunk(SpeechSpan(0, len(samples)), samples, is_final)


def assert_same(found: Hypothesis, wanted: Hypothesis) -> None:
    assert text_of(found.words) == text_of(wanted.words)
    assert found.language == wanted.language
    times = [(word.start_sample, word.end_sample) for word in found.words]
    assert times == [(word.start_sample, word.end_sample) for word in wanted.words]
    for one, other in zip(found.words, wanted.words, strict=True):
        assert one.confidence == pytest.approx(other.confidence, abs=1e-3)
    if found.quality is not None and wanted.quality is not None:
        assert found.quality.mean_logprob == pytest.approx(wanted.quality.mean_logprob, abs=1e-3)
        assert found.quality.no_speech_probability == pytest.approx(wanted.quality.no_speech_probability, abs=1e-3)


OPTIONS = (
    DecodeOptions(language="en"),
    DecodeOptions(),
    DecodeOptions(language="de", vocabulary=("worst times",), context="it was the best"),
)


def test_windows_in_slots_say_what_the_cpu_says_in_batches_that_streams_join_and_leave() -> None:
    in_slots, on_cpu = small()
    assert in_slots.card.max_batch == 8
    streams: list[tuple[WhisperStream, WhisperStream]] = []
    for step in range(4):
        streams = streams[1:] if step == 3 else streams
        streams += [(in_slots.open(options), on_cpu.open(options)) for options in OPTIONS[: 3 - step]]
        chunks = [chunk(noise(3_000 + 9_000 * step + 500 * index)) for index in range(len(streams))]
        found = in_slots.decode([(stream, one) for (stream, _), one in zip(streams, chunks, strict=True)])
        wanted = on_cpu.decode([(stream, one) for (_, stream), one in zip(streams, chunks, strict=True)])
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)


def test_settled_words_and_drafts_change_nothing_but_the_number_of_steps() -> None:
    model, tokenizer = small_checkpoint()
    backend, runtime = on_network(model, rule_book(tokenizer, model.config.n_vocab))
    in_slots, (_, on_cpu) = engine(model, tokenizer, Offer("megakernel", lambda: backend)), small()
    stream, other = in_slots.open(OPTIONS[0]), on_cpu.open(OPTIONS[0])
    samples = noise(30_000)
    first = in_slots.decode([(stream, chunk(samples))])[0]
    assert_same(first, on_cpu.decode([(other, chunk(samples))])[0])
    settled = Chunk(SpeechSpan(0, 30_000), samples, is_final=False, prefix=first.words[:2])
    n_steps = [runtime.n_steps]
    for _ in range(2):
        again = in_slots.decode([(stream, settled)])[0]
        assert_same(again, on_cpu.decode([(other, settled)])[0])
        n_steps.append(runtime.n_steps)
    assert len(text_of(again.words)) > 10
    assert n_steps[2] - n_steps[1] <= (n_steps[1] - n_steps[0]) // 4  # the second time the draft is what comes out


def test_more_windows_than_slots_are_heard_in_turns_and_slots_come_back() -> None:
    in_slots, on_cpu = small()
    chunks = [chunk(noise(4_000 + 100 * index)) for index in range(11)]
    chunks[4] = chunk(np.zeros(8_000, np.float32))
    for _ in range(2):
        found = in_slots.decode([(in_slots.open(OPTIONS[0]), one) for one in chunks])
        for one, other in zip(found, chunks, strict=True):
            assert_same(one, on_cpu.decode([(on_cpu.open(OPTIONS[0]), other)])[0])


def test_a_recording_is_written_with_timestamps_as_on_the_cpu() -> None:
    model, tokenizer = small_checkpoint()
    rules = rule_book(tokenizer, model.config.n_vocab)
    backends = (on_network(model, rules)[0], TorchBackend(model, rules))
    special = rules.special
    request = WhisperRequest(
        (special.start_of_transcript, special.languages[0], special.transcribe), 0, (), (), 40, n_frames=156
    )
    found, wanted = (
        backend.write([Writing(backend.listen([noise(50_000)])[0], request, rules.timed)])[0] for backend in backends
    )
    assert found.tokens == wanted.tokens
    assert any(token >= special.timestamp_begin for token in found.tokens)
    assert found.has_ended == wanted.has_ended
    assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)
    torch.testing.assert_close(found.attention, wanted.attention, atol=1e-4, rtol=1e-3)


def test_a_request_that_is_refused_takes_no_other_slot_with_it() -> None:
    model, tokenizer = small_checkpoint()
    rules = rule_book(tokenizer, model.config.n_vocab)
    backend, _ = on_network(model, rules)
    audios = [audio for audio in backend.listen([noise(5_000), noise(6_000)]) if audio is not None]
    short = WhisperRequest((rules.special.start_of_transcript,), 0, (), (), 5)
    long = WhisperRequest((rules.special.start_of_transcript,), 0, (3,) * model.config.n_text_positions, (), 5)
    with pytest.raises(RequestError, match="head and prefix: 449"):
        backend.write([Writing(audio, one, rules.plain) for audio, one in zip(audios, (short, long), strict=True)])
    again = backend.write([Writing(audio, short, rules.plain) for audio in audios])
    assert [len(one.tokens) for one in again] == [5, 5]


def test_doubtful_finals_are_tried_again_at_temperatures_the_same_way_each_time() -> None:
    in_slots, _ = small()
    first, second = (
        in_slots.decode([(in_slots.open(OPTIONS[0]), chunk(noise(n), is_final=True)) for n in (9_000, 14_000)])
        for _ in range(2)
    )
    assert first == second
    assert any(hypothesis.quality is not None and hypothesis.quality.temperature > 0 for hypothesis in first)


def test_a_device_that_fails_in_the_middle_leaves_the_streams_to_the_next_backend() -> None:
    model, tokenizer = small_checkpoint()
    rules = rule_book(tokenizer, model.config.n_vocab)
    backend, runtime = on_network(model, rules)
    broken = engine(
        model,
        tokenizer,
        Offer("megakernel", lambda: backend),
        Offer("torch-cpu", lambda: TorchBackend(model, rules)),
    )
    _, on_cpu = small()
    stream, other = broken.open(OPTIONS[0]), on_cpu.open(OPTIONS[0])
    for step in range(3):
        one = chunk(noise(6_000 + 6_000 * step))
        runtime.fault_at_step = runtime.n_steps + 3 if step == 1 else None
        assert_same(broken.decode([(stream, one)])[0], on_cpu.decode([(other, one)])[0])
    assert runtime.is_closed
    assert broken.backend == "torch-cpu"
    assert broken.why == "megakernel failed: FaultError: TIMEOUT on SM 3"


def test_the_compiled_graph_writes_what_the_network_writes() -> None:
    model, tokenizer = small_checkpoint(128)
    rules = rule_book(tokenizer, model.config.n_vocab)
    evaluated = engine(model, tokenizer, Offer("megakernel", lambda: on_evaluate(model, rules)))
    on_cpu = engine(model, tokenizer, Offer("torch-cpu", lambda: TorchBackend(model, rules)))
    for n_samples in (5_000, 20_000):
        found = evaluated.decode([(evaluated.open(OPTIONS[0]), chunk(noise(n_samples)))])[0]
        wanted = on_cpu.decode([(on_cpu.open(OPTIONS[0]), chunk(noise(n_samples)))])[0]
        assert text_of(found.words) == text_of(wanted.words)


@pytest.mark.weights
def test_real_weights_write_the_same_sentence() -> None:
    files = find_model("whisper-tiny.en")
    model, tokenizer = read_model(files), WhisperTokenizer.load(files.tokenizer)
    rules = rule_book(tokenizer, model.config.n_vocab)
    samples, rate_hz = soundfile.read(recording("beckett"), dtype="float32")
    assert rate_hz == SAMPLE_RATE_HZ
    one = chunk(samples[: 3 * SAMPLE_RATE_HZ], is_final=True)
    engines = (
        engine(model, tokenizer, Offer("megakernel", lambda: on_evaluate(model, rules))),
        engine(model, tokenizer, Offer("torch-cpu", lambda: TorchBackend(model, rules))),
    )
    found, wanted = (each.decode([(each.open(DecodeOptions()), one)])[0] for each in engines)
    assert text_of(found.words) == text_of(wanted.words) != ""
    for mine, theirs in zip(found.words, wanted.words, strict=True):
        assert abs((mine.start_sample or 0) - (theirs.start_sample or 0)) <= SAMPLE_RATE_HZ // 10
