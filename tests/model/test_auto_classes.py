"""Importing the package loads no large libraries, and its classes are registered when they are imported."""

import sys

import pytest
from processes import run_python

import modeling_supclap

REGISTERED = """
from transformers import AutoConfig, CONFIG_MAPPING, MODEL_MAPPING, FEATURE_EXTRACTOR_MAPPING, PROCESSOR_MAPPING
from transformers.pipelines import PIPELINE_REGISTRY
from modeling_supclap.configuration_supclap import CEDConfig, CNN14Config, SupCLAPConfig

assert AutoConfig.for_model("supclap", projection_dim=3).projection_dim == 3
assert CNN14Config.model_type in CONFIG_MAPPING and CEDConfig.model_type not in CONFIG_MAPPING
assert MODEL_MAPPING[SupCLAPConfig]._auto_class == "AutoModel"
assert PROCESSOR_MAPPING[SupCLAPConfig].__name__ == "SupCLAPProcessor"
assert FEATURE_EXTRACTOR_MAPPING[SupCLAPConfig].__name__ == "CEDFeatureExtractor"
assert PIPELINE_REGISTRY.supported_tasks["zero-shot-audio-classification"]["impl"].__name__ == "ClipPipeline"
assert not {"modeling_supclap.modeling_cnn14", "modeling_supclap.modeling_sonar"} & set(__import__("sys").modules)
from modeling_supclap import CEDModel, CNN14Model, MSCLAPFeatureExtractor
assert MODEL_MAPPING[CEDConfig] is CEDModel and MODEL_MAPPING[CNN14Config] is CNN14Model
assert FEATURE_EXTRACTOR_MAPPING[CNN14Config] is MSCLAPFeatureExtractor
"""


@pytest.mark.process
def test_the_package_alone_loads_no_library():
    before = "import sys, transformers; before = set(sys.modules)"
    loaded = run_python("-c", f"{before}; import modeling_supclap; print(*set(sys.modules) - before)").split()
    assert len(loaded) <= 3, loaded
    assert not {"torch", "torchaudio", "datasets", "numpy"} & set(loaded)


@pytest.mark.process
@pytest.mark.parametrize(
    "first",
    [
        "import transformers; from modeling_supclap.modeling_supclap import SupCLAPModel",
        pytest.param("from modeling_supclap import SupCLAPTrainer", marks=pytest.mark.slow),
    ],
)
def test_a_class_is_registered_once_it_is_imported(first):
    run_python("-c", first + "\n" + REGISTERED)


@pytest.mark.parametrize("failure", ["OSError('libcudart.so.13: cannot open')", "RuntimeError('CUDA 13.2 and 13.0')"])
def test_broken_torchaudio_is_explained(tmp_path, monkeypatch, failure):
    (tmp_path / "torchaudio.py").write_text(f"raise {failure}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchaudio", raising=False)
    monkeypatch.delitem(vars(modeling_supclap), "SupCLAPModel", raising=False)
    with pytest.raises(ImportError, match=r"(?s)(libcudart|CUDA 13).*pip install torch==") as caught:
        _ = modeling_supclap.SupCLAPModel
    assert isinstance(caught.value.__cause__, (OSError, RuntimeError))
