"""Partial training: exactly the selected parameters train, and merged adapters change only the weights."""

import json
import re
from types import SimpleNamespace
from typing import Any

import builders
import open_clip_folders as folders
import peft
import pytest
import torch
import transformers
from audio_encoders import make_encoder
from peft import IA3Config, LNTuningConfig, LoHaConfig, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from test_trainer import QUICK, arguments, build
from transformers import BertConfig, ClapAudioConfig, ClapTextConfig, DistilBertConfig, XLMRobertaConfig

from modeling_supclap import CNN14Config, SupCLAPConfig, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.conversion import supclap_from_clap
from modeling_supclap.losses import StaticRadius
from modeling_supclap.recipes import convert_checkpoint
from modeling_supclap.training import lora
from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.lora import (
    active_adapters,
    add_lora,
    block_names,
    merge_lora,
    merged_copy,
    save_adapter,
    train_last_layers,
    trainable_table,
    unwrap_adapters,
    whole_weights,
)
from modeling_supclap.training.trainer import SupCLAPTrainer

SIZES = {"vocab_size": 300, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
QUIET = {"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PROJECTIONS = ["audio_projection", "text_projection", "logit_scale"]
LAST_OF_CED = ["audio_model.blocks.1", "audio_model.norm"]


def bert():
    return builders.supclap_model()


def bert_with_pooler():
    return builders.supclap_model(builders.supclap_config(text_pooling="pooler", logit_bias=-10.0))


def sonar():
    return builders.supclap_model(builders.supclap_config(builders.sonar_config()))


def xlm_roberta():
    return builders.supclap_model(builders.supclap_config(XLMRobertaConfig(**SIZES, **QUIET)))


def distilbert():
    text = DistilBertConfig(vocab_size=300, dim=24, n_layers=2, n_heads=2, hidden_dim=48)
    return builders.supclap_model(builders.supclap_config(text))


def dense():
    layer = {"out_features": 12, "activation": "tanh", "bias": True}
    return builders.supclap_model(builders.supclap_config(text_dense=[layer]))


def clap2():
    return folders.build("B")[0]


def clap():
    return supclap_from_clap(builders.clap_model())


def moved(model, train):
    """Return the names of the tensors, including statistics, that `train` changes."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train()
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def embeds(model):
    inputs = {"input_features": torch.linspace(-60, 0, 3 * 64 * 101).reshape(3, 64, 101)}
    with torch.no_grad():
        out = model.eval()(**inputs, input_ids=torch.arange(5, 20).reshape(3, 5))
    return out.audio_embeds, out.text_embeds, out.logits_per_audio


# ---- whole blocks ----


@pytest.mark.parametrize(
    ("model", "tower", "expected"),
    [
        (bert, "audio_model", ["blocks.0", "blocks.1"]),
        (bert, "text_model", ["encoder.layer.0", "encoder.layer.1"]),
        (xlm_roberta, "text_model", ["encoder.layer.0", "encoder.layer.1"]),
        (distilbert, "text_model", ["transformer.layer.0", "transformer.layer.1"]),
        (sonar, "text_model", ["layers.0", "layers.1"]),
        (clap2, "audio_model", ["blocks.0", "blocks.1"]),
        (clap2, "text_model", ["blocks.0", "blocks.1"]),
        (clap, "text_model", ["encoder.layer.0", "encoder.layer.1"]),
        (
            clap,
            "audio_model",
            [f"audio_encoder.layers.{stage}.blocks.{block}" for stage, block in [(0, 0), (1, 0), (2, 0), (2, 1)]]
            + ["audio_encoder.layers.3.blocks.0", "audio_encoder.layers.3.blocks.1"],
        ),
    ],
)
def test_blocks_are_found(model, tower, expected):
    assert block_names(model().get_submodule(tower)) == expected


@pytest.mark.parametrize(
    ("model", "layers", "expected"),
    [
        (bert, (1, 1), [*LAST_OF_CED, "text_model.encoder.layer.1", *PROJECTIONS]),
        (bert, (0, 2), ["text_model.encoder.layer.0", "text_model.encoder.layer.1", *PROJECTIONS]),
        (
            bert_with_pooler,
            (1, 1),
            [*LAST_OF_CED, "text_model.encoder.layer.1", "text_model.pooler", *PROJECTIONS, "logit_bias"],
        ),
        (sonar, (1, 1), [*LAST_OF_CED, "text_model.layers.1", "text_model.layer_norm", *PROJECTIONS]),
        (dense, (0, 1), ["text_model.encoder.layer.1", "text_dense", *PROJECTIONS]),
        (dense, (1, 0), [*LAST_OF_CED, *PROJECTIONS]),
        (
            clap2,
            (1, 1),
            [
                "audio_model.blocks.1",
                "audio_model.norm",
                "audio_model.attn_pool",
                "text_model.blocks.1",
                "text_model.ln_final",
                *PROJECTIONS,
            ],
        ),
        (
            clap,
            (3, 1),
            [
                "audio_model.audio_encoder.layers.2.blocks.1",
                "audio_model.audio_encoder.layers.2.downsample",
                "audio_model.audio_encoder.layers.3",
                "audio_model.audio_encoder.norm",
                "text_model.encoder.layer.1",
                "text_model.pooler",
                *PROJECTIONS,
            ],
        ),
    ],
)
def test_last_layers_and_later_modules_train(model, layers, expected):
    model = model()
    train_last_layers(model, *layers)
    assert train_last_layers(model, *layers) == expected
    prefixes = tuple(f"{name}." for name in expected)
    every = {name for name, _ in model.named_parameters()}
    assert trainable(model) == {name for name in every if name in expected or name.startswith(prefixes)}


def transformer_block(width, inner):
    """Count the parameters of attention and MLP with biases, and two layer norms."""
    return 4 * (width**2 + width) + 2 * width * inner + inner + width + 4 * width


def projection(width, shared):
    return (width + 1) * shared + (shared + 1) * shared


def on_meta(audio, text, shared):
    with torch.device("meta"):
        config = SupCLAPConfig(audio_config=audio, text_config=text, projection_dim=shared, text_pooling="pooler")
        return SupCLAPModel(config)


def count(model, *prefixes):
    return sum(value.numel() for name, value in model.named_parameters() if name.startswith(prefixes))


def count_trainable(model, *prefixes):
    return sum(dict(model.named_parameters())[name].numel() for name in trainable(model) if name.startswith(prefixes))


def test_a_tenth_of_clap_trains():
    model = on_meta(ClapAudioConfig(), ClapTextConfig(), 512)
    train_last_layers(model)
    positions = (2 * 8 - 1) ** 2 * 32  # HTSAT's bias for every offset in a window of 8, for 32 heads
    audio = transformer_block(768, 3072) + positions + 2 * 768
    text = transformer_block(768, 3072) + 768**2 + 768
    assert count_trainable(model, "audio_model") == audio
    assert count_trainable(model, "text_model") == text
    total = audio + text + 2 * projection(768, 512) + 1
    assert count_trainable(model, "") == total
    # "around 10% of the total trainable parameters" [T 1]
    assert total / count(model, "") == pytest.approx(0.1048, abs=5e-5)
    assert trainable_table(model).splitlines()[-1].split() == ["total", "153,492,889", "16,087,841", "10.48"]


def test_ms_clap_2022_trains_the_part_of_the_paper():
    """[T table 5] counts two modules that the embeddings do not depend on, and that get no gradient."""
    with torch.device("meta"):
        shape = {"projection_dim": 1024, "projection_type": "residual", "text_pooling": "cls"}
        model = SupCLAPModel(SupCLAPConfig(audio_config=CNN14Config(), text_config=BertConfig(), **shape))
    modules = ["audio_model.fc1", "text_model.encoder.layer.11", *PROJECTIONS]
    assert train_last_layers(model) == modules

    tagging_head, pooler = 527 * (2048 + 1), 768**2 + 768
    # fixed Fourier and mel matrices, stored as parameters there
    spectrogram_layers = 2 * 513 * 1024 + 513 * 64
    audio, text = ("audio_model", "audio_projection"), ("text_model", "text_projection")
    assert count_trainable(model, *audio) + tagging_head == 8_423_951
    assert count_trainable(model, *text) + pooler == 9_515_520
    every_audio = count(model, *audio) + tagging_head + spectrogram_layers
    assert 8_423_951 / every_audio == pytest.approx(0.0991, abs=5e-5)
    assert 9_515_520 / (count(model, *text) + pooler) == pytest.approx(0.0854, abs=1e-4)

    train_last_layers(model, audio_layers=2)
    assert {name.split(".")[1] for name in trainable(model) if name.startswith("audio_model")} == {
        "conv_blocks",
        "fc1",
    }


def test_bert_trains_the_number_of_the_paper():
    # [T table 5], text: 9,515,520 trainable parameters, printed as 8.54 %.
    model = on_meta(ClapAudioConfig(), BertConfig(), 1024)
    train_last_layers(model)
    text = "text_model", "text_projection"
    assert count_trainable(model, *text) == 9_515_520
    assert count_trainable(model, *text) / count(model, *text) == pytest.approx(0.0854, abs=1e-4)


@pytest.mark.parametrize(
    ("model", "processor"),
    [(bert, builders.bert_processor), (bert_with_pooler, builders.bert_processor), (sonar, builders.nllb_processor)],
)
def test_only_the_chosen_parameters_change(tmp_path, rows, model, processor):
    model = model()
    train_last_layers(model)
    args = arguments(tmp_path, loss="infonce" if model.logit_bias is None else "siglip", **QUICK)
    run = SupCLAPTrainer(model, args, rows, processing_class=processor())
    assert moved(model, run.train) == trainable(model)


@pytest.mark.parametrize(
    ("layers", "message"),
    [((3, 1), r"audio_model.*\b3\b"), ((1, 5), r"text_model.*\b5\b"), ((-1, 1), "audio_model.*-1")],
)
@pytest.mark.parametrize("function", [train_last_layers, add_lora])
def test_missing_layers_are_an_error(model, function, layers, message):
    with pytest.raises(ValueError, match=message):
        function(model, audio_layers=layers[0], text_layers=layers[1])
    assert len(trainable(model)) == len(list(model.parameters()))


def test_a_tower_without_blocks():
    with pytest.raises(ValueError, match=r"Linear.*ModuleList"):
        block_names(torch.nn.Linear(2, 2))


# ---- LoRA ----


def adapted(model):
    return sorted(name.removesuffix(".lora_A.default.weight") for name in trainable(model) if "lora_A" in name)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (bert, ["audio_model.blocks.1.attn.{}", "text_model.encoder.layer.1.attention.{}"]),
        (sonar, ["audio_model.blocks.1.attn.{}", "text_model.layers.1.self_attn.{}"]),
        (
            clap,
            ["audio_model.audio_encoder.layers.3.blocks.1.attention.{}", "text_model.encoder.layer.1.attention.{}"],
        ),
    ],
)
def test_attention_of_the_last_blocks_is_adapted(model, expected):
    own = {
        "attn": ["proj", "qkv"],
        "self_attn": ["k_proj", "out_proj", "q_proj", "v_proj"],
        "attention": ["output.dense", "self.key", "self.query", "self.value"],
    }
    model = add_lora(model(), rank=2)
    assert adapted(model) == [name.format(leaf) for name in expected for leaf in own[name.split(".")[-2]]]
    full = {
        f"{projection}.modules_to_save.default.linear{layer}.{kind}"
        for projection in ("audio_projection", "text_projection")
        for layer in (1, 2)
        for kind in ("weight", "bias")
    }
    assert {name for name in trainable(model) if "lora_" not in name} == {*full, "logit_scale"}


def test_a_later_layer_with_a_similar_name_is_not_adapted():
    model = bert()
    output = model.text_model.encoder.layer[1].output
    output.attended = torch.nn.Linear(24, 24)
    add_lora(model, audio_layers=0)
    assert type(output.attended) is torch.nn.Linear
    assert {name for name in trainable(model) if "lora" in name}


def disturb(model):
    """Add random values to every trainable tensor, as training would."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trainable(model):
                parameter.add_(0.1 * torch.randn_like(parameter))


def test_a_merged_model_has_the_standard_layout_and_equal_outputs(tmp_path, model):
    keys, before = list(model.state_dict()), embeds(model)[0]
    disturb(add_lora(model, rank=2, alpha=8, audio_layers=2))
    adapted = embeds(model)
    assert (adapted[0] - before).abs().max() > 1e-2
    merged = merge_lora(model)
    assert merged is model
    assert list(merged.state_dict()) == keys
    assert len(trainable(merged)) == len(list(merged.parameters()))
    for left, right in zip(embeds(merged), adapted, strict=True):
        torch.testing.assert_close(left, right, atol=2e-6, rtol=2e-6)
    merged.save_pretrained(tmp_path)
    loaded, report = SupCLAPModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    for left, right in zip(embeds(loaded), embeds(merged), strict=True):
        assert torch.equal(left, right)


@pytest.mark.skipif(transformers.__version__.startswith("5.17."), reason="leaves the modules of an adapter random")
def test_saved_unmerged_it_is_an_adapter_folder(tmp_path, model):
    model.save_pretrained(tmp_path / "base")
    disturb(add_lora(model, rank=2))
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    loaded = SupCLAPModel.from_pretrained(tmp_path / "base")
    loaded.load_adapter(str(tmp_path / "adapter"))
    for left, right in zip(embeds(loaded)[:2], embeds(model)[:2], strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)


def test_lora_trains_checkpoints_resumes_and_saves(tmp_path, rows):
    options = {**QUICK, "save_strategy": "steps", "save_steps": 4, "svr": "bi-static"}
    whole = build(tmp_path / "run", rows, add_lora(bert(), rank=2), **options)
    chosen = trainable(whole.clap)
    assert moved(whole.clap, whole.train) == chosen
    other = add_lora(builders.supclap_model(seed=99), rank=2)
    resumed = build(tmp_path / "run", rows, other, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name

    for change, setting in (
        ({"rank": 4}, "adapters.default.r was 2 and is 4"),
        ({"rank": 2, "alpha": 5}, "adapters.default.lora_alpha was 16 and is 5"),
    ):
        changed = build(tmp_path / "run", rows, add_lora(bert(), **change), **options)
        with pytest.raises(ValueError, match=re.escape(setting)):
            changed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))

    trained, names = embeds(whole.clap), list(whole.clap.state_dict())
    whole.save_model(str(tmp_path / "final"))
    assert list(whole.clap.state_dict()) == names  # the model keeps its adapters
    assert set(load_file(tmp_path / "final" / "model.safetensors")) == set(bert().state_dict())
    loaded = SupCLAPModel.from_pretrained(tmp_path / "final")
    assert torch.equal(loaded.logit_scale, whole.clap.logit_scale)
    assert loaded.logit_scale != bert().logit_scale
    for left, right in zip(embeds(loaded), trained, strict=True):
        torch.testing.assert_close(left, right, atol=2e-6, rtol=2e-6)


TARGETS = ["query", "value", "qkv"]
KINDS = {
    "lora": LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["text_projection"]),
    "dora": LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    "pissa": LoraConfig(r=2, target_modules=TARGETS, init_lora_weights="pissa"),
    "ia3": IA3Config(target_modules=TARGETS, feedforward_modules=[]),
    "loha": LoHaConfig(r=2, target_modules=TARGETS),
    "norms": LNTuningConfig(target_modules=["norm"]),
    "rank-stabilised": LoraConfig(r=2, target_modules=TARGETS, use_rslora=True),
    "olora": LoraConfig(r=2, target_modules=TARGETS, init_lora_weights="olora"),
    "patterns": LoraConfig(r=2, target_modules=r".*(query|qkv)", rank_pattern={"qkv": 3}, alpha_pattern={"query": 5}),
    "all biases": LoraConfig(r=2, target_modules=TARGETS, bias="all"),
    "their biases": LoraConfig(r=2, target_modules=TARGETS, bias="lora_only"),
    "bias of B": LoraConfig(r=2, target_modules=TARGETS, lora_bias=True),
    "all linear layers": LoraConfig(r=2, target_modules="all-linear"),
    "some layers": LoraConfig(
        r=2, target_modules=TARGETS, layers_to_transform=[1], layers_pattern=["layer", "blocks"]
    ),
    "a task": LoraConfig(r=2, target_modules=TARGETS, task_type="FEATURE_EXTRACTION"),
    "as vision transformers": LoraConfig(r=2, target_modules=["qkv", "proj"]),
    "an embedding": LoraConfig(r=2, target_modules=["word_embeddings", "qkv"]),
    "a trained embedding": LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["word_embeddings"]),
    "trained tokens": LoraConfig(r=2, target_modules=TARGETS, trainable_token_indices={"word_embeddings": [6, 7]}),
    "only tokens": peft.TrainableTokensConfig(target_modules=["word_embeddings"], token_indices=[6, 7]),
    "adalora": peft.AdaLoraConfig(target_modules=TARGETS, init_r=3, target_r=2, total_step=4),
    "lokr": peft.LoKrConfig(r=2, target_modules=TARGETS),
    "oft": peft.OFTConfig(oft_block_size=4, target_modules=TARGETS),
    "boft": peft.BOFTConfig(boft_block_size=4, target_modules=TARGETS),
    "hra": peft.HRAConfig(r=2, target_modules=TARGETS),
    "fourierft": peft.FourierFTConfig(n_frequency=20, target_modules=TARGETS),
    "shira": peft.ShiraConfig(r=2, target_modules=TARGETS),
    "miss": peft.MissConfig(r=2, target_modules=TARGETS),
    "delora": peft.DeloraConfig(r=2, target_modules=TARGETS),
    "c3a": peft.C3AConfig(block_size=4, target_modules=TARGETS),
}


compiles = pytest.mark.process  # peft looks for a compiler


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind != "boft"), pytest.param("boft", marks=compiles)])
@pytest.mark.parametrize("wraps", [False, True])
def test_every_kind_of_adapter_is_merged_into_a_copy_and_in_place(tmp_path, kind, wraps):
    model = bert()
    if wraps:
        model = unwrap_adapters(get_peft_model(model, KINDS[kind]))
    else:
        model.add_adapter(KINDS[kind])
    assert type(model) is SupCLAPModel
    before = embeds(model)
    disturb(model)
    adapted, state = embeds(model), {name: value.clone() for name, value in model.state_dict().items()}
    settings = model.peft_config["default"].to_dict()
    assert max((left - right).abs().max() for left, right in zip(adapted[:2], before[:2], strict=True)) > 1e-3

    copied = merged_copy(model.config, model.peft_config, whole_weights(model), active_adapters(model))
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name  # nothing is changed in place
    assert model.peft_config["default"].to_dict() == settings
    copied.save_pretrained(tmp_path)
    loaded = SupCLAPModel.from_pretrained(tmp_path)
    for merged in (copied, loaded, merge_lora(model)):
        assert list(merged.state_dict()) == list(bert().state_dict())
        for left, right in zip(embeds(merged), adapted, strict=True):
            torch.testing.assert_close(left, right, atol=3e-6, rtol=3e-6)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_two_adapters_are_merged(model):
    model.add_adapter(LoraConfig(r=2, target_modules=TARGETS), "first")
    model.add_adapter(LoraConfig(r=3, target_modules=["query"]), "second")
    model.set_adapter(["first", "second"])
    disturb(model)
    copied = merged_copy(model.config, model.peft_config, whole_weights(model), active_adapters(model))
    torch.testing.assert_close(embeds(copied)[1], embeds(model)[1], atol=3e-6, rtol=3e-6)


def test_adapters_in_use_are_named(model):
    assert active_adapters(model) == []
    add_lora(model, rank=2)
    assert active_adapters(model) == ["default"]


def test_quantised_weights_are_saved_as_floats(model, monkeypatch):
    add_lora(model, rank=2)
    plain = whole_weights(model)
    layer = "text_model.encoder.layer.0.output.dense"
    monkeypatch.setattr(model, "is_quantized", True, raising=False)
    monkeypatch.setattr(  # as peft does for the layers of bitsandbytes
        lora,
        "dequantize_module_weight",
        lambda module: module.weight.half() + 1 if module is model.get_submodule(layer) else module.weight,
    )
    weights = whole_weights(model)
    changed = {name for name, value in weights.items() if not torch.equal(value, plain[name])}
    assert changed == {f"{layer}.weight"}
    assert weights[f"{layer}.weight"].dtype == torch.float32
    model.config.quantization_config = {"load_in_8bit": True}
    copied = merged_copy(model.config, model.peft_config, weights, active_adapters(model))
    assert not hasattr(copied.config, "quantization_config")
    assert hasattr(model.config, "quantization_config")
    assert torch.equal(copied.get_submodule(layer).weight, weights[f"{layer}.weight"])
    with pytest.raises(ValueError, match=r"1 weights.*logit_scale"):
        merged_copy(
            model.config, model.peft_config, {k: v for k, v in weights.items() if k != "logit_scale"}, ["default"]
        )


@pytest.mark.skipif(transformers.__version__.startswith("5.17."), reason="leaves the modules of an adapter random")
def test_an_adapter_alone_has_the_temperature_and_no_local_path(tmp_path):
    bert_with_pooler().save_pretrained(tmp_path / "ann" / "base")
    start = SupCLAPModel.from_pretrained(tmp_path / "ann" / "base")
    model = add_lora(start, rank=2, alpha=6)
    disturb(model)
    adapter = tmp_path / "new" / "adapter"
    for _ in range(2):
        save_adapter(model, adapter)
    written = b"".join(path.read_bytes() for path in adapter.iterdir())
    assert b"ann" not in written
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert (settings["lora_alpha"], settings["inference_mode"]) == (6, True)
    assert settings["base_model_name_or_path"] == "base"
    assert len({path.stat().st_mode for path in adapter.iterdir()}) == 1
    with safe_open(adapter / "adapter_model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    with_peft = SupCLAPModel.from_pretrained(tmp_path / "ann" / "base")
    loaded = PeftModel.from_pretrained(with_peft, adapter).merge_and_unload()
    by_transformers = SupCLAPModel.from_pretrained(tmp_path / "ann" / "base")
    by_transformers.load_adapter(str(adapter))
    for other in (loaded, by_transformers):
        assert torch.equal(other.logit_scale, model.logit_scale)
        assert torch.equal(other.logit_bias, model.logit_bias)
        for left, right in zip(embeds(other), embeds(model), strict=True):
            torch.testing.assert_close(left, right, atol=3e-6, rtol=3e-6)


def test_prompts_are_refused(model):
    assert unwrap_adapters(add_lora(model)) is model
    prompts = SimpleNamespace(get_base_model=None, peft_config={"mine": PromptTuningConfig()})
    with pytest.raises(ValueError, match="mine"):
        unwrap_adapters(prompts)


VERA = peft.VeraConfig(r=4, target_modules=["query", "value"])
RANDLORA = peft.RandLoraConfig(r=4, target_modules=["query", "value"])
VBLORA = peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=4, target_modules=["query", "value"])


# `add_adapter` of peft refuses the other two
@pytest.mark.parametrize(("adapter", "wraps"), [(VERA, True), (RANDLORA, True), (RANDLORA, False), (VBLORA, True)])
def test_the_trainer_refuses_adapters_with_shared_weights(tmp_path, rows, adapter, wraps):
    model: Any = bert()
    if wraps:
        model = get_peft_model(model, adapter)
    else:
        model.add_adapter(adapter)
    with pytest.raises(ValueError, match=f"{adapter.peft_type.value}.*share a weight between layers, text_model"):
        build(tmp_path, rows, model)


@pytest.mark.parametrize("wraps", [False, True])
def test_the_trainer_saves_a_merged_model_and_checkpoints_can_be_merged(tmp_path, rows, wraps):
    model = bert()
    if wraps:
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules=TARGETS))
    else:
        add_lora(model, rank=2, alpha=6)
    run = build(tmp_path / "run", rows, model, max_steps=4, **{**QUICK, "save_strategy": "steps", "save_steps": 4})
    assert type(run.clap) is SupCLAPModel
    run.train()
    run.save_model()
    disturbed = embeds(run.clap)
    with pytest.raises(ValueError, match=r"adapters.*supclap convert"):
        SupCLAPModel.from_pretrained(tmp_path / "run" / "checkpoint-4")
    convert_checkpoint.main([str(tmp_path / "run" / "checkpoint-4"), "--out", str(tmp_path / "merged")])
    SupCLAPProcessor.from_pretrained(tmp_path / "merged")
    for folder in ("run", "merged"):
        loaded = SupCLAPModel.from_pretrained(tmp_path / folder)
        assert torch.equal(loaded.logit_scale, run.clap.logit_scale)
        for left, right in zip(embeds(loaded), disturbed, strict=True):
            torch.testing.assert_close(left, right, atol=3e-6, rtol=3e-6)
    with pytest.raises(ValueError, match="merged"):
        convert_checkpoint.main([str(tmp_path / "run" / "checkpoint-4"), "--out", str(tmp_path / "merged")])


def test_a_checkpoint_without_the_configuration_of_its_adapters_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="contains adapters without their configuration; resume the run"):
        lora.merge_checkpoint(tmp_path, SupCLAPConfig(), {})


def test_adapters_of_a_tower_that_they_would_not_train_are_refused():
    with_convolutions = builders.pair("cnn14")[0]
    with_gates = SupCLAPModel(builders.supclap_config(audio=make_encoder("wavlm")[0].config))
    for model, message in (
        (with_convolutions, "last 1 blocks of audio_model have no attention"),
        (with_gates, "WavLM"),
    ):
        with pytest.raises(ValueError, match=message):
            add_lora(model)
        assert all("text_model" in name for name in adapted(add_lora(model, audio_layers=0)))


def test_adapters_that_are_not_finite_are_not_merged(model):
    add_lora(model, rank=2)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        next(weight for name, weight in weights.items() if "lora_B" in name)[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"(?i)nan"):
        merge_lora(model)


def test_adding_adapters_twice_or_merging_none_is_an_error(model):
    with pytest.raises(ValueError, match="add_lora"):
        merge_lora(model)
    with pytest.raises(ValueError, match=r"audio_layers.*text_layers"):
        add_lora(model, audio_layers=0, text_layers=0)
    add_lora(model)
    with pytest.raises(ValueError, match="merge_lora"):
        add_lora(model)
    merge_lora(model)
    assert adapted(add_lora(model))


# ---- the table ----


def parsed(table):
    """Parse a table to `{part: (parameters, trainable, percent)}`."""
    lines = [line.rsplit(maxsplit=3) for line in table.splitlines()[1:]]
    return {part: (int(a.replace(",", "")), int(b.replace(",", "")), float(c)) for part, a, b, c in lines}


def test_the_table_counts_every_part(model):
    train_last_layers(model, audio_layers=1, text_layers=0)
    module = ContrastiveModule(model, StaticRadius())
    table = parsed(trainable_table(module))
    assert table["audio encoder"][1] == count_trainable(model, "audio_model.blocks.1", "audio_model.norm")
    assert table["text encoder"] == (count(model, "text_model"), 0, 0.0)
    assert table["temperature, bias"] == table["objective"] == (1, 1, 100.0)
    assert table["total"][0] == sum(value.numel() for value in module.parameters())


def test_the_table_counts_a_dense_layer_as_a_part_of_the_text_encoder():
    model = dense()
    train_last_layers(model, 0, 0)
    table = parsed(trainable_table(model))
    assert table["text encoder"] == (count(model, "text_model", "text_dense"), 0, 0.0)


def test_the_table_counts_no_copies(model):
    before = parsed(trainable_table(model))
    table = parsed(trainable_table(add_lora(model, rank=2, audio_layers=0)))
    assert table["projections"] == before["projections"]
    assert table["text encoder"][1] == 4 * 2 * (24 + 24)
    assert table["text encoder"][0] == before["text encoder"][0] + table["text encoder"][1]
