"""Odd and incomplete files: all of their sound is read, or they are refused by name."""

import io
import logging
import re
import struct
import sys
import types
from contextlib import closing

import numpy as np
import pytest
import soundfile
import torch

from modeling_supclap.datasets_scripts import decoders
from modeling_supclap.datasets_scripts.audio import header_seconds, measure_audio, read_audio
from modeling_supclap.datasets_scripts.decoders import BadAudioError, MissingDecoderError, cut, open_recording

RATE_HZ = 16_000


def sine(seconds, rate_hz=RATE_HZ, frequency_hz=440.0):
    return 0.5 * np.sin(2 * np.pi * frequency_hz * np.arange(round(seconds * rate_hz)) / rate_hz)


def encode(form, subtype="PCM_16", seconds=2.0, rate_hz=RATE_HZ, channels=1, frequency_hz=440.0):
    encoded = io.BytesIO()
    samples = np.repeat(sine(seconds, rate_hz, frequency_hz)[:, None], channels, axis=1)
    soundfile.write(encoded, samples, rate_hz, subtype, format=form)
    return encoded.getvalue()


def announcing(form, size):
    """Return two seconds of WAV or AIFF with another size in the header."""
    content = bytearray(encode(form))
    position = content.index(b"data" if form == "WAV" else b"SSND") + 4
    content[position : position + 4] = struct.pack("<I" if form == "WAV" else ">I", size)
    return bytes(content)


@pytest.fixture(params=["path", "bytes"])
def read(request, tmp_path):
    """Function that reads the bytes of a recording, from a file or from memory."""

    def read_content(content, name="sound.wav", **part):
        (tmp_path / name).write_bytes(content)
        source = content if request.param == "bytes" else tmp_path / name
        return read_audio(source, name=name, **part)[0]

    return read_content


@pytest.mark.parametrize("form", ["WAV", "AIFF"])
@pytest.mark.parametrize("size", [0, 0x7F000008, 0x7FFFF000, 2**31, 2**31 + 36, 2**32 - 1, 2**32 - 4096, 10**8])
def test_a_size_that_is_none_means_all_sound_to_the_end(read, form, size):
    if form == "AIFF" and size == 0:
        pytest.skip("the number of frames is in another place: test_audio_headers.py")
    np.testing.assert_allclose(read(announcing(form, size)), sine(2.0), atol=1 / 16384)


@pytest.mark.parametrize(
    ("missing", "is_whole"), [(1, True), (44, True), (3000, True), (3400, False), (64_000, False)]
)
def test_a_tenth_of_a_second_may_be_missing(read, missing, is_whole, caplog):
    decoders._noted.clear()
    content = announcing("WAV", 64_000 + missing)
    if is_whole:
        with caplog.at_level(logging.WARNING, decoders.__name__):
            assert len(read(content)) == len(read(content)) == 32_000
        assert [str(64_000 + missing) in message for message in caplog.messages] == [True]  # once
    else:
        with pytest.raises(BadAudioError, match=rf"sound\.wav.*{64_000 + missing}.*64000"):
            read(content)


def test_a_long_recording_without_seeking_can_be_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(decoders, "_WHOLE_BYTES", 0)
    content = encode("WAV", "GSM610", rate_hz=8000)
    (tmp_path / "phone.wav").write_bytes(content)
    for source in (content, tmp_path / "phone.wav"):
        with closing(open_recording(source, "phone.wav")) as recording:
            assert recording.frames == 16_000
            whole = recording.read_mono()
            np.testing.assert_array_equal(recording.read_mono(8000, 100), whole[8000:8100])


@pytest.mark.filterwarnings("error")
def test_damaged_aiff_in_memory_prints_nothing(capfd):
    content = encode("AIFF").replace(b"SSND", b"odd ")  # libsndfile then seeks to -1
    with pytest.raises(BadAudioError, match=r"odd\.aiff"):
        read_audio(content, name="odd.aiff")
    assert not capfd.readouterr().err


@pytest.mark.parametrize("suffix", ["au", "snd", "gsm.wav", "mp3", "txt"])
def test_a_text_is_refused_whatever_its_suffix(read, suffix):
    with pytest.raises(BadAudioError, match=r"text\."):
        read(b"dear diary, " * 200, f"text.{suffix}")


@pytest.mark.parametrize(("codec", "rate_hz"), [("VORBIS", 44_100), ("OPUS", 48_000)])
def test_all_links_of_a_chained_ogg_are_read(read, codec, rate_hz):
    low, high = (encode("OGG", codec, seconds, rate_hz, frequency_hz=hz) for seconds, hz in ((1.0, 440), (2.0, 880)))
    chained = read(low + high, "radio.ogg")
    assert len(chained) == 3 * rate_hz
    np.testing.assert_array_equal(chained, np.concatenate([read(low, "a.ogg"), read(high, "b.ogg")]))
    part = read(low + high, "radio.ogg", offset_seconds=0.75, duration_seconds=0.5)
    np.testing.assert_allclose(part, chained[round(0.75 * rate_hz) :][: rate_hz // 2], atol=1e-4)
    after = read(low + high, "radio.ogg", offset_seconds=1.5)
    assert len(after) == 1.5 * rate_hz


def test_links_of_several_rates_are_refused(read):
    with pytest.raises(BadAudioError, match=r"radio\.ogg.*44100, 48000"):
        read(encode("OGG", "VORBIS", 1.0, 44_100) + encode("OGG", "VORBIS", 1.0, 48_000), "radio.ogg")


@pytest.mark.parametrize("codec", ["VORBIS", "OPUS"])
def test_an_ogg_without_its_end_mark_is_whole(read, codec):
    content = encode("OGG", codec)
    start = content.rfind(b"OggS")
    unmarked = content[: start + 5] + bytes([content[start + 5] & ~4]) + content[start + 6 :]
    np.testing.assert_array_equal(read(unmarked, "voice.ogg"), read(content, "voice.ogg"))


def bare_mp3(seconds=8.0, rate_hz=RATE_HZ, channels=1):
    """Return MP3 of variable bit rate, without the frame that announces the number of the others."""
    noise = np.random.default_rng(0).standard_normal((round(seconds * rate_hz), channels))
    noise[len(noise) // 3 :] *= 1e-3
    encoded = io.BytesIO()
    soundfile.write(encoded, 0.2 * noise, rate_hz, format="MP3", bitrate_mode="VARIABLE")
    content = encoded.getvalue()
    return content[content.index(content[:2], content.index(b"Xing")) :]


@pytest.mark.parametrize(
    "before", [b"", bytes(500), bytes(100_000), bare_mp3()[77:200], b"ID3\4\0\0\0\0\0\x10" + bytes(16)]
)
def test_an_mp3_is_read_to_its_end_after_any_data(read, before):
    assert len(read(before + bare_mp3(), "rip.mp3")) / RATE_HZ == pytest.approx(8.0, abs=0.15)


@pytest.mark.parametrize("number", [0, 5, 2**32 - 1])
def test_a_wrong_number_of_frames_is_not_believed(read, number):
    content = bytearray(encode("MP3", "MPEG_LAYER_III", 4.0))
    place = content.index(b"Info" if b"Info" in content else b"Xing") + 8
    content[place : place + 4] = number.to_bytes(4, "big")
    assert len(read(bytes(content), "wrong.mp3")) / RATE_HZ == pytest.approx(4.0, abs=0.15)
    assert header_seconds(bytes(content)) == pytest.approx(4.0, abs=0.15)


def test_an_mp3_that_announces_more_frames_than_it_has_is_truncated(read):
    with pytest.raises(BadAudioError, match=r"half\.mp3 is truncated"):
        read(encode("MP3", "MPEG_LAYER_III", 8.0)[:-3000], "half.mp3")
    with pytest.raises(BadAudioError, match=r"half\.mp3 is truncated: 0 of"):
        read(encode("MP3", "MPEG_LAYER_III")[:400], "half.mp3")


def test_damaged_frames_of_mp3_are_named_and_silence_is_not(read, caplog, capfd):
    sound = 0.2 * np.random.default_rng(0).standard_normal(8 * RATE_HZ)
    sound[2 * RATE_HZ : 4 * RATE_HZ] = 0  # encoded silence
    encoded = io.BytesIO()
    soundfile.write(encoded, sound, RATE_HZ, format="MP3")
    whole = encoded.getvalue()
    with caplog.at_level(logging.WARNING, decoders.__name__):
        assert np.count_nonzero(read(whole, "whole.mp3") == 0) > RATE_HZ
        assert not caplog.messages
        assert not capfd.readouterr().err

        frames = [match.start() for match in re.finditer(re.escape(whole[:2]), whole)]
        for start in (frames[-75], frames[-3]):  # within the sound, and at its end
            side_information = slice(start + 4, start + 13)
            damaged = bytearray(whole)
            damaged[side_information] = b"\xff" * 9
            waveform = read(bytes(damaged), "damaged.mp3")
            assert len(waveform) == len(read(whole, "whole.mp3"))
            assert "libmpg123" in capfd.readouterr().err
            (message,) = caplog.messages
            assert message.startswith("damaged.mp3: 0.0"), message
            caplog.clear()

        # libmpg123 also decodes, and reports, frames before a part of the recording
        damaged = bytearray(whole)
        damaged[frames[-75] + 4 : frames[-75] + 13] = b"\xf7" * 9
        read(bytes(damaged), "part.mp3", offset_seconds=(len(frames) - 60) * 576 / RATE_HZ, duration_seconds=1)
        assert "libmpg123" in capfd.readouterr().err
        assert "part.mp3" in caplog.text


def test_joined_mp3_may_change_their_channels(read):
    joined = read(bare_mp3(2.0) + bare_mp3(1.0, channels=2), "advert.mp3")
    assert len(joined) / RATE_HZ == pytest.approx(3.0, abs=0.2)
    with pytest.raises(BadAudioError, match=r"advert\.mp3.*16000, 22050"):
        read(bare_mp3(2.0) + bare_mp3(1.0, 22_050), "advert.mp3")


def test_mp3_in_wav_is_read(read):
    mp3 = bare_mp3(5.0, 44_100)
    form = struct.pack("<HHIIHHHHIHHH", 0x55, 1, 44_100, 8000, 1, 0, 12, 1, 2, 417, 1, 1393)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(mp3)) + mp3
    content = b"RIFF" + struct.pack("<I", len(body)) + body + b"LIST\4\0\0\0INFO"
    assert len(read(content)) / 44_100 == pytest.approx(5.0, abs=0.1)


@pytest.fixture
def ffmpeg(monkeypatch):
    """Replace torchcodec by a decoder of `decoded` stereo samples; the header announces `announced` seconds."""
    state = types.SimpleNamespace(decoded=RATE_HZ, announced=None, calls=0)

    class AudioDecoder:
        def __init__(self, source):
            state.calls += 1
            self._decoder = self
            self.metadata = types.SimpleNamespace(duration_seconds_from_header=state.announced, sample_rate=RATE_HZ)

        def get_all_samples(self):
            return types.SimpleNamespace(data=samples(), sample_rate=RATE_HZ)

    def samples():
        ramp = torch.linspace(0, 1, state.decoded)
        return torch.stack([ramp, ramp / 2])

    def get_frames(decoder, start_seconds, stop_seconds):
        first = int(start_seconds * RATE_HZ) // 1024 * 1024  # whole frames
        stop = -(-round(stop_seconds * RATE_HZ) // 1024) * 1024
        if first >= state.decoded:
            raise RuntimeError("No audio frames were decoded")
        return samples()[:, first:stop], torch.tensor(first / RATE_HZ)

    modules = {name: types.ModuleType(name) for name in ("torchcodec", "torchcodec.decoders", "torchcodec._core")}
    modules["torchcodec.decoders"].AudioDecoder = AudioDecoder
    modules["torchcodec._core"].get_frames_by_pts_in_range_audio = get_frames
    modules["torchcodec"]._core = modules["torchcodec._core"]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return state


FFMPEG_FILES = {
    "m4a": b"\0\0\0\x20ftypM4A " + bytes(100),
    "webm": b"\x1aE\xdf\xa3" + bytes(100),
    "wma": b"0&\xb2u\x8ef\xcf\x11" + bytes(100),
    "ape": b"MAC \x96\x0f" + bytes(100),
    "oga": encode("OGG", "VORBIS").replace(b"\x01vorbis", b"\x7fFLAC\1\0"),
    "avi": b"RIFF\0\0\0\0AVI LIST" + bytes(100),
}


@pytest.mark.parametrize("suffix", FFMPEG_FILES)
def test_every_ffmpeg_decode_is_compared_with_its_header(read, ffmpeg, suffix):
    content, name = FFMPEG_FILES[suffix], f"sound.{suffix}"
    for announced in (None, 1.0, 1.09):
        ffmpeg.announced = announced
        np.testing.assert_allclose(read(content, name), 0.75 * np.linspace(0, 1, RATE_HZ), atol=1e-6)
    ffmpeg.announced = 1.2
    with pytest.raises(BadAudioError, match=rf"sound\.{suffix} is truncated: 16000 of 19200"):
        read(content, name)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("The best audio stream is unknown and there is no specified stream. ", "without sound"),
        ("No audio frames were decoded. Probably because start_seconds is too high(0)", "no frame"),
    ],
)
def test_messages_of_ffmpeg_are_replaced_by_reasons(read, ffmpeg, monkeypatch, problem, reason):
    def fail(source):
        raise RuntimeError(problem)

    monkeypatch.setattr(sys.modules["torchcodec.decoders"], "AudioDecoder", fail)
    with pytest.raises(BadAudioError, match=rf"film\.webm.*{reason}"):
        read(FFMPEG_FILES["webm"], "film.webm")


def test_the_length_of_a_chain_is_counted_and_not_announced(ffmpeg):
    ffmpeg.announced, ffmpeg.decoded = 1.0, 2 * RATE_HZ
    assert header_seconds(FFMPEG_FILES["oga"]) == 1.0
    assert header_seconds(2 * FFMPEG_FILES["oga"]) == 2.0


def test_truncated_containers_of_ffmpeg_are_refused(read, ffmpeg):
    with pytest.raises(BadAudioError, match=r"flac\.oga is truncated"):
        read(FFMPEG_FILES["oga"][:-100], "flac.oga")
    for size, is_whole in ((0, True), (100, True), (1100, True), (1109, False), (2**32 - 1, True)):
        content = b"RIFF" + size.to_bytes(4, "little") + FFMPEG_FILES["avi"][8:]
        if is_whole:
            assert len(read(content, "film.avi")) == RATE_HZ
        else:
            with pytest.raises(BadAudioError, match=rf"film\.avi is truncated: it announces {size + 8}"):
                read(content, "film.avi")


@pytest.mark.parametrize("form", ["WAV", "AIFF", "FLAC"])
def test_a_tag_before_the_header_costs_no_sound(read, form):
    tag = b"ID3\4\0\0\0\0\x08\0" + bytes(1024)
    np.testing.assert_array_equal(read(tag + encode(form), "tagged.bin"), read(encode(form), "plain.bin"))


@pytest.mark.parametrize("suffix", FFMPEG_FILES)
def test_without_ffmpeg_the_format_and_a_solution_are_named(read, monkeypatch, suffix):
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(MissingDecoderError, match=rf"sound\.{suffix} \(.+\) needs FFmpeg.*FLAC"):
        read(FFMPEG_FILES[suffix], f"sound.{suffix}")


def test_a_damaged_wav_is_bad_without_ffmpeg(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(BadAudioError, match=r"sound\.wav") as raised:
        read(encode("WAV")[:20])
    assert not isinstance(raised.value, MissingDecoderError)


def test_a_long_recording_of_ffmpeg_is_decoded_in_blocks(ffmpeg, monkeypatch):
    monkeypatch.setattr(decoders, "_WHOLE_SECONDS", 1.0)
    monkeypatch.setattr(decoders, "_BLOCK_SECONDS", 0.3)
    ffmpeg.decoded, ffmpeg.announced = 50_000, 50_000 / RATE_HZ
    expected = 0.75 * np.linspace(0, 1, 50_000)
    recording = open_recording(FFMPEG_FILES["webm"], "long.webm")
    blocks = list(recording.parts())
    assert max(map(len, blocks)) < 0.5 * RATE_HZ
    np.testing.assert_allclose(np.concatenate(blocks), expected, atol=1e-6)
    np.testing.assert_allclose(recording.read_mono(20_000, 9_000), expected[20_000:29_000], atol=1e-6)
    assert measure_audio(FFMPEG_FILES["webm"], "long.webm") == (50_000 / RATE_HZ, True)
    ffmpeg.announced = 4.0
    with pytest.raises(BadAudioError, match="50000 of 64000"):
        read_audio(FFMPEG_FILES["webm"], name="long.webm")


def test_ffmpeg_gets_no_playlist(read, ffmpeg):
    with pytest.raises(BadAudioError, match=r"list\.m4a"):
        read(b"    ftyp#EXTM3U\n/etc/passwd\n", "list.m4a")
    assert not ffmpeg.calls


@pytest.mark.parametrize("form", ["WAV", "FLAC", "MP3"])
def test_a_part_of_a_recording_is_decoded_without_the_rest(form, monkeypatch):
    content = encode(form, "MPEG_LAYER_III" if form == "MP3" else "PCM_16", 8.0)
    whole, _ = read_audio(content)
    monkeypatch.setattr(decoders, "_BLOCK_FRAMES", 4000)
    with closing(cut(open_recording(content, "a"), 2.0, 3.5)) as part:
        assert part.frames == 24_000
        blocks = list(part.parts())
        np.testing.assert_allclose(np.concatenate(blocks), whole[32_000:56_000], atol=0.02 if form == "MP3" else 0)
        np.testing.assert_allclose(part.read_mono(8000, 2000), whole[40_000:42_000], atol=0.02 if form == "MP3" else 0)
        assert len(part.read_mono(20_000)) == 4000
    assert len(cut(open_recording(content, "a"), 7.0, None).read_mono()) == len(whole) - 7 * RATE_HZ
    for start, end in ((9.0, None), (7.0, 9.0)):
        with pytest.raises(BadAudioError, match=r"a has no part from .*\b8\."):
            cut(open_recording(content, "a"), start, end)


@pytest.mark.parametrize("size", [0, 0x7F000008, 0x7FFFF000, 2**31, 2**32 - 4096])
def test_a_size_near_a_power_of_two_is_none_for_files_of_any_length(size):
    assert decoders._is_placeholder(size, 10**9)
    assert not decoders._is_placeholder(3 * 10**9, 10**9)  # truncated
