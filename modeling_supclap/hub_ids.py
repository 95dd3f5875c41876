"""Distinguish Hub ids from local paths."""

import os
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id


def is_hub_id(name: Any) -> bool:
    """Return True if a name is a valid Hub id and no local file or folder has this name.

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
