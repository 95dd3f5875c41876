"""Augmentation in training: SpecAugment on the device, and random gain and background recordings for waveforms."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torchaudio.functional import add_noise

from modeling_supclap.datasets_scripts.audio import BadAudioError, read_row
from modeling_supclap.datasets_scripts.audio_files import list_recordings
from modeling_supclap.datasets_scripts.schema import stable_id

from ..processing_supclap import SupCLAPProcessor
from .training_args import SupCLAPTrainingArguments


class SpecAugment:
    """SpecAugment (https://arxiv.org/abs/1904.08779): mask random spans of frames and of mel bands of each clip.

    As in transformers, the number of spans on an axis of length L is max(least, floor(prob * L / length + u)), but at
    most L // length. L excludes padding, and u is uniform in [0, 1). `prob` and `length` are options: `mask_time_...`
    for frames and `mask_feature_...` for mel bands. `least` is 2 for frames and 0 for bands, the defaults of
    transformers. Spans start at different random positions and may overlap. Masked values are set to the mean of the
    clip without padding.

    The masks depend only on the seed, the step and the process, so a resumed run draws the same masks.

    Raises:
        ValueError: The feature extractor returns waveforms, not spectrograms, or a span is longer than any clip.
    """

    def __init__(self, processor: SupCLAPProcessor, args: SupCLAPTrainingArguments) -> None:
        extractor, rate_hz = processor.feature_extractor, processor.feature_extractor.sampling_rate
        # 10 s have more frames than mel bands
        ramp = np.linspace(-1, 1, 10 * rate_hz, dtype=np.float32)
        *_, rows, columns = shape = np.shape(processor(audio=[ramp], sampling_rate=rate_hz)["input_features"])
        if len(shape) < 3:
            raise ValueError(
                f"apply_spec_augment needs spectrograms, but {type(extractor).__name__} returns waveforms; leave it "
                "out, and set the masking in the configuration of the encoder"
            )
        self.time_is_last = columns > rows
        self._time = args.mask_time_prob, args.mask_time_length, 2
        self._bands = args.mask_feature_prob, args.mask_feature_length, 0
        bands, frames = sorted((rows, columns))
        longest = frames * max(1.0, args.max_audio_seconds / 10)
        for axis, unit, most in (("time", "frames of the longest clip", longest), ("feature", "mel bands", bands)):
            length = getattr(args, f"mask_{axis}_length")
            if length > most and getattr(args, f"mask_{axis}_prob") > 0:
                raise ValueError(
                    f"mask_{axis}_length is {length}, so nothing would be masked; it must be at most {most:.0f}, "
                    f"the number of {unit}"
                )
        self._args, self._generator, self._step = args, torch.Generator(args.device), -1

    def __call__(self, features: Tensor, mask: Tensor | None, step: int) -> Tensor:
        """Return the spectrograms with masked spans, in the shape of `features`.

        Args:
            features: (B, ..., frames, bands) or (B, ..., bands, frames).
            mask: (B, frames), 1 for frames of the clip, then 0 for padding. None: no padding.
            step: Number of the training step. It seeds the generator for all batches of the step.
        """
        if step != self._step:
            self._step = step
            self._generator.manual_seed(stable_id(f"{self._args.seed} {step} {self._args.process_index}"))

        spectrograms = features.mT if self.time_is_last else features
        # (B, channels, frames, bands)
        grid = spectrograms.reshape(len(features), -1, *spectrograms.shape[-2:])
        frames, bands = grid.shape[2:]
        mask = grid.new_ones(len(grid), frames, dtype=torch.long) if mask is None else mask
        lengths = mask.sum(dim=1) * frames // mask.shape[1]
        in_time = self._spans(lengths, frames, *self._time)
        in_bands = self._spans(torch.full_like(lengths, bands), bands, *self._bands)

        is_clip = (torch.arange(frames, device=grid.device) < lengths[:, None])[:, None, :, None]
        # (B, 1, frames, bands)
        is_masked = is_clip & (in_time[:, None, :, None] | in_bands[:, None, None, :])
        means = grid.masked_fill(~is_clip, torch.nan).nanmean(dim=(1, 2, 3), keepdim=True)
        masked = torch.where(is_masked, means, grid).view(spectrograms.shape)
        return masked.mT if self.time_is_last else masked

    def _spans(self, lengths: Tensor, size: int, prob: float, length: int, min_masks: int) -> Tensor:
        """Draw random spans in the first `lengths[i]` positions of row i. Return a mask (B, size), True in spans."""
        chances = torch.rand(len(lengths), 1 + size, generator=self._generator, device=lengths.device)
        counts = (prob * lengths / length + chances[:, 0]).long().clamp(min=min_masks)
        counts = torch.minimum(counts, lengths // length) * (prob > 0)

        # The spans start at the positions with the smallest random keys, among those where a span fits.
        positions = torch.arange(size, device=lengths.device)
        keys = chances[:, 1:].masked_fill(positions > (lengths - length)[:, None], 2.0)
        is_start = keys.argsort(dim=1).argsort(dim=1) < counts[:, None]
        return functional.max_pool1d(functional.pad(is_start.float(), (length - 1, 0)), length, stride=1) > 0


class WaveformAugmentation:
    """Waveform augmentation: random gain, and random background recordings from a folder.

    The random numbers depend only on the seed, the epoch and the clip. They are the same for any number of processes
    and in a resumed run.

    Raises:
        FileNotFoundError: `args.background_dir` contains no recordings.
    """

    def __init__(self, args: SupCLAPTrainingArguments, rate_hz: int) -> None:
        self.rate_hz, self.seed, self.gain_db = rate_hz, args.seed, args.random_gain_db
        self.prob, self.snr_db = (args.background_prob, (min(args.background_snr_db), max(args.background_snr_db)))
        self.backgrounds: list[str] = []
        if args.background_dir is not None:
            self.backgrounds = list_recordings(args.background_dir)
            if not self.backgrounds:
                raise FileNotFoundError(f"background_dir {args.background_dir} has no recordings; pass another folder")

    def __call__(self, waveform: np.ndarray, row: Mapping[str, Any], epoch: int) -> np.ndarray:
        """Return the augmented waveform, float32 (samples,). `row` is the dataset row of the clip."""
        key = stable_id(f"{row['clip_id']} {row.get('caption_number')}")
        random = np.random.default_rng([self.seed, epoch, key, row.get("repetition", 0)])
        if self.backgrounds and random.random() < self.prob:
            background = {"clip_id": "background", "audio_path": random.choice(self.backgrounds)}
            seconds, position = len(waveform) / self.rate_hz, random.random()
            try:
                noise = read_row(background, self.rate_hz, seconds, position, from_first_sound=True)
            except BadAudioError as error:
                raise ValueError(f"{error}; remove it from background_dir") from error
            noise = np.resize(noise, len(waveform))  # repeats a short recording
            snr_db = torch.tensor(random.uniform(*self.snr_db))
            waveform = add_noise(torch.from_numpy(waveform), torch.from_numpy(noise), snr_db).numpy()
        return waveform * np.float32(10 ** (random.uniform(-self.gain_db, self.gain_db) / 20))
