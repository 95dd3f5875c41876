"""The package loads nothing heavy by itself, and its classes are registered in whatever order things are imported."""

import sys

import pytest
from processes import run_python

from modeling_supclap.integrations.auto_classes import require_torchaudio

REGISTERED = """
from transformers import AutoConfig, AutoFeatureExtractor, AutoModel, AutoProcessor, CONFIG_MAPPING, MODEL_MAPPING
from transformers import FEATURE_EXTRACTOR_MAPPING, PROCESSOR_MAPPING
from transformers.pipelines import PIPELINE_REGISTRY
from modeling_supclap import CEDConfig, CNN14Config, SupCLAPConfig, SupCLAPModel, SupCLAPProcessor
for config in (CEDConfig, CNN14Config, SupCLAPConfig):
    assert config.model_type in CONFIG_MAPPING and config in MODEL_MAPPING and config in FEATURE_EXTRACTOR_MAPPING
assert PROCESSOR_MAPPING[SupCLAPConfig] is SupCLAPProcessor and SupCLAPModel._auto_class == "AutoModel"
assert PIPELINE_REGISTRY.supported_tasks["zero-shot-audio-classification"]["impl"].__name__ == "ClipPipeline"
"""


def test_the_package_alone_loads_no_library():
    before = "import sys, transformers; before = set(sys.modules)"
    loaded = run_python("-c", f"{before}; import modeling_supclap; print(*set(sys.modules) - before)").split()
    assert len(loaded) <= 5, loaded
    assert not {"torch", "torchaudio", "datasets", "numpy"} & set(loaded)


@pytest.mark.parametrize(
    "first",
    [
        "import modeling_supclap; from transformers import AutoConfig; assert AutoConfig.for_model('supclap')",
        "import modeling_supclap; from transformers import Trainer",
        "from modeling_supclap.encoding import EncodingMixin; from modeling_supclap.modeling_ced import CEDModel; "
        "assert CEDModel._auto_class == 'AutoModel'",
    ],
)
def test_classes_are_registered_in_any_order(first):
    run_python("-c", first + "\n" + REGISTERED)


@pytest.mark.parametrize("failure", ["OSError('libcudart.so.13: cannot open')", "RuntimeError('CUDA 13.2 and 13.0')"])
def test_broken_torchaudio_is_explained(tmp_path, monkeypatch, failure):
    (tmp_path / "torchaudio.py").write_text(f"raise {failure}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchaudio", raising=False)
    with pytest.raises(ImportError, match=r"(?s)(libcudart|CUDA 13).*pip install torch==") as caught:
        require_torchaudio()
    assert isinstance(caught.value.__cause__, (OSError, RuntimeError))
