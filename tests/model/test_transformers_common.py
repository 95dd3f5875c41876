"""The common tests of transformers for our classes; `fetch_transformers_tests.py` downloads them.

Skipped tests are listed here with the reason: `NOT_OURS` contains tests of features that none of our classes has, and
`@without` tests that one class cannot pass. Tests skipped by transformers itself (no GPU, or no such field) are in
pytest's report.
"""

# mypy: disable-error-code="name-defined"
# The classes are from the tests of transformers, which are loaded when this file runs.

import os
import re
import unittest
from unittest import mock

import builders
import pytest
import torch
import transformers_suite
from transformers import CONFIG_MAPPING

from modeling_supclap import (
    CEDConfig,
    CEDFeatureExtractor,
    CEDModel,
    SonarTextModel,
    SupCLAPConfig,
    SupCLAPModel,
    SupCLAPProcessor,
)
from modeling_supclap.audio_input import as_waveform

if os.environ.get("SUPCLAP_WITHOUT_COMMON_TESTS"):
    pytest.skip("SUPCLAP_WITHOUT_COMMON_TESTS is set", allow_module_level=True)

modeling = transformers_suite.load("test_modeling_common")
configuration = transformers_suite.load("test_configuration_common")
processing = transformers_suite.load("test_processing_common")
extraction = transformers_suite.load("test_sequence_feature_extraction_common")

NOT_OURS = {
    r"flash_attn|flex_attention|kernels_can": "need packages outside the tested set, and some a GPU of one kind",
    r"deepspeed|model_parallelism": "need packages outside the tested set, or two GPUs",
    r"generat|causal_lm|encoder_decoder|tied_head": "nothing generates text",
    r"router|moe_|batched_and_grouped|model_rope|sliding_window|feed_forward_chunking": "no experts, no such attention",
    r"images$|videos$|(image|video)_features|vision|visual|args_overlap": "no pictures",
    r"chat_template|num_multimodal|mm_data|replacement_offsets": "no chat, and no placeholders in the text",
    r"tp_plan|reverse_loading_mapping|already_mapped": "no tensor-parallel plan, no renamed weights",
    r"resize_position|problem_types": "no such method and no classifier",
}


def test_the_error_without_the_files_names_the_download_command(tmp_path, monkeypatch):
    monkeypatch.setattr("fetch_transformers_tests.CACHE", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"fetch_transformers_tests.py"):
        transformers_suite.load("test_modeling_common")


def applicable(test_class):
    """Remove the tests in `NOT_OURS` from a class."""
    for name in dir(test_class):
        if name.startswith("test_") and any(re.search(pattern, name) for pattern in NOT_OURS):
            setattr(test_class, name, None)
    return test_class


def without(**reasons):
    """Skip single tests of a class, each with a reason."""

    def skip(test_class):
        for name, reason in reasons.items():
            setattr(test_class, name, unittest.skip(reason)(getattr(test_class, name)))
        return applicable(test_class)

    return skip


class Tester:
    """Model description for the common tests: sizes, a configuration and inputs."""

    is_training = True
    batch_size = 3
    num_hidden_layers = 2
    num_attention_heads = 2
    seq_length = 12

    def audio(self):
        generator = torch.Generator().manual_seed(0)
        features = -40 + 20 * torch.randn(self.batch_size, 64, 48, generator=generator)
        inputs = {"input_features": features, "audio_attention_mask": torch.ones(self.batch_size, 48).long()}
        return {name: value.to(modeling.torch_device) for name, value in inputs.items()}

    def text(self):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(5, 90, (self.batch_size, self.seq_length), generator=generator).to(modeling.torch_device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class CEDTester(Tester):
    hidden_size = 32

    def get_config(self):
        return builders.ced_config()

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), self.audio()


class SonarTester(Tester):
    hidden_size = 24

    def get_config(self):
        # M2M100Config describes an encoder-decoder, and the tests would expect its outputs.
        return builders.sonar_config(vocab_size=99, is_encoder_decoder=False)

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), self.text()


class SupCLAPTester(Tester):
    """Two towers. `return_loss` is set, so that there is a loss for training."""

    def __init__(self, text_config):
        self.text_config = text_config

    def get_config(self):
        return builders.supclap_config(self.text_config)

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {**self.text(), **self.audio(), "return_loss": True}


class Towers(modeling.ModelTesterMixin):
    """Settings of all our models."""

    test_can_init_all_missing_weights_before_2023 = True


CHECKED_ONCE = "it tests an argument of transformers; SupCLAPBertTest runs it"
NO_LOSS = "an encoder returns no loss; the two-tower model trains both kinds"


@without(
    test_training=NO_LOSS,
    test_training_gradient_checkpointing=NO_LOSS,
    test_training_gradient_checkpointing_use_reentrant_false=NO_LOSS,
    test_training_gradient_checkpointing_use_reentrant_true=NO_LOSS,
    test_bc_torch_dtype=CHECKED_ONCE,
)
class CEDModelTest(Towers, unittest.TestCase):
    all_model_classes = (CEDModel,)
    test_resize_embeddings = False

    def setUp(self):
        self.model_tester = CEDTester()

    def test_model_get_set_embeddings(self):
        """As in transformers, for a model without a vocabulary."""
        model = CEDModel(self.model_tester.get_config())
        assert model.get_input_embeddings() is model.patch_embed
        assert model.get_output_embeddings() is None


@without(
    test_training=NO_LOSS,
    test_training_gradient_checkpointing=NO_LOSS,
    test_training_gradient_checkpointing_use_reentrant_false=NO_LOSS,
    test_training_gradient_checkpointing_use_reentrant_true=NO_LOSS,
    test_bc_torch_dtype=CHECKED_ONCE,
)
class SonarTextModelTest(Towers, unittest.TestCase):
    all_model_classes = (SonarTextModel,)

    def setUp(self):
        self.model_tester = SonarTester()


OF_THE_TOWERS = "states and attentions are those of a tower: see its own test and test_get_audio_features_*"
TWO_TOWERS = {
    "test_attention_outputs": OF_THE_TOWERS,
    "test_hidden_states_output": OF_THE_TOWERS,
    "test_retain_grad_hidden_states_attentions": OF_THE_TOWERS,
}


class TwoTowers(Towers):
    """Settings of the two-tower model with any text tower."""

    all_model_classes = (SupCLAPModel,)
    additional_model_inputs = ("input_ids",)
    _is_composite = True


@without(**TWO_TOWERS)
class SupCLAPBertTest(TwoTowers, unittest.TestCase):
    def setUp(self):
        self.model_tester = SupCLAPTester(builders.bert_config(vocab_size=99))


@without(**TWO_TOWERS, test_bc_torch_dtype=CHECKED_ONCE)
class SupCLAPSonarTest(TwoTowers, unittest.TestCase):
    def setUp(self):
        self.model_tester = SupCLAPTester(builders.sonar_config(vocab_size=99))


class ConfigTest(unittest.TestCase):
    def test_ced(self):
        fields = {"embed_dim": 32, "num_heads": 2, "depth": 2}
        configuration.ConfigTester(self, CEDConfig, has_text_modality=False, **fields).run_common_tests()

    def test_supclap(self):
        self.model_tester = SupCLAPTester(builders.bert_config(vocab_size=99))
        properties = ["projection_dim", "temperature", "logit_bias", "text_pooling"]
        tester = configuration.ConfigTester(
            self, SupCLAPConfig, has_text_modality=False, common_properties=properties, projection_dim=16
        )
        # The original test uses `AutoConfig`; CED is not registered there, so that the published CED folders load.
        with mock.patch.dict(CONFIG_MAPPING._extra_content, {"ced": CEDConfig}):
            tester.run_common_tests()


class FeatureExtractionTester:
    batch_size = 4
    feature_size = 1
    min_seq_length = 400
    max_seq_length = 1000
    seq_length_diff = 200

    def prepare_feat_extract_dict(self):
        # The tests pad waveforms, which have one value per sample, not spectrograms of 64 bands.
        return {"feature_size": self.feature_size}

    def prepare_inputs_for_common(self, equal_length=False, numpify=False):
        lengths = [self.max_seq_length if equal_length else 400 + 200 * row for row in range(self.batch_size)]
        clips = [builders.noise(length, seed) for seed, length in enumerate(lengths)]
        return clips if numpify else [clip.tolist() for clip in clips]


@applicable
class FeatureExtractionTest(extraction.SequenceFeatureExtractionTestMixin, unittest.TestCase):
    feature_extraction_class = CEDFeatureExtractor

    def setUp(self):
        self.feat_extract_tester = FeatureExtractionTester()


CARRIED = (SupCLAPProcessor, CEDFeatureExtractor)


@applicable
class ProcessorTest(processing.ProcessorTesterMixin, unittest.TestCase):
    processor_class = SupCLAPProcessor

    def setUp(self):
        # The tests pass no sampling rate, which our extractor requires. They also compare saved and loaded
        # configurations, which would differ by the entry `auto_map` for the code in a saved folder.
        def as_waveform_at_16_khz(clip, from_hz, to_hz, name, resampling_method):
            return as_waveform(clip, 16000, to_hz, name, resampling_method)

        at_16_khz = mock.patch("modeling_supclap.audio_input.as_waveform", as_waveform_at_16_khz)
        for patch in (at_16_khz, *(mock.patch.object(kind, "_auto_class", None) for kind in CARRIED)):
            patch.start()
            self.addCleanup(patch.stop)

    @classmethod
    def _setup_feature_extractor(cls):
        return CEDFeatureExtractor()

    @classmethod
    def _setup_tokenizer(cls):
        return builders.bert_tokenizer()

    def prepare_audio_inputs(self, batch_size=None):
        return [builders.noise(4000)] * (batch_size or 1)
