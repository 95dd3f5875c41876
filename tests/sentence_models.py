"""Tiny models of sentence-transformers: one with its module in its own code, and EmbeddingGemma 2."""

import json

import builders
import torch

# Padding changes the embeddings of this model.
CODE = """
import torch
from sentence_transformers.base.modules import InputModule


class Levels(InputModule):
    save_in_root, config_keys = True, []
    modalities = ["text", "audio"]
    sampling_rate = 32_000

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def preprocess(self, inputs, prompt=None, **options):
        sounds = [x if isinstance(x, str) else x["array"] for x in inputs]
        values = [len(x) if isinstance(x, str) else 1000 * abs(x).mean() for x in sounds]
        padded = torch.zeros(len(sounds), max(len(x) for x in sounds))
        return {"values": torch.tensor(values, dtype=torch.float32), "input_ids": padded}

    def forward(self, features, **options):
        values = features["values"]
        width = self.scale.expand(len(values)) * features["input_ids"].shape[1]
        features["sentence_embedding"] = torch.stack([values, width], 1)
        return features

    def save(self, path, *args, **kwargs):
        pass

    @classmethod
    def load(cls, path, **options):
        return cls()
"""


def save_code(folder, code=CODE):
    """Save a model that has its module in its own code, and return the folder."""
    folder.mkdir()
    (folder / "levels.py").write_text(code)
    module = {"idx": 0, "name": "0", "path": "", "type": "levels.Levels"}
    (folder / "modules.json").write_text(json.dumps([module]))
    return folder


def save_gemma2(folder):
    """Save a tiny EmbeddingGemma 2 in the published layout, with audio and without vision. It requires torchvision."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    kinds = ("image", "boi", "eoi", "audio", "boa", "eoa")
    names = {f"{kind}_token": f"<{kind}>" for kind in kinds}
    tokenizer = builders.gpt2_tokenizer()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer.add_special_tokens({"additional_special_tokens": [*names.values(), "<|video|>"], **special})
    tokenizer.save_pretrained(folder / "tokenizer")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", extra_special_tokens=names)

    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    width = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 8, "num_global_key_value_heads": 1}
    text = {"vocab_size": len(tokenizer), "intermediate_size": 32, "hidden_size_per_layer_input": 8}
    text |= {"embedding_dim": 16, "pad_token_id": tokenizer.pad_token_id, **width, **heads}
    audio = {"model_type": "gemma4_audio", "subsampling_conv_channels": [128, 4], "output_proj_dims": 16, **width}
    torch.manual_seed(0)
    config = transformers.EmbeddingGemma2Config(text_config=text, audio_config=audio, vision_config=None, **ids)
    transformers.EmbeddingGemma2Model(config).save_pretrained(folder / "source")

    processor = transformers.EmbeddingGemma2Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        transformers.Gemma4ImageProcessor(),
        tokenizer,
        transformers.EmbeddingGemma2VideoProcessor(),
        chat_template="{% for message in messages %}{% for part in message.content %}"
        "{{ part.text if part.type == 'text' else '<audio>' }}{% endfor %}{% endfor %}",
    )
    processor.save_pretrained(folder / "source")
    modules = [Transformer(str(folder / "source")), Pooling(16), Normalize()]
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save_pretrained(str(folder / "model"))
    return folder / "model"
