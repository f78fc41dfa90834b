"""Clips survive the way through plain WAV files; what is none is refused."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.clips import FOLDER_VARIABLE, Clip, known_clips, read_clips, recordings_in, write_clip


def test_a_clip_written_is_the_clip_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loud = np.array([0.0, 0.5, -1.0, 1.0], np.float32)
    for clip in (Clip("b", loud), Clip("a", loud[:2])):
        write_clip(clip, tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    first, second = known_clips()
    assert (first.name, second.name) == ("a", "b")
    np.testing.assert_allclose(second.samples, loud, atol=1 / 32768)
    assert second.duration_s == 4 / 16_000


def test_another_rate_is_refused(tmp_path: Path) -> None:
    write_clip(Clip("a", np.zeros(10, np.float32)), tmp_path)
    content = bytearray((tmp_path / "a.wav").read_bytes())
    content[24:28] = (8_000).to_bytes(4, "little")
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(ValueError, match=r"8000.*accepted is \(1, 2, 16000\)"):
        read_clips(tmp_path)


def test_a_folders_recordings_are_read_at_any_rate_and_the_others_named(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    (tmp_path / "below").mkdir()
    soundfile.write(tmp_path / "below" / "a.flac", np.zeros((800, 2), np.float32), 8_000)
    soundfile.write(tmp_path / "below" / "nan.wav", np.full(1_600, np.nan, np.float32), 16_000, subtype="FLOAT")
    (tmp_path / "b.wav").write_bytes(b"no recording")
    (tmp_path / "c.raw").write_bytes(b"\0" * 64)
    (tmp_path / "words.txt").write_text("not looked at")
    clips, unread = recordings_in(tmp_path)
    assert [(clip.name, clip.samples.shape) for clip in clips] == [
        ("below/a.flac", (1600,)),
        ("below/nan.wav", (1600,)),
    ]
    assert all(np.isfinite(clip.samples).all() for clip in clips)
    assert unread == ["b.wav", "c.raw"]
