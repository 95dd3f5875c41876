"""Odd and incomplete files: all of their sound is read, or they are refused by name."""

import base64
import contextlib
import functools
import io
import logging
import multiprocessing
import re
import struct
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import av
import numpy as np
import pytest
import soundfile
from recordings import encode_with_ffmpeg

from modeling_supclap import waveform as waveforms
from modeling_supclap.datasets_scripts import decoders, ffmpeg
from modeling_supclap.datasets_scripts.audio import header_seconds, read_audio
from modeling_supclap.datasets_scripts.decoders import MissingDecoderError, open_recording
from modeling_supclap.waveform import BadAudioError

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
@pytest.mark.parametrize(
    "size", [0, 2**24 + 1, 10**8, 2**31 - 2**24, 2**31, 2**31 + 2**24, 2**32 - 2**24, 2**32 - 4096, 2**32 - 1]
)
def test_a_size_that_is_none_means_all_sound_to_the_end(read, form, size):
    if form == "AIFF" and size == 0:
        pytest.skip("the number of frames is in another place: test_audio_headers.py")
    np.testing.assert_allclose(read(announcing(form, size)), sine(2.0), atol=1 / 16384)


@pytest.mark.parametrize(
    ("missing", "is_whole"), [(1, True), (44, True), (3200, True), (3202, False), (64_000, False), (10**7, False)]
)
def test_a_tenth_of_a_second_may_be_missing(read, missing, is_whole, caplog):
    decoders._noted.clear()
    content = announcing("WAV", 64_000 + missing)
    if is_whole:
        with caplog.at_level(logging.INFO, decoders.__name__):
            assert len(read(content)) == len(read(content)) == 32_000
        note = f"sound.wav: it announces {64_000 + missing} bytes, but it has 64000"
        assert caplog.messages == [note, note]
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]  # warned once
    else:
        with pytest.raises(BadAudioError, match=rf"^sound\.wav is truncated: .*{64_000 + missing} bytes.*64000$"):
            read(content)


def test_a_recording_without_seeking_can_be_read_again(tmp_path):
    content = encode("WAV", "GSM610", rate_hz=8000)
    (tmp_path / "phone.wav").write_bytes(content)
    for source in (content, tmp_path / "phone.wav"):
        recording = open_recording(source, "phone.wav")
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
    with pytest.raises(BadAudioError, match=r"radio\.ogg has no part .*it lasts 3\.0000 s"):
        open_recording(low + high, "radio.ogg", (4.0, None, None))


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


def tagged_mp3(mode="CONSTANT"):
    """Return four seconds of noise, and the place of the number of frames: 126 with that of the tag."""
    noise = 0.2 * np.random.default_rng(0).standard_normal(4 * RATE_HZ)
    encoded = io.BytesIO()
    soundfile.write(encoded, noise, RATE_HZ, format="MP3", bitrate_mode=mode, compression_level=0.5)
    content = encoded.getvalue()
    assert {"CONSTANT": b"Info", "VARIABLE": b"Xing"}[mode] in content[:64]
    return content, re.search(b"Info|Xing", content).start() + 8


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
@pytest.mark.parametrize("number", [0, 1, 5, 60, 110, 2**32 - 1])
def test_a_wrong_number_of_frames_is_not_believed(read, number, mode):
    content, place = tagged_mp3(mode)
    expected = read(content)
    assert len(expected) == 4 * RATE_HZ
    for size in (content[place + 4 : place + 8], (len(content) // 2).to_bytes(4, "big")):
        wrong = content[:place] + number.to_bytes(4, "big") + size + content[place + 8 :]
        waveform = read(wrong, "wrong.mp3")
        assert len(waveform) / RATE_HZ == pytest.approx(4.0, abs=0.1)
        np.testing.assert_allclose(waveform[: len(expected)], expected, atol=1e-3)
        assert header_seconds(wrong) == len(waveform) / RATE_HZ
        part = read(wrong, "wrong.mp3", offset_seconds=2.5, duration_seconds=0.5)
        np.testing.assert_allclose(part, expected[40_000:48_000], atol=1e-3)


def test_the_frame_of_the_tag_may_be_counted(read):
    content, place = tagged_mp3()
    expected = read(content)
    number = int.from_bytes(content[place : place + 4], "big") + 1
    waveform = read(content[:place] + number.to_bytes(4, "big") + content[place + 4 :])
    np.testing.assert_array_equal(waveform[: len(expected)], expected)  # of the same decoder


@pytest.mark.parametrize("flags", [1, 5])
def test_the_number_of_frames_is_compared_with_those_in_the_file(read, flags):
    content, place = tagged_mp3()
    content = content[: place - 1] + bytes([flags]) + content[place : place + 4] + content[place + 8 :]
    content = content[: place + 100] + bytes(4) + content[place + 100 :]  # the frame keeps its size
    assert len(read(content)) / RATE_HZ == pytest.approx(4.0, abs=0.1)
    with pytest.raises(BadAudioError, match=r"cut\.mp3 is truncated: it announces \d+ frames, but it has 76"):
        read(content[: 2 * len(content) // 3], "cut.mp3")


@pytest.mark.parametrize("number", [5, 60, 200])
def test_a_wrong_number_of_frames_of_vbri_is_not_believed(read, number):
    noise = 0.2 * np.random.default_rng(0).standard_normal(4 * 44_100)
    encoded = io.BytesIO()
    soundfile.write(encoded, noise, 44_100, format="MP3", bitrate_mode="CONSTANT")
    content = encoded.getvalue()
    start = content.index(content[:2], 4)
    tag = b"VBRI" + struct.pack(">HHHIIHHHH", 1, 0, 75, len(content), number, 0, 1, 2, 1)
    wrong = (content[:4] + bytes(32) + tag).ljust(start, b"\0") + content[start:]
    assert len(read(wrong, "wrong.mp3")) / 44_100 == pytest.approx(4.0, abs=0.1)
    assert header_seconds(wrong) == pytest.approx(4.0, abs=0.1)


def test_an_mp3_that_announces_more_frames_than_it_has_is_truncated(read):
    with pytest.raises(BadAudioError, match=r"half\.mp3 is truncated"):
        read(encode("MP3", "MPEG_LAYER_III", 8.0)[:-3000], "half.mp3")
    with pytest.raises(BadAudioError, match=r"half\.mp3 is truncated.*400"):
        read(encode("MP3", "MPEG_LAYER_III")[:400], "half.mp3")


def test_damaged_frames_of_mp3_are_named_and_silence_is_not(read, caplog, capfd):
    sound = 0.2 * np.random.default_rng(0).standard_normal(8 * RATE_HZ)
    sound[2 * RATE_HZ : 4 * RATE_HZ] = 0  # encoded silence
    encoded = io.BytesIO()
    soundfile.write(encoded, sound, RATE_HZ, format="MP3")
    whole = encoded.getvalue()
    with caplog.at_level(logging.INFO, decoders.__name__):
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


def test_an_mp3_may_be_silent_for_a_whole_block(read, monkeypatch, caplog):
    sound = 0.2 * np.random.default_rng(0).standard_normal(6 * RATE_HZ)
    sound[RATE_HZ : 4 * RATE_HZ] = 0
    encoded = io.BytesIO()
    soundfile.write(encoded, sound, RATE_HZ, format="MP3")
    whole = read(encoded.getvalue())
    monkeypatch.setattr(decoders, "_BLOCK_FRAMES", RATE_HZ)
    np.testing.assert_array_equal(read(encoded.getvalue()), whole)
    assert not caplog.messages


def test_joined_mp3_may_change_their_channels(read):
    joined = read(bare_mp3(2.0) + bare_mp3(1.0, channels=2), "advert.mp3")
    assert len(joined) / RATE_HZ == pytest.approx(3.0, abs=0.2)
    with pytest.raises(BadAudioError, match=r"advert\.mp3.*16000 and 22050"):
        read(bare_mp3(2.0) + bare_mp3(1.0, 22_050), "advert.mp3")


def test_mp3_in_wav_is_read(read):
    mp3 = bare_mp3(5.0, 44_100)
    form = struct.pack("<HHIIHHHHIHHH", 0x55, 1, 44_100, 8000, 1, 0, 12, 1, 2, 417, 1, 1393)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(mp3)) + mp3
    content = b"RIFF" + struct.pack("<I", len(body)) + body + b"LIST\4\0\0\0INFO"
    assert len(read(content)) / 44_100 == pytest.approx(5.0, abs=0.1)


def chirp(seconds, rate_hz, channels=2):
    """Return different channels, (channels, samples), in which every instant sounds different."""
    times = np.arange(round(seconds * rate_hz)) / rate_hz
    return np.stack(
        [(0.4 - 0.1 * k) * np.sin(2 * np.pi * (300 + 50 * k + 40 * times) * times) for k in range(channels)]
    )


# Container and codec of FFmpeg, sampling rate, and whether the samples are those of the encoder's input.
FFMPEG_FILES = {
    "mp4": ("aac", 44_100, False),
    "matroska": ("aac", 44_100, False),
    "webm": ("libopus", 48_000, False),
    "mov": ("alac", 44_100, True),
    "wv": ("wavpack", 44_100, True),
    "tta": ("tta", 44_100, True),
    "avi": ("mp3", 44_100, False),
    "adts": ("aac", 44_100, False),
    "mpegts": ("aac", 44_100, False),
    "ac3": ("ac3", 48_000, False),
    "flv": ("aac", 44_100, False),
    "asf": ("wmav2", 44_100, False),
}


@functools.cache
def encode_ffmpeg(form, seconds=3.0, channels=2):
    codec, rate_hz, _ = FFMPEG_FILES[form]
    return encode_with_ffmpeg(chirp(seconds, rate_hz, channels), rate_hz, form, codec)


def shifted(waveform, expected, rate_hz):
    """Return the largest difference after the best shift of at most 0.05 s, without the ends."""
    start, reach = rate_hz // 2, rate_hz // 20
    windows = np.lib.stride_tricks.sliding_window_view(waveform[start - reach : start + reach + 500], 500)
    return np.abs(windows - expected[start : start + 500]).max(axis=1).min()


@pytest.mark.parametrize("form", FFMPEG_FILES)
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_formats_of_ffmpeg_are_read_as_the_mean_of_their_channels(form, channels):
    if form in ("avi", "asf") and channels == 6:
        pytest.skip("MP3 and WMA 2 have two channels")
    _, rate_hz, is_lossless = FFMPEG_FILES[form]
    content = encode_ffmpeg(form, channels=channels)
    waveform, _ = read_audio(content)
    expected = chirp(3.0, rate_hz, channels).mean(axis=0)
    assert waveform.dtype == np.float32
    assert len(waveform) / rate_hz == pytest.approx(3.0, abs=0.1)
    tolerance = {"matroska": 400, "webm": 400, "mpegts": 60, "flv": 1300}.get(form, 0)  # of their clocks
    assert header_seconds(content) * rate_hz == pytest.approx(len(waveform), abs=tolerance + 0.5)
    if is_lossless:
        np.testing.assert_allclose(waveform, expected, atol=1 / 128)  # PyAV writes 8 bits
    else:
        assert shifted(waveform, expected, rate_hz) < 0.03


@pytest.mark.parametrize("form", sorted(FFMPEG_FILES.keys() - {"ac3", "mpegts", "flv"}))
def test_a_truncated_file_of_ffmpeg_is_refused(read, form):
    content = encode_ffmpeg(form)
    for share in (0.3, 0.62, 0.9):
        with pytest.raises(BadAudioError, match=rf"sound\.{form}"):
            read(content[: int(share * len(content))], f"sound.{form}")


@pytest.mark.parametrize("form", ["ac3", "mpegts", "flv"])
def test_a_cut_file_that_announces_no_length_is_read_to_the_cut_or_refused(read, form):
    content = encode_ffmpeg(form)
    whole, rate_hz = read_audio(content)
    for share in (0.3, 0.62, 0.9):
        waveform = whole[: int(3.0 * share * rate_hz)]
        with contextlib.suppress(BadAudioError):
            waveform = read(content[: int(share * len(content))], f"sound.{form}")
        assert len(waveform) / rate_hz == pytest.approx(3.0 * share, abs=0.2)
        end = len(waveform) - rate_hz // 10  # a decoder may fade out
        np.testing.assert_allclose(waveform[:end], whole[:end], atol=1e-4)


def test_an_m4a_has_the_samples_that_were_encoded(read):
    rate_hz = 44_100
    signal = chirp(3.0, rate_hz, 1)
    waveform = read(encode_with_ffmpeg(signal, rate_hz, "mp4", "aac"), "a.m4a")
    assert len(waveform) == signal.shape[1]  # without the priming and the padding of AAC
    middle = slice(rate_hz, 2 * rate_hz)
    assert np.std(waveform[middle] - signal[0, middle]) < 0.02
    assert np.std(waveform[middle] - np.roll(signal[0], 10)[middle]) > 0.05


# Eight channels in an order that has no name, 200 samples of 1000, 2000, ... 8000 (made with FFmpeg).
EIGHT_CHANNELS = zlib.decompress(
    base64.b85decode(
        "c-rlky-ve05XUdgK&4h95|wC0q-MwnZ@|!jfq{*MfyLw!C90j2*lh(1jC~9qfsse($Yb;cnBnr##wiGifz2l?cfb4iJN9M(7)0t}cCS1SpaYeM"
        "?lQp;puZBx)W&{4c<a3!u8wBMHz$*^VZ(+E8#Zj%uwlc74gVL@yCe}=wxD+j7mFC7W%h<XBe0-YjalukeV)Lt)}et9m9r_uw`yAMY5$-$(sS0|_w_"
        "?mlDr#oskDhvGiwQf38TOhxPSI>A-8_|Ea5Cho)>|Lc`mbgs(1FUDS?+PMIKU<H55r2QQncFC3?CQK@yqg+|xyR7fi982KZQMxR{5L_VfLEu83cyy5"
        "r=pq>`xhoXc#fzFkoloZYbihC$4#Lp)QZv7uDurEO=|wRdTcK+Eg30o5Msnp5W~7i3z${{>P(Q)K"
    )
)


@pytest.mark.process
def test_many_channels_do_not_end_the_process():
    """PyAV 18.1 corrupts the memory of the process for eight planar channels, and for an unusual order of channels."""
    context = multiprocessing.get_context("spawn")
    files = [EIGHT_CHANNELS] * 5 + [encode_with_ffmpeg(chirp(1.0, 48_000, 8), 48_000, "wv", "wavpack")] * 5
    with context.Pool(1) as pool:
        lengths = pool.map_async(_count_samples, files).get(timeout=120)
    assert lengths == [200] * 5 + [48_000] * 5
    np.testing.assert_allclose(read_audio(EIGHT_CHANNELS)[0], 4500 / 32768, atol=1e-6)


def _count_samples(content):
    return len(read_audio(content)[0])


@pytest.mark.parametrize("form", FFMPEG_FILES)
@pytest.mark.parametrize("start", [0.3, 9.123])
def test_a_part_is_that_part_of_the_whole_and_costs_no_more(form, start, monkeypatch):
    codec, rate_hz, _ = FFMPEG_FILES[form]
    content = encode_ffmpeg(form, 12.0)
    whole, _ = read_audio(content)
    num_decoded = []
    decode = ffmpeg.Track._decode

    def count(track):
        for piece in decode(track):
            num_decoded.append(len(piece[1]))
            yield piece

    monkeypatch.setattr(ffmpeg.Track, "_decode", count)
    part, _ = read_audio(content, offset_seconds=start, duration_seconds=1.0)
    first = round(start * rate_hz)
    difference = np.abs(part - whole[first : first + rate_hz]).max()
    assert difference < (0.02 if codec == "ac3" else 2e-3)  # AC-3 adds noise, AAC too
    seconds_before = 1.0 + 3 * num_decoded[0] / rate_hz
    is_exact = form not in ("matroska", "webm", "wv", "tta")  # others find only some frames
    assert sum(num_decoded) / rate_hz < (1.3 + seconds_before if is_exact else 7.5)


def test_parts_of_variable_frames_with_a_coarse_clock_are_decoded_from_the_beginning(monkeypatch):
    content = encode_ffmpeg("webm", 8.0)
    whole, rate_hz = read_audio(content)
    place = ffmpeg.Track._open

    def open_as_vorbis(track):
        place(track)
        track._is_vorbis = True

    monkeypatch.setattr(ffmpeg.Track, "_open", open_as_vorbis)
    part, _ = read_audio(content, offset_seconds=6.0, duration_seconds=0.5)
    np.testing.assert_array_equal(part, whole[6 * rate_hz :][: rate_hz // 2])


def test_a_part_beyond_the_end_is_refused_and_a_long_one_is_not_padded():
    content = encode_ffmpeg("mp4", 3.0)
    for segment in ((2.0, 4.0, None), (5.0, None, None)):
        with pytest.raises(BadAudioError, match=r"a\.m4a has no part from .*\b3\."):
            open_recording(content, "a.m4a", segment)
    raw = encode_ffmpeg("adts", 3.0)
    with pytest.raises(BadAudioError, match=r"a\.aac"):
        open_recording(raw, "a.aac", (2.0, 4.0, None)).read_mono()
    with pytest.raises(BadAudioError, match=r"^a\.wma has no part from 2 s to 1\.5 s; correct start_seconds$"):
        open_recording(encode_ffmpeg("asf"), "a.wma", (2.0, 1.5, None))  # of unknown length
    for encoded in (content, raw):
        with pytest.raises(BadAudioError, match=r"of \d+ bytes is empty: it contains no samples"):
            read_audio(encoded, offset_seconds=4.0)
    assert len(read_audio(content, offset_seconds=2.0, duration_seconds=9.0)[0]) / 44_100 == pytest.approx(
        1.0, abs=0.05
    )


def test_damaged_packets_are_silent_and_named(read, caplog):
    content = bytearray(encode_with_ffmpeg(chirp(10.0, 44_100), 44_100, "wv", "wavpack"))
    start = content.index(b"wvpk", len(content) // 2)
    content[start + 60 : start + 3000] = b"\xff" * 2940
    with caplog.at_level(logging.WARNING, ffmpeg.__name__):
        waveform = read(bytes(content), "damaged.wv")
    assert len(waveform) == 441_000
    (message,) = caplog.messages
    assert re.match(r"damaged\.wv: 0\.\d+ s", message)
    expected = chirp(10.0, 44_100).mean(axis=0)
    is_wrong = np.abs(waveform - expected) > 0.01
    assert 1000 < is_wrong.sum() < 30_000
    np.testing.assert_allclose(waveform[:100_000], expected[:100_000], atol=1 / 128)
    np.testing.assert_allclose(waveform[-100_000:], expected[-100_000:], atol=1 / 128)


def damage(content, numbers):
    """Overwrite the packets with these numbers, from 0."""
    with av.open(io.BytesIO(content)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(audio=0) if packet.size]
    damaged = bytearray(content)
    for number in numbers:
        start, size = packets[number]
        damaged[start + 2 : start + size] = b"\xff" * (size - 2)
    return bytes(damaged)


@pytest.mark.parametrize("numbers", [range(17, 18), range(18, 19), range(17, 26)])
def test_a_part_after_damaged_packets_is_that_part_of_the_whole(read, numbers):
    """The part from 6 s on is decoded from packet 17 on, or from the beginning if nothing before the part is left."""
    content = damage(encode_with_ffmpeg(chirp(8.0, RATE_HZ, 1), RATE_HZ, "mov", "alac"), numbers)
    whole, part = read(content), read(content, offset_seconds=6.0, duration_seconds=1.0)
    np.testing.assert_array_equal(part, whole[6 * RATE_HZ : 7 * RATE_HZ])
    assert whole[6 * RATE_HZ :].any()


@pytest.mark.parametrize(("num_damaged", "is_read"), [(15, True), (16, True), (17, False)])
def test_a_recording_with_mostly_damaged_packets_is_refused(read, num_damaged, is_read):
    content = encode_with_ffmpeg(chirp(32 * 4096 / RATE_HZ, RATE_HZ, 1), RATE_HZ, "mov", "alac")
    content = damage(content, range(1, num_damaged + 1))
    if is_read:
        assert np.count_nonzero(read(content) == 0) >= num_damaged * 4096
    else:
        with pytest.raises(BadAudioError, match=r"most of its packets are damaged"):
            read(content)


def film(sound_seconds=None, picture_seconds=0.5, codec="pcm_s16le"):
    """Return a video in Matroska, with a sound of 440 Hz or none."""
    encoded = io.BytesIO()
    with av.open(encoded, "w", format="matroska") as container:
        container.metadata["title"] = "déjà"
        pictures = container.add_stream("mpeg4", rate=10, width=64, height=64, pix_fmt="yuv420p")
        sounds = sound_seconds and container.add_stream(codec, rate=RATE_HZ, layout="mono")
        for _ in range(round(10 * picture_seconds)):
            container.mux(pictures.encode(av.VideoFrame(64, 64, "yuv420p")))
        container.mux(pictures.encode(None))
        if sounds:
            samples = (32767 * sine(sound_seconds)).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(samples[None], "s16", "mono")
            frame.sample_rate, frame.pts = RATE_HZ, 0
            resampler = av.AudioResampler(sounds.format, "mono", RATE_HZ, sounds.frame_size or None)
            for part in [*resampler.resample(frame), *resampler.resample(None)]:
                container.mux(sounds.encode(part))
            container.mux(sounds.encode(None))
    return encoded.getvalue()


def test_a_video_without_sound_is_named(read):
    with pytest.raises(BadAudioError, match=r"film\.mkv.*it has no sound"):
        read(film(), "film.mkv")
    content = film(1.0)
    assert content.count(b"A_PCM/INT/LIT") == 1
    with pytest.raises(BadAudioError, match=r"film\.mkv.*its codec is unknown"):
        read(content.replace(b"A_PCM/INT/LIT", b"A_XYZ/INT/LIT"), "film.mkv")


def test_tags_may_have_any_encoding(read):
    content = film(1.0)
    title = "déjà".encode()
    assert title in content
    tagged = content.replace(title, "déjà".encode("latin-1").ljust(len(title)))
    np.testing.assert_array_equal(read(tagged, "film.mkv"), read(content, "film.mkv"))


def test_the_length_of_matroska_is_in_its_tags(read):
    content = encode_ffmpeg("matroska")
    longer = re.sub(rb"00:00:0[23]\.", b"01:02:03.", content)
    assert header_seconds(longer) == pytest.approx(3723 + header_seconds(content) % 1, abs=0.1)
    with pytest.raises(BadAudioError, match=r"film\.mka is truncated: \d+ of \d+ samples could be read"):
        read(longer, "film.mka")


def test_an_ogg_without_its_first_page_is_named(read):
    content = encode("OGG", "VORBIS")
    with pytest.raises(BadAudioError, match=r"cut\.ogg \(.* can be decoded by libsndfile \(Ogg with \[\]\) or FFmpeg"):
        read(content[content.index(b"OggS", 4) :], "cut.ogg")


@pytest.mark.parametrize("without", ["tags", "tags and length"])
@pytest.mark.parametrize("codec", ["pcm_s16le", "mp3"])
@pytest.mark.parametrize("picture_seconds", [None, 3.0])
def test_matroska_without_lengths_is_read_to_its_end(read, picture_seconds, codec, without):
    """Recorders that write while they record announce no length, and FFmpeg then estimates one by the bit rate."""
    if picture_seconds:
        content = film(2.0, picture_seconds, codec)
    else:
        content = encode_with_ffmpeg(sine(2.0)[None], RATE_HZ, "matroska", codec)
    assert content.count(b"DURATION") == 1 + bool(picture_seconds)
    content = content.replace(b"DURATION", b"DURATIOX")
    if without == "tags and length":
        start = content.index(b"\x44\x89\x88")  # a double in the header
        content = content[:start] + b"\xec\x89" + bytes(9) + content[start + 11 :]
    num_samples = len(read(content, "film.mkv"))
    assert 2 * RATE_HZ <= num_samples <= 2.1 * RATE_HZ
    assert header_seconds(content) * RATE_HZ == pytest.approx(num_samples, abs=2000)


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{path}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile {path}\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
        '\xff\xf1<MPD profiles="urn:mpeg:dash:profile:isoff-on-demand:2011"><BaseURL>{path}</BaseURL></MPD>',
    ],
)
def test_a_playlist_opens_no_other_file(read, tmp_path, text):
    soundfile.write(tmp_path / "secret.wav", sine(1.0), RATE_HZ)
    with pytest.raises(BadAudioError, match=r"list\.m4a"):
        read(text.format(path=tmp_path / "secret.wav").encode("latin-1"), "list.m4a")


def test_truncated_avi_is_known_by_its_size(read):
    whole = encode_ffmpeg("avi")
    for size, is_whole in ((0, True), (len(whole) + 900, True), (len(whole) + 1009, False), (2**32 - 1, True)):
        content = whole[:4] + size.to_bytes(4, "little") + whole[8:]
        if is_whole:
            assert len(read(content, "film.avi")) / 44_100 == pytest.approx(3.0, abs=0.1)
        else:
            with pytest.raises(BadAudioError, match=rf"film\.avi is truncated: it announces {size + 8}"):
                read(content, "film.avi")


def test_the_length_of_windows_media_is_not_believed(read):
    """Encoders announce longer ones than decoders return; the size of the packets shows whether a file is whole."""
    content = encode_ffmpeg("asf")
    place = content.index(bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")) + 64
    longer = content[:place] + (9 * 10**7).to_bytes(8, "little") + content[place + 8 :]
    np.testing.assert_array_equal(read(longer, "a.wma"), read(content, "a.wma"))
    assert header_seconds(longer) == pytest.approx(3.0, abs=0.1)
    with pytest.raises(BadAudioError, match=r"a\.wma is truncated: it announces \d+ bytes"):
        read(content[:-2000], "a.wma")
    with pytest.raises(BadAudioError, match=r"a\.wma is truncated: it announces 5000 bytes, but it has 200"):
        read(content[:16] + (5000).to_bytes(8, "little") + content[24:200], "a.wma")  # within a long header


def test_the_time_before_the_first_sample_is_no_sound():
    content = encode_ffmpeg("matroska")
    track = ffmpeg.Track(lambda: io.BytesIO(content), "a")
    whole = track.length
    assert whole is not None

    class Later:
        start_time, duration = track._stream.start_time + 300, None  # milliseconds
        time_base, metadata = track._stream.time_base, track._stream.metadata

    track._stream = Later()
    assert whole - track._announced_length("matroska") == pytest.approx(0.3 * 44_100, abs=100)


def test_threads_read_the_same_file(tmp_path):
    (tmp_path / "a.m4a").write_bytes(encode_ffmpeg("mp4", 6.0))
    whole, _ = read_audio(tmp_path / "a.m4a")
    with ThreadPoolExecutor(8) as pool:
        for waveform, _ in pool.map(read_audio, [tmp_path / "a.m4a"] * 16):
            np.testing.assert_array_equal(waveform, whole)


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_decode_after_their_parent(method):
    content = encode_ffmpeg("mp4")
    expected = len(read_audio(content)[0])
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map_async(_count_samples, [content] * 4).get(timeout=120) == [expected] * 4


@pytest.mark.parametrize("form", ["WAV", "AIFF", "FLAC"])
def test_a_tag_before_the_header_costs_no_sound(read, form):
    tag = b"ID3\4\0\0\0\0\x08\0" + bytes(1024)
    np.testing.assert_array_equal(read(tag + encode(form), "tagged.bin"), read(encode(form), "plain.bin"))


@pytest.fixture
def _without_pyav(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.delitem(sys.modules, ffmpeg.__name__)


@pytest.mark.usefixtures("_without_pyav")
@pytest.mark.parametrize("content", [b"\0\0\0\x20ftypM4A ", b"\x1aE\xdf\xa3", b"MAC \x96\x0f", b"FLV\x01"])
def test_without_pyav_the_extra_is_named(read, content):
    with pytest.raises(MissingDecoderError, match=r"sound\.bin \(.+\) needs FFmpeg.*supclap\[ffmpeg\].*FLAC"):
        read(content + bytes(100), "sound.bin")


@pytest.mark.usefixtures("_without_pyav")
def test_without_pyav_ogg_flac_needs_it_and_other_files_are_read(read):
    with pytest.raises(MissingDecoderError, match=r"a\.oga"):
        read(encode("OGG", "VORBIS").replace(b"\x01vorbis", b"\x7fFLAC\1\0"), "a.oga")
    assert len(read(encode("MP3", "MPEG_LAYER_III"), "a.bin")) / RATE_HZ == pytest.approx(2.0, abs=0.05)
    for form, subtype in (("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "OPUS"), ("OGG", "VORBIS")):
        assert len(read(encode(form, subtype), "a.bin")) == 2 * RATE_HZ


@pytest.mark.usefixtures("_without_pyav")
@pytest.mark.parametrize("number", [0, 1, 5, 110, 2**32 - 1])
def test_without_pyav_a_wrong_number_of_frames_is_not_believed(read, number):
    content, place = tagged_mp3()
    expected = read(content)
    waveform = read(content[:place] + number.to_bytes(4, "big") + content[place + 4 :], "wrong.mp3")
    assert len(waveform) / RATE_HZ == pytest.approx(4.0, abs=0.11)
    lag = np.correlate(waveform[:4000], expected[:2000]).argmax()  # the padding of the encoder
    np.testing.assert_allclose(waveform[lag:][: len(expected)], expected[: len(waveform) - lag], atol=1e-3)


@pytest.mark.usefixtures("_without_pyav")
@pytest.mark.parametrize("after", [b"", b"TAG" + bytes(125), b"APETAGEX" + bytes(5000), bare_mp3()[:1000]])
def test_without_pyav_an_mp3_without_a_tag_is_read_to_its_end(read, after):
    content = bare_mp3() + after
    waveform = read(content, "rip.mp3")
    assert len(waveform) / RATE_HZ == pytest.approx(8.0, abs=0.25)
    assert header_seconds(content) == len(waveform) / RATE_HZ
    np.testing.assert_array_equal(read(content, offset_seconds=5.0, duration_seconds=1.0), waveform[80_000:96_000])


@pytest.mark.usefixtures("_without_pyav")
@pytest.mark.parametrize("after", [bytes(5000) + bare_mp3(), bare_mp3(1.0, channels=2), bare_mp3(1.0, 22_050)])
def test_without_pyav_an_mp3_that_libsndfile_cannot_read_to_its_end_is_refused(read, after):
    with pytest.raises(BadAudioError, match=r"rip\.mp3 .*supclap\[ffmpeg\]"):
        read(bare_mp3() + after, "rip.mp3")


@pytest.mark.usefixtures("_without_pyav")
@pytest.mark.parametrize("content", [encode("WAV")[:20], b"dear diary, " * 20])
def test_a_damaged_or_other_file_is_bad_without_pyav(read, content):
    with pytest.raises(BadAudioError, match=r"^sound\.wav .* is (damaged|not audio, but a text)") as raised:
        read(content)
    assert not isinstance(raised.value, MissingDecoderError)


def test_a_pointer_of_git_lfs_is_named(read):
    with pytest.raises(BadAudioError, match=r"sound\.wav.*Git LFS"):
        read(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 72862\n")


def test_channels_that_cancel_are_not_silence(read, caplog):
    encoded = io.BytesIO()
    soundfile.write(encoded, np.stack([sine(1.0), -sine(1.0)], axis=1), RATE_HZ, format="WAV")
    waveforms._warn_of_cancelled.cache_clear()
    np.testing.assert_allclose(read(encoded.getvalue(), "inverted.wav"), sine(1.0), atol=1e-4)
    assert "inverted.wav" in caplog.text
    for channel, sign in ((0, 1), (1, -1)):
        recording = open_recording(encoded.getvalue(), "a.wav", (None, None, channel))
        np.testing.assert_allclose(recording.read_mono(), sign * sine(1.0), atol=1e-4)
    with pytest.raises(BadAudioError, match=r"a\.wav has no channel 2; expected 0 to 1"):
        open_recording(encoded.getvalue(), "a.wav", (None, None, 2)).read_mono()


@pytest.mark.parametrize("channels", [1, 6])
def test_wave64_with_floats_is_read_correctly(read, channels):
    content = encode_with_ffmpeg(np.repeat(sine(1.0)[None], channels, axis=0), RATE_HZ, "w64", "pcm_f32le")
    np.testing.assert_allclose(read(content, "a.w64"), sine(1.0), atol=1e-6)


@pytest.mark.parametrize("bits", [24, 32])
def test_24_bits_in_four_bytes_are_refused_if_no_decoder_reads_them(read, bits):
    samples = (sine(1.0) * 2**23).astype("<i4")
    body = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, RATE_HZ, 4 * RATE_HZ, 4, bits) + b"data"
    body += struct.pack("<I", samples.nbytes) + samples.tobytes()
    content = b"RIFF" + struct.pack("<I", len(body)) + body
    if bits == 32:
        np.testing.assert_allclose(read(content), sine(1.0) / 256, atol=1e-6)
    else:
        with pytest.raises(BadAudioError, match=r"sound\.wav .*24 bits in 4 bytes"):
            read(content)


@pytest.mark.parametrize(
    ("slack", "missing", "outcome"),
    [
        (0, 0, ""),
        (0, 1, "a: 999 of 1000 samples could be read"),
        (0, 100, "a: 900 of 1000 samples could be read"),
        (0, 101, "a is truncated: 899 of 1000 samples could be read"),
        (30, 30, ""),
        (30, 31, "a: 969 of 970 samples could be read"),
    ],
)
def test_a_recording_may_lack_a_tenth_of_a_second_with_a_note(caplog, monkeypatch, slack, missing, outcome):
    class Reader(decoders.Samples):
        def __init__(self, *samples):
            super().__init__(*samples)
            self.slack = slack

        def blocks(self, start, count):
            yield self._samples[start : self.length - missing]

        def close(self):
            closed.append(True)

    closed = []
    monkeypatch.setattr(decoders, "_noted", set(), raising=False)
    caplog.set_level("INFO")
    sound = decoders.Sound(lambda: Reader(np.full(1000, 0.5, np.float32), 1000), "a")
    if missing > 100:
        with pytest.raises(BadAudioError, match=f"^{outcome}$"):
            sound.read_mono()
    else:
        assert len(sound.read_mono()) == 1000 - missing
        assert caplog.messages == [outcome] * bool(outcome)
    assert closed == [True]


@pytest.mark.parametrize("form", ["WAV", "FLAC", "MP3"])
def test_a_part_of_a_recording_is_decoded_without_the_rest(form, monkeypatch):
    content = encode(form, "MPEG_LAYER_III" if form == "MP3" else "PCM_16", 8.0)
    whole, _ = read_audio(content)
    monkeypatch.setattr(decoders, "_BLOCK_FRAMES", 4000)
    num_read, read = [], soundfile.SoundFile.read
    monkeypatch.setattr(
        soundfile.SoundFile, "read", lambda file, count, **form: num_read.append(count) or read(file, count, **form)
    )
    part = open_recording(content, "a", (2.0, 3.5, None))
    assert part.frames == 24_000
    blocks = list(part.parts())
    assert sum(num_read) == 24_000 + (2**14 if form == "MP3" else 0)
    np.testing.assert_allclose(np.concatenate(blocks), whole[32_000:56_000], atol=0.02 if form == "MP3" else 0)
    np.testing.assert_allclose(part.read_mono(8000, 2000), whole[40_000:42_000], atol=0.02 if form == "MP3" else 0)
    assert len(part.read_mono(20_000)) == 4000
    for count in (None, 100):
        with pytest.raises(BadAudioError, match="a is empty: it contains no samples"):
            part.read_mono(30_000, count)
    assert len(open_recording(content, "a", (7.0, None, None)).read_mono()) == len(whole) - 7 * RATE_HZ
    with pytest.raises(BadAudioError, match="a is empty: it contains no samples"):
        open_recording(content, "a").read_mono(9 * RATE_HZ)
    beyond = open_recording(content, "a", (7.0, len(whole) / RATE_HZ + 0.05, None))
    assert beyond.frames == len(beyond.read_mono()) == len(whole) - 7 * RATE_HZ
    for start, end in ((9.0, None), (7.0, 9.0), (2.0, 2.0)):
        stop = "its end" if end is None else f"{end:g} s"
        with pytest.raises(BadAudioError, match=rf"a has no part from {start:g} s to {stop}: it lasts 8\.\d+ s;"):
            open_recording(content, "a", (start, end, None))


@pytest.mark.parametrize("size", [0, 2**31 - 2**24, 2**31, 2**31 + 2**24, 2**32 - 2**24, 10**9])
def test_a_size_near_a_power_of_two_is_none_for_files_of_any_length(size, caplog):
    with caplog.at_level(logging.INFO, decoders.__name__):
        decoders._refuse_truncated("a", size, 10**9, "bytes")
    assert not caplog.messages
    with pytest.raises(BadAudioError, match="a is truncated"):
        decoders._refuse_truncated("a", 3 * 10**9, 10**9, "bytes")
