"""The microphone page in a real browser against the real server: fake microphone in, captions and subtitles out.

Voice and silence last until the page shows what a test waits for, so that a slow machine only takes longer.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from models.scripted import ScriptedEngine, recite
from models.store import TWO_CITIES_TEXT, recording
from tests.e2e.devtools import Page, chromium, fake_microphone, open_page
from tests.fetched import engine_of, or_skip
from tests.loudness import LoudnessDetector
from tests.serving import served, sessions_become
from tests.words import error_rate
from vad.audio import SAMPLE_RATE_HZ, seconds
from vad.levels import TwoLevelDetector
from vad.silero import SileroDetector

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(chromium() is None, reason="chromium is not installed"),
]

TEXT = " ".join(f"w{number}" for number in range(400))  # no word twice, so that any slip shows
SCRIPT = recite(TEXT, confidence=0.9)

FINAL_WORDS = "[...document.querySelectorAll('[data-state=final] .word')].map((word) => word.textContent.trim())"
IS_PALER = """(() => {
  const colour = (name) => {
    const word = document.querySelector(`[data-state=partial] .${name}`);
    return word && getComputedStyle(word).color;
  };
  return colour("committed") && colour("tentative") && colour("committed") !== colour("tentative");
})()"""
WATCH_PHASES = """(() => {
  window.phases = [];
  const link = document.querySelector("#link");
  const note = () => link.dataset.phase !== phases.at(-1) && phases.push(link.dataset.phase);
  new MutationObserver(note).observe(link, { attributeFilter: ["data-phase"] });
})()"""
# The device gives voice without end; while its track is off, the page hears silence.
KEEP_TRACK = """{
  const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
  navigator.mediaDevices.getUserMedia = async (constraints) => {
    const stream = await ask(constraints);
    [window.track] = stream.getAudioTracks();
    return stream;
  };
}"""
COVERS_CAPTIONS = """(() => {
  const edge = (selector, side) => document.querySelector(selector).getBoundingClientRect()[side];
  return edge(".notice", "bottom") > edge("#captions", "top");
})()"""
IS_IDLE = "document.body.dataset.phase === 'idle'"


@pytest.fixture
def reciting() -> Iterator[str]:
    """A server whose model recites, and that takes any sound for speech."""
    with served(ScriptedEngine(SCRIPT, flicker=0.5), LoudnessDetector()) as address:
        yield address


def _sound(*durations_s: float) -> NDArray[np.float32]:  # [n_samples]
    """Silence and voice by turns, silence first."""
    rng = np.random.default_rng(1)
    parts = [
        (0.2 * is_voice * rng.standard_normal(round(duration_s * SAMPLE_RATE_HZ))).astype(np.float32)
        for duration_s, is_voice in zip(durations_s, itertools.cycle([0.0, 1.0]), strict=False)
    ]
    return np.concatenate(parts)


def _wav(folder: Path, *durations_s: float) -> Path:
    path = folder / "sound.wav"
    soundfile.write(path, _sound(*durations_s), SAMPLE_RATE_HZ)
    return path


@contextmanager
def _page_with_voice(address: str, folder: Path) -> Iterator[Page]:
    """The page with a microphone that hears a voice but while the test has it ``_pause``."""
    with _page(address, folder, fake_microphone(_wav(folder, 0.0, 4.0), repeats=True), KEEP_TRACK) as page:
        yield page


def _pause(page: Page) -> None:
    page.evaluate("track.enabled = false")


def _go_on(page: Page) -> None:
    page.evaluate("track.enabled = true")


@contextmanager
def _page(address: str, folder: Path, flags: Sequence[str], script: str = "") -> Iterator[Page]:
    """The page with its models loaded; it must have complained of nothing in the end."""
    with open_page(f"http://{address}/", folder / "profile", flags, script) as page:
        page.wait_for("document.querySelector('[name=model]').options.length > 0")
        yield page
        page.evaluate("0")  # brings in what the page still had to say
        assert page.problems == []


def _texts(page: Page, selector: str) -> list[str]:
    texts: list[str] = page.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((element) => element.textContent.trim())"
    )
    return texts


def _screenshots(page: Page, folder: Path, name: str) -> None:
    for scheme in ("light", "dark"):
        page.colour_scheme(scheme)
        page.screenshot(folder / f"{name}-{scheme}.png")


def _is_run_of(words: Sequence[str], text: str) -> bool:
    """Whether ``words`` stand in ``text`` one after the other."""
    return len(words) > 0 and f" {' '.join(words)} " in f" {text} "


def _download(page: Page, part: str, folder: Path) -> str:
    """What a click on one of the transcript's buttons saves."""
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder), eventsEnabled=True)
    page.click(f"[data-part={part}]")
    begun = page.wait_for_event("Browser.downloadWillBegin")
    page.wait_for_event("Browser.downloadProgress", guid=begun["guid"], state="completed")
    page.events.clear()
    return (folder / begun["suggestedFilename"]).read_bytes().decode("utf-8")


def _cues(subtitles: str) -> list[tuple[str, list[str]]]:
    """The time line and the text lines of each cue."""
    blocks = subtitles.replace("\r\n", "\n").removeprefix("WEBVTT\n\n").strip().split("\n\n")
    return [(lines[1], lines[2:]) for lines in (block.split("\n") for block in blocks)]


def _clock(time_s: float) -> str:
    ms = round(time_s * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02},{ms % 1000:03}"


def test_microphone_becomes_captions_and_subtitles(reciting: str, tmp_path: Path) -> None:
    with _page_with_voice(reciting, tmp_path) as page:
        page.size(1280, 800)
        assert page.text("#link") == "Ready"
        _screenshots(page, tmp_path, "ready")

        page.press("r", "KeyR")
        page.wait_for("document.querySelector('#link').dataset.phase === 'live'")
        page.wait_for(IS_PALER)
        page.wait_for("document.querySelectorAll('[data-state=partial] .committed').length > 3")
        assert page.text("#verdict") == "Speech"
        assert _texts(page, "#announcer p") == []

        _pause(page)
        page.wait_for("document.querySelector('[data-state=final]')")
        _go_on(page)
        page.wait_for("document.querySelectorAll('[data-state=partial] .committed').length > 3")
        page.wait_for("document.querySelector('.notice')")
        _screenshots(page, tmp_path, "live")
        page.size(390, 844, scale=2)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert not page.evaluate(COVERS_CAPTIONS)  # the sound is noise, of which the page warns
        _screenshots(page, tmp_path, "phone")

        page.press(" ", "Space")
        page.wait_for(IS_IDLE)
        assert page.text("#link") == "Ready"
        assert sessions_become(reciting, 0)

        paragraphs = [text.split() for text in _texts(page, "[data-state=final] .words")]
        assert len(paragraphs) == 2
        assert all(_is_run_of(words, TEXT) and len(words) > 3 for words in paragraphs)
        assert _texts(page, ".tentative") == ["Pale words may still change."]  # the legend's
        assert _texts(page, "#announcer p") == [" ".join(words) for words in paragraphs]
        assert re.fullmatch(
            r"\d+\.\d\d–\d+\.\d\d s, 90 % sure", page.evaluate("document.querySelector('.segment .word').title")
        )
        assert all(re.fullmatch(r"\d+ ms", page.text(f"#{name}")) for name in ("shown", "settled", "final"))

        words = {word.text.strip(): word for word in SCRIPT}
        for part in ("srt", "vtt"):
            cues = _cues(_download(page, part, tmp_path))
            assert " ".join(" ".join(lines) for _, lines in cues) == " ".join(
                word for words in paragraphs for word in words
            )
            for times, lines in cues:
                assert len(lines) <= 2 and all(len(line) <= 42 for line in lines)
                first = words[lines[0].split()[0]]
                assert first.start_sample is not None and first.end_sample is not None
                # A word that began before its segment begins with it, so the cue may start inside the word.
                earliest, latest = (_clock(seconds(sample)) for sample in (first.start_sample, first.end_sample))
                assert earliest <= times.split(" --> ")[0].replace(".", ",") < latest


def test_lost_connection_is_taken_up_without_losing_or_doubling_a_word(reciting: str, tmp_path: Path) -> None:
    with _page_with_voice(reciting, tmp_path) as page:
        page.click("#record")
        page.wait_for("document.querySelectorAll('.segment .committed').length > 3")
        page.evaluate(WATCH_PHASES)
        for n_times in (1, 2):  # the page gives its socket up, as when the network goes
            page.evaluate("dispatchEvent(new Event('offline'))")
            page.wait_for(f"phases.length === 2 * {n_times}")
        assert page.evaluate("phases") == ["reconnecting", "live"] * 2
        page.wait_for("document.querySelectorAll('.segment .committed').length > 12")
        _pause(page)
        page.wait_for("document.querySelector('[data-state=final]')")
        page.click("#record")
        page.wait_for(IS_IDLE)
        assert len(_texts(page, ".transcript")) == 1
        words = page.evaluate(FINAL_WORDS)
        assert len(words) > 12
        assert _is_run_of(words, TEXT)


def test_file_goes_as_fast_as_the_server_takes_it(reciting: str, tmp_path: Path) -> None:
    path = _wav(tmp_path, *[1.0, 4.0] * 12, 1.0)
    with _page(reciting, tmp_path, []) as page:
        page.evaluate("document.querySelector('#speed').value = 'fast'")
        page.choose_file("#file", path)
        page.wait_for("document.querySelector('[data-state=final]')")
        page.wait_for(IS_IDLE)
        assert page.text("#acked") == "61.0 s"
        assert _texts(page, "[data-part=name]") == [path.name]
        paragraphs = [text.split() for text in _texts(page, "[data-state=final] .words")]
        assert len(paragraphs) == 12
        assert all(_is_run_of(words, TEXT) for words in paragraphs)


def test_settings_that_the_model_lacks_are_disabled_with_a_reason(reciting: str, tmp_path: Path) -> None:
    with _page(reciting, tmp_path, []) as page:
        for name, reason in {
            "vocabulary": "scripted can't be told which words to expect.",
            "translate": "scripted does not translate.",
            "language": "",
        }.items():
            assert page.evaluate(f"document.querySelector('[name={name}]').disabled")
            assert page.text(f"[data-reason={name}]") == reason
        assert page.text("[name=language]") == "English only"


def test_refused_microphone_is_explained(reciting: str, tmp_path: Path) -> None:
    flags = ["--use-fake-device-for-media-stream", "--deny-permission-prompts"]
    with _page(reciting, tmp_path, flags) as page:
        page.click("#record")
        page.wait_for("document.querySelector('[role=alert]')")
        assert "The microphone is blocked" in page.text("[role=alert]")
        assert page.text("#record-label") == "Start"


@pytest.mark.weights
def test_real_model_captions_a_real_voice(tmp_path: Path) -> None:
    engine = engine_of("whisper-tiny.en")
    with or_skip():
        voice = recording("two_cities")
    microphone = fake_microphone(voice)
    with served(engine, TwoLevelDetector(SileroDetector())) as address, _page(address, tmp_path, microphone) as page:
        page.size(1280, 800)
        page.click("#record")
        page.wait_for("document.querySelector('[data-state=partial] .tentative')")
        page.wait_for("document.querySelectorAll('.segment .committed').length > 20")
        _screenshots(page, tmp_path, "voice")
        page.click("#record")
        page.wait_for(IS_IDLE)
        heard = page.evaluate(FINAL_WORDS)
        assert len(heard) > 20
        assert error_rate(" ".join(TWO_CITIES_TEXT.split()[: len(heard)]), " ".join(heard)) < 0.2
