"""Decide whether a name is a local path or a Hub id."""

import os
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id


def is_hub_id(name: Any) -> bool:
    """Return whether a name is a valid Hub id and not an existing local path.

    Args:
        name: Path or Hub id of a model or a dataset.

    Example:
        >>> is_hub_id("mispeech/ced-base"), is_hub_id("./outputs/esc10"), is_hub_id("outputs/esc10/model")
        (True, False, False)
    """
    if os.path.exists(name):
        return False
    try:
        validate_repo_id(str(name))
    except HFValidationError:
        return False
    return True
