"""Import the common tests of transformers, downloaded by `fetch_transformers_tests.py`.

The source distribution contains the files directly in `tests/` and not its subfolders. Imports from the subfolders are
replaced here; mixins that test other features (export, text generation) are empty.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any
from unittest import mock

import fetch_transformers_tests
import transformers

PACKAGE = "transformers_common_tests"
# Common configuration fields with non-default values, for test_configuration_common.py.
CONFIG_FIELDS = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 3,
    "architectures": ["Any"],
    "id2label": {0: "rain"},
    "label2id": {"rain": 0},
    "problem_type": "regression",
}


def module(name: str, **members: Any) -> types.ModuleType:
    """Build a module with these members."""
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


def stand_ins() -> dict[str, types.ModuleType]:
    """Return replacements for the modules that the source distribution lacks, by name."""
    inside: dict[str, dict[str, Any]] = {
        "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
        "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
        "utils.test_configuration_utils": {"config_common_kwargs": CONFIG_FIELDS},
    }
    modules = {f"{PACKAGE}.{name}": module(name, **members) for name, members in inside.items()}
    packages = {f"{PACKAGE}.{name.split('.')[0]}": module(name, __path__=[]) for name in inside}
    # The original downloads pictures and recordings; no test here opens them.
    return {**packages, **modules, "fetch_hub_objects_for_ci": module("fetch", url_to_local_path=lambda url: url)}


def load(name: str) -> types.ModuleType:
    """Import one of the downloaded files.

    Args:
        name: File name without extension, such as "test_modeling_common".

    Raises:
        FileNotFoundError: The files have not been downloaded.
    """
    folder = fetch_transformers_tests.folder()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is missing: `make setup`, or `python tests/fetch_transformers_tests.py`, fetches the common "
            f"tests of transformers {transformers.__version__}; SUPCLAP_WITHOUT_COMMON_TESTS=1 goes without them"
        )
    if PACKAGE not in sys.modules:
        sys.modules[PACKAGE] = module(PACKAGE, __path__=[str(folder)])
        sys.modules.update(stand_ins())
    # The tests would import a second copy of transformers from its sources; the installed one is under test.
    direct = mock.patch("transformers.utils.direct_transformers_import", return_value=transformers)
    with direct, mock.patch.object(sys, "path", list(sys.path)):
        return importlib.import_module(f"{PACKAGE}.{name}")
