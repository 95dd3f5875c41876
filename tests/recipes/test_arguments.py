"""Arguments from a YAML file, the command line and the dataset builder, and errors for invalid ones."""

import dataclasses
import importlib
import inspect
import json
import re
import sys
from dataclasses import dataclass, field

import builders
import dataset_folders
import pytest
import soundfile
from transformers import IntervalStrategy

from modeling_supclap.datasets_scripts.builders.options import option_texts
from modeling_supclap.evaluation import AudioPolicy, ZSTEOptions
from modeling_supclap.languages import LANGUAGES
from modeling_supclap.recipes import evaluate_supclap, options, posttrain_teminal, train_supclap
from modeling_supclap.recipes.arguments import format_help, list_options, parse_arguments, read_settings
from modeling_supclap.recipes.options import (
    DataArguments,
    DatasetArguments,
    EvaluationArguments,
    MiningArguments,
    ModelArguments,
    PostTrainingArguments,
    ReproductionArguments,
    TrainedPartArguments,
    as_mapping,
)
from modeling_supclap.training.options import ContrastiveOptions
from modeling_supclap.training.training_args import INTERNAL, AllStagesArguments, SupCLAPTrainingArguments


@dataclass
class Data(DatasetArguments):
    """Options of a recipe.

    Attributes:
        options: Some numbers.
    """

    options: list[int] = field(default_factory=list)


def parse(*argv, default=None):
    return parse_arguments((Data, SupCLAPTrainingArguments), argv, default)


@pytest.fixture
def write(tmp_path):
    """Function that writes a configuration file."""

    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def config(write, tmp_path):
    return write(
        f"dataset: esc50\nlearning_rate: 1e-3\nlanguages: [fra, deu]\nsvr: bi-static\noutput_dir: {tmp_path}\n"
    )


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("--lr", "learning_rate"),
        ("--epochs", "num_train_epochs"),
        ("--batch_size", "per_device_train_batch_size"),
        ("--batch-size", "per_device_train_batch_size"),
        ("--LR", "learning_rate"),
        ("--overwrite_output_dir", "output_dir with a new folder"),
        ("--resume", "resume_from_checkpoint last"),
        ("--learning_rat", "learning_rate"),
        ("--freeze_audio", "--help"),  # this group has no option for it
    ],
)
def test_options_of_other_projects_get_the_right_suggestion(word, option):
    with pytest.raises(ValueError, match=rf"unknown key '{re.escape(word[2:])}': .*{option}"):
        parse(word, "1")


def test_the_recipe_of_training_suggests_to_freeze_a_tower():
    with pytest.raises(ValueError, match="did you mean audio_layers 0"):
        parse_arguments(train_supclap.OPTIONS, ["--freeze_audio", "true"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vocab_size", "3"], "vocab_size is 3.*261"),
        (["--temperature", "1e-9"], "temperature is 1e-09"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--lora_rank", "0"], "lora_rank is 0"),
        (["--lora_alpha", "8"], "lora_rank"),
        (["--save_adapter", "true"], "lora_rank"),
        (["--train_last_layers", "some"], "train_last_layers is 'some'.*all"),
        (["--ema_decay", "1"], "ema_decay is 1.*below 1"),
    ],
)
def test_values_out_of_range_are_refused_before_a_model_is_built(words, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments(train_supclap.OPTIONS, words)


def test_file_then_command_line(config):
    data, args = parse(config, "--svr", "uni-dynamic", "--num_train_epochs", "3")
    assert data.dataset == "esc50"
    assert (args.learning_rate, args.svr, args.num_train_epochs) == (1e-3, "uni-dynamic", 3.0)
    assert args.languages == ["fra", "deu"]


@pytest.mark.parametrize(
    ("words", "is_read"),
    [
        ([], True),
        (["--svr", "none"], True),
        (["--dataset", "esc50"], True),
        (["--svr", "none", "--dataset=esc50"], True),
        (["--dataset", "audio_folder", "--data_dir", "d"], False),
        (["--data_dir", "d", "--dataset=clotho"], False),
    ],
)
def test_the_default_file_is_read_for_its_own_dataset_only(config, words, is_read):
    assert (parse(*words, default=config)[1].learning_rate == 1e-3) == is_read


def test_options_of_the_builder_go_by_their_own_names(write):
    path = write("dataset: esc50\ndataset_config: {test_fold: 4, validation_fraction: 0.2}\n")
    data, args = parse(
        path, "--data_dir", "d", "--test_fold", "2", "--languages", "fra", "--translations", "t.parquet"
    )
    assert data.builder_options == {
        "test_fold": 2, "validation_fraction": 0.2, "data_dir": "d", "translations": ["t.parquet"]
    }  # fmt: skip
    assert args.languages == ["fra"]  # an option that the recipe also has sets that of the recipe

    path = write("dataset: esc50\ndataset_config: {test_fold: 4, limit: 9}\ntest_fold: 3\ntranslations: t.parquet\n")
    data, _ = parse(path)
    assert data.builder_options == {"test_fold": 3, "limit": 9, "translations": "t.parquet"}

    data, _ = parse("--dataset", "webdataset", "--data_dir", "d", "--language", "fra", "--languages", "fra")
    assert data.builder_options == {"data_dir": "d", "language": "fra"}

    data, _ = parse(path, "--dataset", "audio_folder", "--data_dir", "d")
    assert data.builder_options == {"data_dir": "d"}  # without dataset_config of the file, which is of esc50

    data, _ = parse("--num_train", "16", "--num_validation", "16", "--num_test", "16")
    assert data.builder_options == {"num_train": 16, "num_validation": 16, "num_test": 16}
    assert {name: len(rows) for name, rows in data.load_splits().items()}["test"] == 16


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("languages: eng", "languages", ["eng"]),
        ("learning_rate: 1e-3", "learning_rate", 0.001),
        ("svr_decoupled: yes", "svr_decoupled", True),
        ("svr_decoupled: false", "svr_decoupled", False),
        ("track_drift: false", "track_drift", False),
        ("cached_chunk_size: null", "cached_chunk_size", None),
        ("num_train_epochs: 5", "num_train_epochs", 5.0),
    ],
)
def test_a_value_of_the_file_has_the_type_of_its_key(write, line, name, value):
    found = getattr(parse(write(line))[1], name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("learning_rate: fast", "learning_rate.*'fast'.*float"),
        ("num_train_epochs: [3]", r"num_train_epochs.*\[3\].*float"),
        ("per_device_train_batch_size: 2.5", r"per_device_train_batch_size.*2\.5.*int"),
        ("languages: {eng: 1}", "languages.*list"),
        ("languages:", "languages.*None"),
        ("languages: [{eng: 1}]", "languages.*'eng': 1"),
        ("options: [1, two]", "options.*'two'"),
        ("track_drift: maybe", "track_drift.*'maybe'.*bool"),
        ("svr: {kind: static}", "svr.*str"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_file(write, line, told):
    with pytest.raises(ValueError, match=rf"run\.yaml.*{told}"):
        parse(write(line))


def test_a_mapping_comes_from_the_file_or_as_json():
    assert as_mapping({"depth": 4}) == as_mapping(json.dumps({"depth": 4})) == {"depth": 4}
    assert as_mapping(None) == {}
    for wrong in ("[4]", "esc50"):
        with pytest.raises(ValueError, match=f"mapping.*{re.escape(wrong)}"):
            as_mapping(wrong)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lerning_rate", "1"], "'lerning_rate'.*learning_rate"),
        (["--learning-rat=1"], "'learning-rat'"),
        (["--xyzzyq", "1"], "'xyzzyq'.*--help"),
        (["--tset_fold", "1"], "'tset_fold'.*test_fold"),
        (["--test_fold", "one"], "test_fold"),
        (["--learning_rate", "fast"], "learning_rate"),
        (["--svr"], "svr"),
    ],
)
def test_wrong_words_are_explained(config, argv, message):
    with pytest.raises(ValueError, match=message):
        parse(config, *argv)


def test_a_base_is_next_to_the_file_or_in_the_package(write, tmp_path, monkeypatch):
    run = write("base: synthetic.yaml\nsvr: bi-dynamic\n")
    assert read_settings(run)["projection_dim"] == 128
    monkeypatch.chdir(tmp_path)
    assert read_settings("recipes/configs/synthetic.yaml")["projection_dim"] == 128  # as in a checkout
    (tmp_path / "synthetic.yaml").write_text("projection_dim: 7\nsvr: none\n")
    assert read_settings(run) == {"projection_dim": 7, "svr": "bi-dynamic"}


def test_a_scale_overrides_the_base_and_the_file_overrides_the_scale(write, tmp_path):
    run = write("base: full.yaml\nsvr: none\n")
    (tmp_path / "full.yaml").write_text("train_temperature: false\nlearning_rate: 1\nsvr: bi-dynamic\n")
    (tmp_path / "mini.yaml").write_text("learning_rate: 2\nsvr: bi-static\n")
    assert read_settings(run, tmp_path / "mini.yaml") == {
        "train_temperature": False,
        "learning_rate": 2,
        "svr": "none",
    }


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("nowhere.yaml", FileNotFoundError, r"nowhere\.yaml does not exist; the package has [^/]*esc10\.yaml[^/]*$"),
        ("esc1.yaml", FileNotFoundError, r"esc1\.yaml does not exist; did you mean esc10\.yaml(?: or [\w.]+)*\?"),
        ("esc10", ValueError, r"'esc10'.*esc10\.yaml"),
    ],
)
def test_the_error_of_a_missing_file_suggests_names(name, error, told):
    with pytest.raises(error, match=told):
        parse(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"svr_alfa: 2", "'svr_alfa'.*svr_alpha"),
        (b"- 1\n- 2", "list"),
        (b"seed: [1", r"broken\.yaml"),
        (b"seed: 1\n  loss: x", r"broken\.yaml"),
        (b"seed: \xff", r"broken\.yaml"),
        (b"seed: \x00", r"broken\.yaml"),
        (b"seed: !!python/object:os.system {}", r"broken\.yaml"),
        (b"logging_steps: .inf", "logging_steps"),
        (b"logging_steps: 1e999", "logging_steps"),
        (b"logging_steps: .nan", "logging_steps"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, content, message):
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        parse_arguments((SupCLAPTrainingArguments,), [str(path)])


def test_the_help_of_a_command_has_its_usage_and_the_default_of_each_option(monkeypatch):
    @dataclass
    class Options:
        """Some options. A second sentence.

        Attributes:
            needed: A number.
            flag: A switch.
            names: Some names.
            strategy: One of several strategies.
            empty: Something else.
            an_option_with_a_long_name: A number.
        """

        needed: int
        flag: bool = False
        names: list[str] = field(default_factory=lambda: ["B", "a"])
        strategy: IntervalStrategy = IntervalStrategy.EPOCH
        empty: str | None = None
        an_option_with_a_long_name: float = 0.5

    monkeypatch.setattr(sys, "argv", ["folder/train.py"])
    monkeypatch.setenv("COLUMNS", "130")
    assert format_help([Options], "\n What it does.\n").splitlines() == [
        "usage: train.py [CONFIG.yaml] [--KEY VALUE ...]",
        "",
        "What it does.",
        "",
        "Some options. A second sentence",
        "  --needed                    A number. Required.",
        "  --flag                      A switch. Default: false.",
        "  --names                     Some names. Default: B a.",
        "  --strategy                  One of several strategies. Default: epoch.",
        "  --empty                     Something else.",
        "  --an_option_with_a_long_name",
        "                              A number. Default: 0.5.",
    ]
    assert format_help([Data], "", {"Few": ("options", "data_dir")}).splitlines()[4:] == [
        "Few",
        "  --options                   Some numbers.",
        "  --data_dir                  Folder, fsspec address or Hub id of the data, for builders that need one.",
        "",
        "--help_all lists all options in groups.",
        "Options of the dataset's builder are accepted, too; `supclap prepare NAME --help` lists them.",
    ]
    assert "usage: train.py FOLDER FOLDER [FOLDER ...] [--KEY" in format_help([options.ComparisonArguments], "")


def test_help_lists_our_options_in_groups(capsys):
    printed = format_help((Data, ContrastiveOptions), "What it does.")
    assert printed.index("--data_dir") < printed.index("--options") < printed.index("--svr_alpha")
    assert re.search(r"--svr_alpha +Weight of the SVR term,", printed)
    assert "--per_device_train_batch_size" in printed  # has our own default
    assert "--adam_beta2" not in printed
    assert max(map(len, printed.splitlines())) <= 120

    with pytest.raises(SystemExit):
        parse("--help_all")
    printed = capsys.readouterr().out
    titles = ("Loss", "Support vectors (SVR)", "Augmentation", "Memory and speed", "Trainer of transformers")
    places = [printed.index(f"\n{title}\n") for title in titles]
    assert places == sorted(places)
    assert printed.index("--svr_alpha") < places[-1] < printed.index("--adam_beta2")
    assert len(re.findall("--learning_rate ", printed)) == 1
    assert not re.findall("--(?:label_names|remove_unused_columns|training_data) ", printed)


@pytest.mark.parametrize("recipe", [train_supclap, posttrain_teminal, evaluate_supclap])
def test_help_starts_with_the_options_that_a_person_needs(recipe, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recipe", "--help"])
    with pytest.raises(SystemExit):
        recipe.main()
    printed = capsys.readouterr().out
    assert "--help_all lists" in printed
    shown = re.findall(r"^  --(\w+)", printed, re.MULTILINE)
    assert shown == [name for names in recipe.COMMON.values() for name in names]
    assert len(shown) == len(set(shown)) <= 25
    needed = ["dataset", "data_dir", "model", "output_dir"]
    if recipe is not evaluate_supclap:
        needed += ["learning_rate", "num_train_epochs", "per_device_train_batch_size", "bf16", "seed"]
        needed.append("resume_from_checkpoint")
    assert set(needed) <= set(shown)

    monkeypatch.setattr(sys, "argv", ["recipe", "--help_all"])
    with pytest.raises(SystemExit):
        recipe.main()
    printed = capsys.readouterr().out
    assert "--help_all" not in printed
    every = re.findall(r"^  --(\w+)", printed, re.MULTILINE)
    assert len(every) == len(set(every))
    assert set(shown) - {"caption_column"} < set(every)


@pytest.mark.parametrize("group", [SupCLAPTrainingArguments, AllStagesArguments])
def test_every_training_option_is_described_or_internal(group):
    ours = set()
    for base in group.__mro__:
        if base.__module__.startswith("modeling_supclap"):
            ours.update(inspect.get_annotations(base))
    fields = {option.name for option in dataclasses.fields(group) if option.init}
    listed = set().union(*list_options([group]).values())
    of_the_trainer = {"dataloader_persistent_workers", "dataloader_pin_memory"}  # described by transformers
    assert ours & fields - listed - INTERNAL == of_the_trainer


@pytest.mark.parametrize("name", [name for name in vars(options) if name.endswith("Arguments")][1:])
def test_every_option_of_a_command_is_described(name):
    group = getattr(options, name)
    fields = {option.name for option in dataclasses.fields(group) if option.init}
    assert fields == set().union(*list_options([group]).values())


@pytest.mark.parametrize(
    ("command", "name", "group", "original"),
    [
        (EvaluationArguments, "zste_items", ZSTEOptions, "num_items"),
        (EvaluationArguments, "zste_candidates", ZSTEOptions, "num_candidates"),
        (EvaluationArguments, "zste_prompts", ZSTEOptions, "prompts"),
        (options.CorpusArguments, "pad_short_clips", AudioPolicy, "pad_short_clips"),
    ],
)
def test_an_option_under_another_name_has_the_same_text(command, name, group, original):
    assert option_texts(command)[name] == option_texts(group)[original]


@pytest.mark.parametrize(
    "recipe",
    ["train_supclap", "posttrain_teminal", "embed_corpus", "evaluate_supclap", "reproduce", "translate_captions"],
)
def test_every_option_is_described(recipe, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recipe", "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(f"modeling_supclap.recipes.{recipe}").main()
    printed = capsys.readouterr().out
    assert len(re.findall(r"^  --\w+", printed, re.MULTILINE)) > 5
    assert not re.findall(r"^  (--\w+)(?: +|\n +)(?:Default.*)?$", printed, re.MULTILINE)


def test_many_missing_recordings_require_allow_missing(tmp_path):
    made = dataset_folders.audiocaps(tmp_path / "audiocaps")
    for path in made.audio[:5]:
        path.unlink()
    data = DataArguments("audiocaps", made.config["data_dir"])
    with pytest.raises(FileNotFoundError, match=r"\b5 of 10\b.*--allow_missing"):
        data.load_splits()
    data.allow_missing = True
    assert sum(map(len, data.load_splits().values())) == 5
    limited = DataArguments("audiocaps", made.config["data_dir"], {"limit": 1}).load_splits()
    assert sum(map(len, limited.values())) <= 3


def test_the_languages_of_an_evaluation_are_checked():
    with pytest.raises(ValueError, match=r"'de'.*'deu'"):
        EvaluationArguments(languages=["de"])


def test_datasets_read_the_languages_of_the_recipe():
    words = ["--output_dir", "o", "--languages", "eng", "ita", "--eval_languages", "por"]
    (data, _) = parse("--dataset", "audio_folder", "--encoding", "utf-8", *words)
    assert data.builder_options == {"encoding": "utf-8", "languages": [*LANGUAGES, "ita", "por"]}
    (data, _) = parse("--dataset", "webdataset", "--language", "fra", *words)
    assert data.builder_options == {"language": "fra", "languages": ["fra", "eng", "ita", "por"]}
    (data, _) = parse("--dataset", "audio_folder", "--dataset_config", '{"languages": ["por"]}', *words)
    assert data.builder_options == {"languages": ["por"]}
    (data, _) = parse("--dataset", "audio_folder", "--output_dir", "o", "--languages", "deu")  # one of the eight
    assert data.builder_options == {}
    (data, _) = parse("--dataset", "esc50", *words)  # names no languages
    assert data.builder_options == {}


def test_datasets_of_a_mixture_read_the_languages_of_the_recipe():
    entries = ['{"dataset": "audio_folder", "data_dir": "a"}', '{"dataset": "esc50"}']
    data, _ = parse_arguments(
        (DataArguments, SupCLAPTrainingArguments),
        ["--datasets", *entries, "--output_dir", "o", "--languages", "eng", "ita"],
    )
    assert data.builder_options["audio_folder"]["languages"] == [*LANGUAGES, "ita"]
    assert "languages" not in data.builder_options["esc50"]


def test_a_folder_in_other_languages_needs_no_other_option(tmp_path):
    for index in range(4):
        soundfile.write(tmp_path / f"{index}.wav", builders.tone(300.0 + 100 * index), builders.RATE_HZ)
    lines = ["file_name,caption,caption_ita"]
    lines += [f"{index}.wav,a tone {index},un tono {index}" for index in range(4)]
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    words = ["--dataset", "audio_folder", "--data_dir", str(tmp_path), "--languages", "eng", "ita"]
    data, _ = parse(*words, "--output_dir", "o")
    row = data.load_splits()["train"][0]
    assert row["captions"]["ita"] == [row["captions"]["eng"][0].replace("a tone", "un tono")]


def test_the_origin_of_the_data_is_a_public_name(tmp_path):
    folder = tmp_path / "my_sounds"
    folder.mkdir()
    assert DatasetArguments("esc50", "ESC-10").origin == "esc50"
    assert DatasetArguments("hf", "ann/sounds").origin == "ann/sounds"
    assert DatasetArguments("hf", str(folder)).origin == "my_sounds"
    assert DatasetArguments("hf").origin == "hf"
    assert DatasetArguments("hf", dataset_config={"data_dir": "ann/sounds"}).origin == "ann/sounds"
    assert DatasetArguments("hf", str(folder), {"subset": "a", "cache": "x"}).identity == {
        "dataset": "my_sounds", "subset": "a", "cache": "x",
    }  # fmt: skip
    parts = ['{"dataset": "hf", "name": "one"}', '{"dataset": "esc50", "data_dir": "E"}']
    (tmp_path / "one").mkdir()
    both = DataArguments(datasets=parts, data_dir=str(tmp_path))
    assert both.origin == "one+esc50"
    assert [part.data_dir for part in both.parts.values()] == [str(tmp_path / "one"), "E"]
    assert DataArguments(datasets=parts[1:]).parts["esc50"].data_dir == "E"


def test_entries_of_a_mixture_have_their_own_options_and_those_of_all():
    entries = [{"dataset": "esc50", "name": 5, "repeats": 2, "test_fold": 3}]
    entries.append({"dataset": "audiocaps", "weight": 0.5, "balance_labels": False, "streaming": False})
    shared = {"balance_labels": True, "allow_missing": True, "dataset_temperature": 2.0}
    data = DataArguments(datasets=list(map(json.dumps, entries)), data_dir="DATA", **shared)
    found = {}
    for name, part in data.parts.items():
        found[name] = part.dataset, part.data_dir, part.dataset_config, part.streaming, part.allow_missing, part.share
    assert found == {
        "5": ("esc50", "DATA/5", {"test_fold": 3}, False, True, {"balance_labels": True, "repeats": 2}),
        "audiocaps": ("audiocaps", "DATA/audiocaps", {}, False, True, {"balance_labels": False, "weight": 0.5}),
    }
    options = {"5": {"test_fold": 3, **found["5"][-1]}, "audiocaps": found["audiocaps"][-1]}
    identity = {"dataset": "esc50+audiocaps", **options, "dataset_temperature": 2.0, "balance_labels": True}
    assert data.identity_in_training == identity
    streamed = DataArguments(datasets=['{"dataset": "hf", "data_dir": "a/b"}'], streaming=True)
    assert [part.streaming for part in streamed.parts.values()] == [True]
    alone = DataArguments("esc50", "ESC", {"test_fold": 2}, negatives="tables/hard.parquet")
    assert alone.identity_in_training == {
        "dataset": "esc50", "test_fold": 2, "dataset_temperature": None, "balance_labels": False,
        "negatives": "hard.parquet",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "is_new"),
    [
        ({}, True),
        ({"audio_encoder": "ced", "text_encoder": "bert"}, False),
        ({"audio_encoder": "ced", "text_encoder": "bert", "random_weights": ["text"]}, False),
        ({"audio_encoder": "ced", "text_encoder": "bert", "random_weights": ["audio"]}, True),
        ({"model": "clap"}, False),
    ],
)
def test_an_audio_encoder_is_new_from_scratch_or_with_random_weights(settings, is_new):
    assert ModelArguments(**settings).has_new_audio_encoder is is_new


@pytest.mark.parametrize(
    ("group", "valid", "settings", "message"),
    [
        (ModelArguments, {"random_weights": ["text", "audio"]}, {"random_weights": ["audio", "both"]}, "audio, text"),
        (ModelArguments, {"vocab_size": 261}, {"vocab_size": 260}, "vocab_size is 260; it must be at least 261"),
        (ModelArguments, {"projection_dim": 1}, {"projection_dim": 0}, "projection_dim is 0; it must be at least 1"),
        (ModelArguments, {}, {"text_encoder": "bert"}, "text_encoder=bert; .*as audio_encoder, .*_weights audio to"),
        (ModelArguments, {"model": "m", "audio_encoder": "ced"}, {"audio_encoder": "ced"}, "random_weights text to"),
        (TrainedPartArguments, {"audio_layers": "all"}, {"audio_layers": "-1"}, "audio_layers is '-1'; .* or all"),
        (
            TrainedPartArguments,
            {"text_layers": "0"},
            {"text_layers": "1.5"},
            "text_layers is '1.5'; expected a number",
        ),
        (TrainedPartArguments, {"lora_rank": 1}, {"lora_rank": -1}, "lora_rank is -1; it must be positive"),
        (ModelArguments, {"temperature": 1e-4}, {"temperature": 0.9e-4}, "temperature is 9e-05; it must be at least"),
        (ModelArguments, {"temperature": 100.0}, {"temperature": 100.1}, "temperature is 100.1; it must be at least"),
        (
            PostTrainingArguments,
            {"train_fraction": 0.01},
            {"train_fraction": 0.0},
            "train_fraction is 0.0; it must be",
        ),
        (PostTrainingArguments, {"train_fraction": 1.0}, {"train_fraction": 1.01}, "train_fraction is 1.01; it must"),
        (
            PostTrainingArguments,
            {"num_phrasings": 1},
            {"num_phrasings": 0},
            "num_phrasings is 0; it must be at least 1",
        ),
        (PostTrainingArguments, {"pairs_per_epoch": 1}, {"pairs_per_epoch": 0}, "pairs_per_epoch is 0; it must be at"),
        (PostTrainingArguments, {"stages": ["b"]}, {"stages": []}, r"stages is \[\]; expected a, b, or both"),
        (MiningArguments, {"margin": -2.0}, {"margin": -2.1}, "margin is -2.1; it must be at least -2 and at most 2"),
        (MiningArguments, {"margin": 2.0, "near": "text"}, {"margin": 2.1}, "margin is 2.1; it must be at least -2"),
        (MiningArguments, {"first_rank": 1}, {"first_rank": 0}, "first_rank is 0; it must be at least 1"),
        (MiningArguments, {"batch_size": 1}, {"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        (ReproductionArguments, {"scale": "full"}, {"scale": "big"}, "scale is 'big'; expected one of mini, full"),
        (ReproductionArguments, {"on_bad_audio": "skip"}, {"on_bad_audio": "report"}, "one of error, skip"),
        (DataArguments, {"selection_split": "test"}, {"streaming": True, "negatives": "n"}, "streaming .* negatives;"),
        (
            TrainedPartArguments,
            {"lora_rank": 1, "lora_alpha": 1},
            {"lora_rank": 1, "lora_alpha": 0},
            "lora_alpha is 0",
        ),
    ],
)
def test_settings_of_models_have_ranges(group, valid, settings, message):
    group(**valid)
    with pytest.raises(ValueError, match=message):
        group(**settings)
