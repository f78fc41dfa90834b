import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from gateway.audio_file import AudioFileError, DamagedAudioError, n_channels_of, read_audio, stream_audio
from gateway.ingest import AudioFormat, Ingest
from tests.encoding import encoded

RECORDINGS = Path(__file__).parents[2].parent / "shared" / "audio"
FORMAT_ROWS = (
    [
        row
        for row in map(json.loads, (RECORDINGS / "manifest.jsonl").read_text().splitlines())
        if row["kind"] == "formats"
    ]
    if RECORDINGS.is_dir()
    else []
)
# Nothing in such a file says what it is.
NOT_READ = {"fmt-g722": "no known header"}
RAW = {"fmt-raw-mulaw-8k": AudioFormat("mulaw", 8_000), "fmt-raw-s16be-16k": AudioFormat("s16be", 16_000)}


def tone(rate_hz: int, level: float = 0.5) -> np.ndarray:
    t_s = np.arange(2 * rate_hz) / rate_hz
    return (level * np.sin(2 * np.pi * 440 * t_s)).astype(np.float32)


def written(path: Path, samples: np.ndarray, rate_hz: int, **options: str) -> Path:
    soundfile.write(path, samples, rate_hz, **options)
    return path


@pytest.mark.parametrize(
    ("name", "rate_hz", "options", "tolerance"),
    [
        ("a.wav", 16_000, {}, 1e-4),
        ("a.wav", 48_000, {"subtype": "PCM_24"}, 1e-3),
        ("a.wav", 11_025, {"subtype": "PCM_U8"}, 0.01),
        ("a.wav", 44_100, {"subtype": "DOUBLE"}, 1e-3),
        ("a.wav", 8_000, {"subtype": "ALAW"}, 0.03),
        ("a.flac", 96_000, {}, 1e-3),
        ("a.ogg", 22_050, {}, 0.05),
        ("a.opus", 48_000, {"format": "OGG", "subtype": "OPUS"}, 0.05),
        ("a.aiff", 32_000, {}, 1e-3),
        ("a.au", 16_000, {}, 1e-3),
        ("a.caf", 16_000, {}, 1e-3),
        ("named.raw", 16_000, {"format": "WAV"}, 1e-4),
    ],
)
def test_a_file_gives_its_sound_at_16_khz(
    tmp_path: Path, name: str, rate_hz: int, options: dict[str, str], tolerance: float
) -> None:
    samples, info = read_audio(written(tmp_path / name, tone(rate_hz), rate_hz, **options))
    assert (info.sample_rate_hz, info.n_channels, info.damage, info.n_non_finite) == (rate_hz, 1, None, 0)
    assert len(samples) == 32_000 and samples.dtype == np.float32
    assert np.abs(samples - tone(16_000))[2000:-2000].max() < tolerance


def test_an_mp3_gives_its_sound_within_the_delay_of_its_encoder(tmp_path: Path) -> None:
    samples, info = read_audio(written(tmp_path / "a.mp3", tone(44_100), 44_100))
    assert info.container == "MP3"
    assert 2.0 <= len(samples) / 16_000 < 2.1
    spectrum = np.abs(np.fft.rfft(samples[4_000:20_000]))  # one bin is 1 Hz
    assert np.argmax(spectrum) == 440


def test_channels_are_mixed_down_or_picked(tmp_path: Path) -> None:
    both = np.stack((tone(16_000), np.zeros(32_000, dtype=np.float32)), axis=1)
    path = written(tmp_path / "a.wav", both, 16_000)
    assert np.abs(read_audio(path)[0] - tone(16_000) / 2).max() < 1e-4
    assert np.abs(read_audio(path, channel=0)[0] - tone(16_000)).max() < 1e-4
    assert not read_audio(path, channel=1)[0].any()
    with pytest.raises(AudioFileError, match=r"no channel 2; the file has 0\.\.1"):
        read_audio(path, channel=2)


@pytest.mark.parametrize(
    ("container", "codec", "rate_hz", "named"),
    [
        ("ipod", "aac", 44_100, "mov"),
        ("mp4", "aac", 16_000, "mov"),
        ("webm", "libopus", 48_000, "matroska"),
        ("matroska", "pcm_s16le", 22_050, "matroska"),
        ("adts", "aac", 48_000, "aac"),
    ],
)
def test_containers_of_phones_and_browsers_give_their_sound(
    container: str, codec: str, rate_hz: int, named: str
) -> None:
    samples, info = read_audio(io.BytesIO(encoded(tone(rate_hz)[:, None], container, codec, rate_hz)))
    assert (info.container.split(",")[0], info.sample_rate_hz, info.n_channels, info.damage) == (
        named,
        rate_hz,
        1,
        None,
    )
    assert 2.0 <= len(samples) / 16_000 < 2.2
    spectrum = np.abs(np.fft.rfft(samples[4_000:20_000]))  # one bin is 1 Hz
    assert np.argmax(spectrum) == 440
    assert samples[4_000:20_000].std() == pytest.approx(tone(16_000).std(), rel=0.1)


@pytest.mark.parametrize("n_channels", [2, 8])
def test_each_channel_of_such_a_container_can_be_picked(n_channels: int) -> None:
    t_s = np.arange(96_000)[:, None] / 48_000
    tones = (0.3 * np.sin(2 * np.pi * 100 * (1 + np.arange(n_channels)) * t_s)).astype(np.float32)
    content = encoded(tones, "matroska", "pcm_s16le", 48_000)
    assert n_channels_of(io.BytesIO(content)) == n_channels
    for channel in range(n_channels):
        samples, _ = read_audio(io.BytesIO(content), channel=channel)
        assert np.argmax(np.abs(np.fft.rfft(samples[8_000:24_000]))) == 100 * (channel + 1)


def test_such_a_container_that_breaks_off_is_read_up_to_there() -> None:
    content = encoded(tone(48_000)[:, None], "webm", "libopus", 48_000)
    samples, _ = read_audio(io.BytesIO(content[: len(content) // 2]))
    assert 0.5 < len(samples) / 16_000 < 1.5


def test_a_film_without_sound_is_refused() -> None:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 16
        output.mux(stream.encode(av.VideoFrame(16, 16, "yuv420p")))
        output.mux(stream.encode(None))
    with pytest.raises(AudioFileError, match="it has no audio"):
        read_audio(io.BytesIO(file.getvalue()))


def test_a_playlist_is_never_followed(tmp_path: Path) -> None:
    target = written(tmp_path / "secret.wav", tone(16_000), 16_000)
    with pytest.raises(AudioFileError, match="this is text"):
        read_audio(io.BytesIO(f"#EXTM3U\n#EXTINF:2,\n{target.as_uri()}\n".encode()))


def test_without_pyav_such_containers_are_named_and_what_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(tone(48_000)[:, None], "webm", "libopus", 48_000)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(AudioFileError, match=r"WebM or Matroska file, which is not read here; .* senseway\[media\]"):
        read_audio(io.BytesIO(content))


def test_blocks_and_an_open_file_give_the_samples_of_the_whole_path(tmp_path: Path) -> None:
    path = written(tmp_path / "a.wav", tone(44_100), 44_100)
    expected, _ = read_audio(path)
    for block_s in (0.02, 0.5, 60.0):
        assert np.array_equal(np.concatenate(list(stream_audio(path, block_s=block_s))), expected)
    with path.open("rb") as file:
        assert np.array_equal(read_audio(file)[0], expected)


def test_a_file_gives_the_samples_of_a_stream_of_its_bytes(tmp_path: Path) -> None:
    path = written(tmp_path / "a.wav", tone(44_100), 44_100)
    ingest = Ingest(AudioFormat("s16le", 44_100))
    streamed = [ingest.push(path.read_bytes()[44:]).samples, ingest.flush().samples]
    assert np.array_equal(read_audio(path)[0], np.concatenate(streamed))


def test_headerless_audio_is_read_once_its_format_is_given(tmp_path: Path) -> None:
    path = tmp_path / "a.pcm"
    path.write_bytes(np.stack([np.round(tone(8_000) * 32_767)] * 2, axis=1).astype("<i2").tobytes() + b"\x01")
    samples, info = read_audio(path, raw=AudioFormat("s16le", 8_000, 2))
    assert (info.container, info.coding, info.sample_rate_hz) == ("RAW", "s16le", 8_000)
    assert np.abs(samples - tone(16_000))[300:-300].max() < 1e-3
    picked, _ = read_audio(path, raw=AudioFormat("s16le", 8_000, 2), channel=1)
    assert np.abs(picked - samples).max() < 1e-4


def test_floats_on_the_scale_of_integers_are_scaled_and_stray_ones_are_clipped(tmp_path: Path) -> None:
    loud = written(tmp_path / "loud.wav", tone(16_000) * 32_768, 16_000, subtype="FLOAT")
    assert np.corrcoef(read_audio(loud)[0], tone(16_000))[0, 1] > 0.999
    assert np.abs(read_audio(loud)[0]).max() <= 1
    stray = tone(16_000)
    stray[[10, 5_000]] = 1e9, -1e9
    path = written(tmp_path / "stray.wav", stray, 16_000, subtype="FLOAT")
    difference = np.abs(read_audio(path)[0] - tone(16_000))
    assert np.count_nonzero(difference > 1e-4) == 2 and difference.max() < 2


def test_nan_and_infinity_are_taken_as_silence_and_counted(tmp_path: Path) -> None:
    samples = tone(16_000)
    samples[100:103] = np.nan, np.inf, -np.inf
    mended, info = read_audio(written(tmp_path / "a.wav", samples, 16_000, subtype="FLOAT"))
    assert info.n_non_finite == 3 and not mended[100:103].any()
    assert np.abs(mended - np.where(np.isfinite(samples), samples, 0)).max() < 1e-6


def test_a_wav_whose_writer_never_filled_in_the_sizes_is_read_to_its_end(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.wav", tone(16_000), 16_000).read_bytes()
    unfinished = whole[:4] + bytes(4) + whole[8:40] + bytes(4) + whole[44:]
    assert np.array_equal(read_audio(io.BytesIO(unfinished))[0], read_audio(io.BytesIO(whole))[0])


def test_a_wav_with_nothing_behind_its_header_gives_no_samples(tmp_path: Path) -> None:
    samples, _ = read_audio(written(tmp_path / "a.wav", np.zeros(0, dtype=np.float32), 16_000))
    assert len(samples) == 0


def damaged_flac(tmp_path: Path) -> Path:
    noise = 0.1 * np.random.default_rng(0).normal(size=5 * 44_100)
    content = written(tmp_path / "whole.flac", noise, 44_100).read_bytes()
    path = tmp_path / "damaged.flac"
    path.write_bytes(content[: len(content) * 6 // 10])
    return path


def test_a_damaged_file_gives_its_good_part_and_says_where_it_ends(tmp_path: Path) -> None:
    path = damaged_flac(tmp_path)
    samples, info = read_audio(path)
    assert 2 * 16_000 < len(samples) < 3 * 16_000
    assert info.damage is not None and "damaged about 2." in info.damage
    streamed = []
    with pytest.raises(DamagedAudioError, match="damaged about 2"):
        for block in stream_audio(path):
            streamed.append(block)
    assert np.array_equal(np.concatenate(streamed), samples)


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"This is not audio, it is a letter.\n" * 9, "this is text"),
        ("Žluťoučký kůň ".encode() * 20, "this is text"),
        (b"\x00\x00\x00\x1cftypM4A " + bytes(99), "MP4 or M4A"),
        (b"\x1aE\xdf\xa3" + bytes(99), "WebM or Matroska"),
        (b"%PDF-1.7" + bytes(99), "PDF"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "a WAV file that can't be read"),
        (bytes(range(0x90, 0xF0)) * 30, r"no known header \(it begins with 90 91 92"),
    ],
)
def test_what_is_no_readable_audio_is_named_with_what_is_accepted(tmp_path: Path, content: bytes, seen: str) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    with pytest.raises(AudioFileError, match=seen) as refusal:
        read_audio(path)
    assert "accepted are WAV, FLAC, Ogg (Opus, Vorbis), MP3" in str(refusal.value)
    with pytest.raises(AudioFileError, match=seen):
        next(stream_audio(path))


def test_a_path_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_audio(tmp_path / "none.wav")


@pytest.mark.skipif(not FORMAT_ROWS, reason="needs the recordings in ../shared/audio")
@pytest.mark.parametrize("row", FORMAT_ROWS, ids=lambda row: row["id"])
def test_files_of_all_makes_meet_their_expectation(row: dict[str, object]) -> None:
    path = RECORDINGS / str(row["file"])
    if row["id"] in NOT_READ:
        with pytest.raises(AudioFileError, match=NOT_READ[str(row["id"])]):
            read_audio(path)
        return
    match row["expect"]:
        case "error":
            with pytest.raises(AudioFileError, match="accepted are"):
                read_audio(path)
        case "empty":
            assert len(read_audio(path)[0]) == 0
        case "partial" | "partial-or-error":
            samples, info = read_audio(path)
            assert 0 < len(samples) < 2.235 * 16_000
            assert info.damage is not None or row["expect"] == "partial"
        case "decodes" | "raw":
            samples, info = read_audio(path, raw=RAW.get(str(row["id"])))
            assert info.damage is None and np.isfinite(samples).all()
            assert 0 < np.abs(samples).max() < 1.05
            if str(row["transcript"]).startswith("HE ACTS"):
                assert len(samples) / 16_000 == pytest.approx(2.26, abs=0.07)  # AAC in fragments: its delay stays
        case other:
            raise AssertionError(f"no rule for {other!r}")


@pytest.mark.skipif(not FORMAT_ROWS, reason="needs the recordings in ../shared/audio")
def test_raw_audio_that_is_named_wav_needs_its_format(tmp_path: Path) -> None:
    source = RECORDINGS / "formats" / "fmt-bad-headerless-pcm-named-wav.wav"
    path = Path(shutil.copy(source, tmp_path))
    with pytest.raises(AudioFileError, match="headerless audio if its format is given"):
        read_audio(path)
    samples, _ = read_audio(path, raw=AudioFormat("s16le", 16_000))
    assert len(samples) == path.stat().st_size // 2
