"""PE-AV of Meta, audio and text only, as a model for `supclap evaluate`, `search` and `embed`.

    cp examples/pe_av.py . && supclap evaluate --model pe_av:load ...

The published models with video (`pe_audio_video`) and audio-text models (`pe_audio`) of transformers load. As in Meta's
own code, the text embedding is computed from the first token before the final norm of the text encoder. transformers 5
computes it after this norm in `PeAudioModel.forward`, and fails in `get_text_audio_embeds`.
"""

import torch
from transformers import AutoConfig, AutoFeatureExtractor, AutoTokenizer, PeAudioModel

from modeling_supclap.evaluation.fingerprints import settings_text, tokenizer_text, weights_fingerprint
from modeling_supclap.strict_loading import StrictLoadingMixin

NAME = "facebook/pe-av-small"


class PeAudioTowers(StrictLoadingMixin, PeAudioModel):
    """Audio and text towers, without those of video. Missing weights are an error."""

    _keys_to_ignore_on_load_unexpected = [r"(^|_)video_", "^audio_plus_text_"]  # noqa: RUF012, as in transformers


class PeAudio:
    """Embeds waveforms at 48 kHz, and texts."""

    chunk_seconds = 30.0
    min_seconds = 0.05

    def __init__(self, name, device="cpu"):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if config.model_type == "pe_audio_video":
            config = config.audio_config
        self.model = PeAudioTowers.from_pretrained(name, config=config, dtype=torch.float32).eval().to(device)
        self.model.text_model.final_norm = torch.nn.Identity()
        self.extractor = AutoFeatureExtractor.from_pretrained(name, trust_remote_code=False)
        self.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        self.sampling_rate = self.extractor.sampling_rate
        self.device, self.dtype = self.model.device, self.model.dtype
        settings = settings_text([self.model.config.to_dict(), self.extractor.to_dict()])
        self.fingerprint = weights_fingerprint(self.model, settings, tokenizer_text(self.tokenizer))

    @torch.no_grad()
    def encode_audio(self, waveforms, sampling_rate):
        inputs = self.extractor(list(waveforms), sampling_rate=sampling_rate, padding=True, return_tensors="pt")
        embeds = self.model.get_audio_embeds(**inputs.to(self.device))
        return torch.nn.functional.normalize(embeds, dim=-1).cpu().numpy()

    @torch.no_grad()
    def encode_text(self, texts, batch_size=32):
        embeds = []
        for start in range(0, len(texts), batch_size):
            batch = list(texts[start : start + batch_size])
            inputs = self.tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
            inputs.pop("token_type_ids", None)
            outputs = self.model.text_model(**inputs.to(self.device))
            embeds.append(self.model.text_audio_head(outputs.last_hidden_state[:, 0]))
        return torch.nn.functional.normalize(torch.cat(embeds), dim=-1).cpu().numpy()


def load():
    """Return the model for `--model pe_av:load`, on a GPU if there is one."""
    return PeAudio(NAME, "cuda" if torch.cuda.is_available() else "cpu")
