"""Reading recordings: the samples equal the written samples, and errors name the bad file."""

import io
import sys

import fsspec
import numpy as np
import pytest
import soundfile
from recordings import encode_with_ffmpeg

from modeling_supclap import waveform as waveforms
from modeling_supclap.datasets_scripts import decoders
from modeling_supclap.datasets_scripts.audio import (
    BadAudioError,
    MissingDecoderError,
    content_of,
    find_crop,
    header_seconds,
    read_audio,
    read_recording,
    read_row,
    resample,
    to_int16,
)

RATE_HZ = 16_000


def sine(frequency_hz: float, seconds: float, rate_hz: int = RATE_HZ) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency_hz * np.arange(round(seconds * rate_hz)) / rate_hz)


@pytest.fixture
def tone(tmp_path):
    path = tmp_path / "tone.wav"
    soundfile.write(path, sine(440, 1.0), RATE_HZ)
    return path


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def load_clip(source, rate_hz=RATE_HZ, **crop):
    """Load a clip with `read_row`, from a file or from its bytes."""
    row = {"audio_path": str(source)} if not isinstance(source, bytes) else {"audio": {"bytes": source}}
    return read_row(row, rate_hz, **crop)


def test_reads_the_written_samples(tone):
    waveform, rate_hz = read_audio(tone)
    assert rate_hz == RATE_HZ
    assert waveform.dtype == np.float32
    np.testing.assert_allclose(waveform, sine(440, 1.0), atol=1 / 32768)


def test_reads_a_part(tone):
    part, _ = read_audio(tone, offset_seconds=0.25, duration_seconds=0.5)
    np.testing.assert_array_equal(part, read_audio(tone)[0][4000:12000])


@pytest.mark.parametrize(("frames", "crop"), [(100, (100, 0)), (101, (100, 0)), (102, (100, 2)), (99, (99, 0))])
def test_a_recording_that_is_a_hundredth_longer_has_one_crop(frames, crop):
    assert find_crop(frames, 50, 2.0) == crop


def test_channels_are_averaged(tmp_path):
    left, right = sine(440, 0.2), sine(880, 0.2)
    soundfile.write(tmp_path / "five.wav", np.stack([left, right, left, right, left], axis=1), RATE_HZ, "FLOAT")
    np.testing.assert_allclose(read_audio(tmp_path / "five.wav")[0], 0.6 * left + 0.4 * right, atol=1e-6)


@pytest.mark.parametrize(("position", "start"), [(0.0, 0), (0.5, 6000), (1.0, 12000)])
def test_a_long_clip_is_cropped_at_the_given_position(tone, position, start):
    crop = load_clip(tone, max_seconds=0.25, crop_position=position)
    np.testing.assert_array_equal(crop, read_audio(tone)[0][start : start + 4000])


def test_a_short_clip_is_unchanged(tone):
    assert len(load_clip(tone, max_seconds=30.0, crop_position=0.7)) == RATE_HZ


def test_only_a_user_can_name_an_address(tone):
    fsspec.filesystem("memory").pipe("/sounds/tone.wav", tone.read_bytes())
    np.testing.assert_array_equal(read_audio("memory://sounds/tone.wav")[0], read_audio(tone)[0])
    with pytest.raises(FileNotFoundError, match="memory://sounds"):
        read_row({"clip_id": "a", "audio_path": "memory://sounds/tone.wav"}, RATE_HZ)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.wav"):
        read_audio(tmp_path / "nowhere.wav")


def test_text_named_wav_is_refused(tmp_path):
    (tmp_path / "text.wav").write_text("dear diary")
    with pytest.raises(BadAudioError, match=r"text\.wav \(10 bytes\)"):
        read_audio(tmp_path / "text.wav")


@pytest.mark.parametrize(
    ("form", "subtype"), [("OGG", "OPUS"), ("AIFF", "PCM_16"), ("W64", "PCM_24"), ("RF64", "FLOAT"), ("AU", "PCM_16")]
)
@pytest.mark.parametrize("part", [0.3, 0.6, 0.96])
def test_a_truncated_file_is_rejected(form, subtype, part):
    encoded = io.BytesIO()
    soundfile.write(encoded, sine(440, 3.0), RATE_HZ, format=form, subtype=subtype)
    content = encoded.getvalue()
    assert len(read_audio(content)[0]) == 3 * RATE_HZ
    with pytest.raises(BadAudioError, match="the clip"):
        read_audio(content[: int(part * len(content))], name="the clip")


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
def test_an_mp3_without_a_frame_count_is_read_completely(mode):
    waveform = sine(440, 20.0)
    waveform[9 * RATE_HZ :] += 0.2 * np.random.default_rng(0).standard_normal(11 * RATE_HZ)
    encoded = io.BytesIO()
    soundfile.write(encoded, waveform, RATE_HZ, format="MP3", bitrate_mode=mode)
    content = encoded.getvalue()
    second = content.index(content[:2], 2)  # the first frame contains only the number of the other frames
    tag = b"ID3\4\0\0" + bytes([0, 0, 40, 0]) + bytes(40 * 128)
    read, _ = read_audio(tag + content[second:])
    assert len(read) / RATE_HZ == pytest.approx(20.0, abs=0.1)
    assert header_seconds(tag + content[second:]) == pytest.approx(20.0, abs=0.1)


def flac(total_samples):
    """Return four seconds of FLAC with another number of samples in the header, without a checksum."""
    encoded = io.BytesIO()
    soundfile.write(encoded, sine(440, 4.0), RATE_HZ, format="FLAC")
    content = bytearray(encoded.getvalue())
    content[21:26] = bytes(
        [content[21] & 0xF0 | total_samples >> 32, *(total_samples & 0xFFFFFFFF).to_bytes(4, "big")]
    )
    content[26:42] = bytes(16)
    return bytes(content)


def test_a_flac_from_a_pipe_does_not_know_its_length():
    np.testing.assert_allclose(load_clip(flac(0), RATE_HZ), sine(440, 4.0), atol=1 / 32768)
    assert len(load_clip(flac(0), RATE_HZ, max_seconds=0.5, crop_position=1.0)) == RATE_HZ // 2
    assert header_seconds(flac(0)) == 4.0
    with pytest.raises(BadAudioError, match=r"^a recording of 10 bytes .*text"):
        header_seconds(b"dear diary")


def test_a_flac_that_announces_more_than_memory_holds_is_refused():
    with pytest.raises(BadAudioError, match=r"huge\.flac.*64000.*68719476735"):
        read_audio(flac(2**36 - 1), name="huge.flac")


@pytest.mark.parametrize("position", range(42, 62, 4))
def test_a_flac_that_is_damaged_in_its_first_frame_is_named(position):
    content = bytearray(flac(64000))
    start = content.index(b"\xff\xf8", 42) + position - 42
    content[start : start + 40] = bytes(byte ^ 0x5A for byte in content[start : start + 40])
    with pytest.raises(BadAudioError, match=r"broken\.flac"):
        read_row({"audio_path": "broken.flac", "audio": {"bytes": bytes(content)}}, RATE_HZ, max_seconds=1.0)


def test_gsm_is_read_and_cropped(tmp_path):
    soundfile.write(tmp_path / "phone.wav", sine(440, 2.0, 8000), 8000, "GSM610")
    clip = load_clip(tmp_path / "phone.wav", 8000, max_seconds=0.5, crop_position=1.0)
    assert len(clip) == 4000
    assert np.argmax(np.abs(np.fft.rfft(clip))) * 2 == pytest.approx(440, abs=2)


@pytest.mark.parametrize("rate_hz", [11_127, 22_051, 44_101])
def test_odd_rates_need_no_more_memory_than_others(monkeypatch, rate_hz):
    get_resampler = waveforms._resampler

    def get_bounded(from_hz, to_hz, **options):
        assert from_hz * to_hz < 1e7  # about the size of the filter, which takes 6 GB for the original rates
        return get_resampler(from_hz, to_hz, **options)

    monkeypatch.setattr(waveforms, "_resampler", get_bounded)
    waveform = sine(440, 1.0, rate_hz).astype(np.float32)
    resampled = resample(waveform, rate_hz, RATE_HZ)
    assert len(resampled) == RATE_HZ
    np.testing.assert_allclose(resampled[200:-200], sine(440, 1.0)[200:-200], atol=2e-3)


def test_a_wav_without_the_chunks_after_its_audio_is_read(tone):
    content = tone.read_bytes() + b"LIST" + (8).to_bytes(4, "little") + b"INFOISFT"
    content = content[:4] + (len(content) - 8).to_bytes(4, "little") + content[8:]
    assert len(read_audio(content[:-6])[0]) == RATE_HZ


def test_a_streamed_wav_is_not_truncated(tone):
    content = bytearray(tone.read_bytes())
    position = content.index(b"data") + 4
    content[position : position + 4] = (0xFFFFFFFF).to_bytes(4, "little")
    tone.write_bytes(bytes(content))
    assert len(read_audio(tone)[0]) == RATE_HZ


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(0), "empty"),
        (np.zeros(RATE_HZ), "silent"),
        (np.array([0.1, np.nan, 0.2]), r"NaN.*\b1\b"),
        (np.array([0.1, 0.2, np.inf]), r"NaN.*\b2\b"),
        (np.append(np.full(12, 0.1), np.nan), r"NaN.*\b12\b"),
    ],
)
def test_unusable_sound_is_refused(tmp_path, monkeypatch, samples, message):
    monkeypatch.setattr(decoders, "_BLOCK_FRAMES", 5)
    path = tmp_path / "bad.wav"
    soundfile.write(path, samples, RATE_HZ, "FLOAT")
    with pytest.raises(BadAudioError, match=rf"bad\.wav.*{message}"):
        load_clip(path, RATE_HZ)
    if message.startswith("NaN"):  # counted from the beginning of the recording, also if a part is read
        with pytest.raises(BadAudioError, match=rf"bad\.wav.*{message}"):
            read_audio(path, offset_seconds=1 / RATE_HZ)


def test_a_silent_crop_of_a_sounding_recording_is_fine(tmp_path):
    soundfile.write(tmp_path / "late.wav", np.concatenate([np.zeros(RATE_HZ), sine(440, 1.0)]), RATE_HZ)
    assert not load_clip(tmp_path / "late.wav", RATE_HZ, max_seconds=0.5).any()


FORMATS = [("wav", "PCM_16"), ("wav", "PCM_24"), ("flac", "PCM_24"), ("ogg", "VORBIS"), ("mp3", "MPEG_LAYER_III")]


@pytest.mark.parametrize("rate_hz", [8_000, 44_100, 96_000])
@pytest.mark.parametrize(("suffix", "subtype"), FORMATS)
def test_every_format_rate_and_depth_gives_the_same_sound(tmp_path, suffix, subtype, rate_hz):
    if suffix == "mp3" and rate_hz > 48_000:
        pytest.skip("MP3 ends at 48 kHz")
    path = tmp_path / f"stereo.{suffix}"
    soundfile.write(path, np.stack([sine(440, 1.0, rate_hz), sine(660, 1.0, rate_hz)], axis=1), rate_hz, subtype)
    clip = load_clip(path, RATE_HZ)
    middle = slice(2000, 14000)
    expected = (0.5 * (sine(440, 1.0) + sine(660, 1.0)))[middle]
    assert abs(len(clip) - RATE_HZ) < 1200  # MP3 pads
    np.testing.assert_allclose(clip[middle], expected, atol=0.06 if suffix in ("ogg", "mp3") else 5e-3)


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
def test_bytes_and_file_give_the_same_samples(tmp_path, suffix):
    path = tmp_path / f"tone.{suffix}"
    soundfile.write(path, sine(440, 1.0, 44_100), 44_100)
    crop = {"max_seconds": 0.25, "crop_position": 0.5}
    np.testing.assert_array_equal(load_clip(path.read_bytes(), **crop), load_clip(path, **crop))
    truncate(path)
    for source in (path, path.read_bytes()):
        with pytest.raises(BadAudioError, match=rf"tone\.{suffix}"):
            read_audio(source, name=path.name)


def test_errors_for_bytes_contain_no_memory_address():
    messages = []
    for _ in range(2):
        with pytest.raises(BadAudioError, match=r"dog\.wav") as raised:
            read_audio(b"dear diary", name="dog.wav")
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert " 0x" not in messages[0]


class TestFFmpeg:
    """Formats that libsndfile does not support."""

    @pytest.fixture
    def m4a(self, tmp_path):
        content = encode_with_ffmpeg(sine(440, 2.0, 44_100)[None], 44_100, "mp4", "aac")
        (tmp_path / "tone.m4a").write_bytes(content)
        return tmp_path / "tone.m4a"

    def test_m4a(self, m4a):
        waveform, rate_hz = read_audio(m4a)
        assert (len(waveform), rate_hz) == (pytest.approx(88_200, abs=2100), 44_100)
        part = load_clip(m4a.read_bytes(), 44_100, max_seconds=0.5, crop_position=1.0)
        np.testing.assert_allclose(part, waveform[-22_050:], atol=1e-3)

    def test_a_broken_m4a_is_named(self, m4a):
        truncate(m4a)
        with pytest.raises(BadAudioError, match=r"tone\.m4a"):
            read_audio(m4a)

    def test_without_ffmpeg_the_error_names_a_solution(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "av", None)
        monkeypatch.delitem(sys.modules, "modeling_supclap.datasets_scripts.ffmpeg", raising=False)
        (tmp_path / "clip.m4a").write_bytes(b"\0\0\0\x20ftypM4A " + bytes(100))
        with pytest.raises(MissingDecoderError, match=r"clip\.m4a"):
            read_audio(tmp_path / "clip.m4a")
        (tmp_path / "text.m4a").write_text("dear diary")
        with pytest.raises(BadAudioError, match="text") as raised:
            read_audio(tmp_path / "text.m4a")
        assert not isinstance(raised.value, MissingDecoderError)


class Decoder:
    """Decoder of `datasets.Audio`, which is no mapping."""

    def __init__(self, **values):
        self.values = values

    def __getitem__(self, name):
        return self.values[name]


class TestRows:
    """The waveform of a row does not depend on where the row stores the audio."""

    @pytest.mark.parametrize("crop", [{}, {"max_seconds": 0.25, "crop_position": 0.5}])
    @pytest.mark.parametrize(
        "kept", ["path", "bytes", "bytes without path", "only a path", "samples", "decoded", "decoder"]
    )
    def test_all_places_of_the_audio_give_the_same_clip(self, tmp_path, crop, kept):
        tone = tmp_path / "rising.wav"
        soundfile.write(tone, np.linspace(0.1, 1, RATE_HZ) * sine(440, 1.0), RATE_HZ)
        content, (waveform, _) = tone.read_bytes(), read_audio(tone)
        columns = {
            "path": {},
            "bytes": {"audio": {"bytes": content, "path": "tone.wav"}},
            "bytes without path": {"audio": {"bytes": content, "path": None}},
            "only a path": {"audio": {"bytes": None, "path": str(tone)}},
            "samples": {"samples": to_int16(waveform).tobytes(), "sampling_rate_hz": RATE_HZ},
            "decoded": {"audio": {"array": waveform.astype(np.float64), "sampling_rate": RATE_HZ}},
            "decoder": {"audio": Decoder(array=waveform.astype(np.float64), sampling_rate=RATE_HZ)},
        }[kept]
        row = {"clip_id": "a", "audio_path": str(tone) if kept == "path" else "elsewhere/tone.wav", **columns}
        clip = read_row(row, RATE_HZ, **crop)
        assert clip.dtype == np.float32
        start = 6000 if crop else 0
        np.testing.assert_array_equal(clip, waveform[start : start + (4000 if crop else RATE_HZ)])

    def test_the_content_of_a_row_includes_how_to_read_it(self):
        rows = [{"samples": b"abcdefgh", "sampling_rate_hz": rate_hz} for rate_hz in (8000, RATE_HZ)]
        for array in (np.zeros((2, 3)), np.zeros((3, 2)), np.zeros((2, 3), np.int64)):
            rows += [{"audio": {"array": array, "sampling_rate": rate_hz}} for rate_hz in (8000, RATE_HZ)]
        assert len({content_of(row) for row in rows}) == len(rows)
        assert content_of({"audio": Decoder(**rows[2]["audio"])}) == content_of(rows[2])
        for audio, content in (
            ({"bytes": b"x", "path": "b.wav"}, b"x"),
            ({"bytes": None, "path": "b.wav"}, "b.wav"),
            ({"bytes": None, "path": None}, "a.wav"),
            (None, "a.wav"),
        ):
            assert content_of({"audio": audio, "audio_path": "a.wav"}) == content

    def test_one_channel_may_be_chosen(self, tmp_path):
        left, right = sine(440, 0.5), sine(880, 0.5)
        soundfile.write(tmp_path / "a.wav", np.stack([left, right], axis=1), RATE_HZ, "FLOAT")
        row = {"clip_id": "a", "audio_path": str(tmp_path / "a.wav"), "channel": 1}
        np.testing.assert_allclose(read_row(row, RATE_HZ), right, atol=1e-6)
        np.testing.assert_allclose(read_row({**row, "channel": None}, RATE_HZ), (left + right) / 2, atol=1e-6)
        decoded = {"array": np.stack([left, right], axis=1), "sampling_rate": RATE_HZ}
        part = {"clip_id": "a", "audio": decoded, "start_seconds": 0.125, "end_seconds": 0.25, "channel": 1}
        np.testing.assert_allclose(read_row(part, RATE_HZ), right[2000:4000], atol=1e-6)

    def test_a_clip_that_is_too_short_is_named(self):
        stored = {"samples": to_int16(sine(440, 0.1)).tobytes(), "sampling_rate_hz": RATE_HZ}
        row = {"clip_id": "a", "audio_path": "a.wav", **stored}
        assert len(read_row(row, RATE_HZ, min_seconds=0.1)) == 1600
        with pytest.raises(BadAudioError, match=r"^a\.wav \(clip 'a'\) lasts 0\.1000 s; .* at least 0\.15 s$"):
            read_row(row, RATE_HZ, min_seconds=0.15)

    @pytest.mark.parametrize(("seconds", "length"), [(0.1, 2401), (0.2, 3200)])
    def test_a_short_clip_is_padded_if_requested(self, seconds, length):
        stored = {"samples": to_int16(sine(440, seconds)).tobytes(), "sampling_rate_hz": RATE_HZ}
        row = {"clip_id": "a", "audio_path": "a.wav", **stored}
        clip = read_row(row, RATE_HZ, min_seconds=0.15003, pad_short_clips=True)
        assert clip.shape == (length,)
        assert clip.dtype == np.float32
        sound = read_row(row, RATE_HZ)
        np.testing.assert_array_equal(clip[: len(sound)], sound)
        assert not clip[len(sound) :].any()

    def test_a_silent_beginning_is_cut_if_requested(self):
        late = np.concatenate([np.zeros(RATE_HZ), sine(440, 1.0)])
        row = {"clip_id": "a", "samples": to_int16(late).tobytes(), "sampling_rate_hz": RATE_HZ}
        assert not read_row(row, RATE_HZ, 0.5).any()
        clip = read_row(row, RATE_HZ, 0.5, from_first_sound=True)
        np.testing.assert_allclose(clip[:-1], sine(440, 0.5)[1:], atol=1 / 16384)

    def test_stored_samples_are_resampled(self):
        stored = {"samples": to_int16(sine(440, 0.5)).tobytes(), "sampling_rate_hz": RATE_HZ}
        clip = read_row({"clip_id": "a", "audio_path": "a.wav", **stored}, 32_000)
        np.testing.assert_allclose(clip[400:-400], sine(440, 0.5, 32_000)[400:-400], atol=2e-3)

    @pytest.mark.parametrize(
        ("columns", "problem"),
        [
            ({"audio": {"bytes": b"junk", "path": "dog.wav"}}, "4 bytes"),
            ({"samples": bytes(3200), "sampling_rate_hz": RATE_HZ}, "is silent: every sample is zero"),
            ({"samples": b"", "sampling_rate_hz": RATE_HZ}, "is empty: it contains no samples"),
        ],
    )
    def test_errors_name_file_and_clip(self, columns, problem):
        with pytest.raises(BadAudioError, match=rf"audio/dog\.wav \(clip 'dog-1'\).*{problem}"):
            read_row({"clip_id": "dog-1", "audio_path": "audio/dog.wav", **columns}, RATE_HZ)


def test_int16_is_as_exact_as_it_can_be():
    waveform = np.random.default_rng(0).uniform(-0.999, 0.999, 10_000).astype(np.float32)
    np.testing.assert_allclose(to_int16(waveform) / 32768, waveform, rtol=0, atol=0.501 / 32768)
    assert to_int16(np.array([1.7, -1.7], dtype=np.float32)).tolist() == [32767, -32768]


@pytest.mark.parametrize(("from_hz", "to_hz"), [(44_100, 16_000), (16_000, 16_000), (22_050, 48_000)])
def test_a_recording_read_in_parts_is_the_one_read_whole(tmp_path, monkeypatch, from_hz, to_hz):
    path = tmp_path / "noise.wav"
    soundfile.write(path, 0.2 * np.random.default_rng(0).standard_normal(round(9.3 * from_hz)), from_hz, "FLOAT")
    whole = read_recording(str(path), "noise", to_hz)
    # 16 kHz as CED, for which it is prepared
    method = "sinc_interp_hann" if to_hz == 16_000 else "kaiser_best"
    np.testing.assert_array_equal(whole, to_int16(resample(*read_audio(str(path)), to_hz, method)))
    monkeypatch.setattr(decoders, "_BLOCK_FRAMES", 50_000)
    parts = read_recording(str(path), "noise", to_hz)
    assert len(parts) == len(whole)
    assert np.abs(parts.astype(int) - whole).max() <= 1  # except for rounding
