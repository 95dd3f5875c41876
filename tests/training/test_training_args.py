"""Arguments from YAML and command line, and what is refused."""

from dataclasses import dataclass, field

import pytest

from modeling_supclap.training.training_args import SupCLAPTrainingArguments, last_checkpoint, parse_arguments


@dataclass
class Data:
    dataset: str = field(default="synthetic")
    options: list[str] = field(default_factory=list)


def parse(*argv, default=None):
    return parse_arguments((Data, SupCLAPTrainingArguments), argv, default)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"dataset: esc50\nlearning_rate: 1e-3\nlanguages: [fra, deu]\nsvr: bi-static\noutput_dir: {tmp_path}\n"
    )
    return str(path)


def test_file_then_command_line(config):
    data, args = parse(config, "--svr", "uni-dynamic", "--num_train_epochs", "3")
    assert data.dataset == "esc50"
    assert (args.learning_rate, args.svr, args.num_train_epochs) == (1e-3, "uni-dynamic", 3.0)
    assert args.languages == ["fra", "deu"]


def test_the_default_file_is_read_when_none_is_named(config):
    assert parse("--svr", "none", default=config)[0].dataset == "esc50"


def test_all_languages_are_evaluated_by_default(config):
    assert parse(config)[1].eval_languages == ["fra", "deu"]
    assert parse(config, "--eval_languages", "deu")[1].eval_languages == ["deu"]


def test_defaults_are_the_papers(tmp_path):
    args = SupCLAPTrainingArguments(output_dir=str(tmp_path))
    assert (args.learning_rate, args.per_device_train_batch_size, args.num_train_epochs) == (5e-5, 24, 10)
    assert (args.weight_decay, args.svr_alpha, args.svr_beta) == (0, 1, 0.01)
    assert args.metric_for_best_model == "mean_recall"
    assert args.greater_is_better


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lerning_rate", "1"], r"unknown key 'lerning_rate': did you mean learning_rate"),
        (["--learning-rat=1"], "unknown key 'learning-rat'"),
        (["--xyzzyq", "1"], "unknown key 'xyzzyq': valid keys are .*dataset, .*svr_alpha"),
        (["--svr", "bi"], "svr is 'bi'; it must be one of none, uni-static"),
        (["--loss", "nce"], "loss is 'nce'; it must be one of infonce, siglip"),
        (["--positives", "label"], "positives is 'label'"),
        (["--per_device_train_batch_size", "1"], "a batch of one clip"),
        (["--max_audio_seconds", "0"], "max_audio_seconds is 0.0; it must be positive"),
    ],
)
def test_wrong_arguments_are_explained(config, argv, message):
    with pytest.raises(ValueError, match=message):
        parse(config, *argv)


def test_processes_that_would_each_train_alone_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun does; without a GPU the Trainer would not join them
    with pytest.raises(ValueError, match=r"2 processes were started, .* with 1 in all; .*--use_cpu true"):
        SupCLAPTrainingArguments(output_dir=str(tmp_path))


def test_an_unknown_key_in_the_file_is_explained(tmp_path):
    path = tmp_path / "typo.yaml"
    path.write_text("svr_alfa: 2\n")
    with pytest.raises(ValueError, match="unknown key 'svr_alfa': did you mean svr_alpha"):
        parse(str(path))


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        parse("nowhere.yaml")


def test_a_file_that_is_a_list_is_refused(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n- 2\n")
    with pytest.raises(ValueError, match="holds a list"):
        parse(str(path))


def test_a_folder_in_use_is_continued_when_asked_and_never_written_over(tmp_path):
    new, resumed = parse()[1], parse("--resume_from_checkpoint", "last")[1]
    assert last_checkpoint(tmp_path / "none", new) is None
    assert last_checkpoint(tmp_path, new) is last_checkpoint(tmp_path, resumed) is None
    for step in (8, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert last_checkpoint(tmp_path, resumed) == str(tmp_path / "checkpoint-12")
    with pytest.raises(ValueError, match="checkpoint-12 is there already: continue that run with"):
        last_checkpoint(tmp_path, new)
