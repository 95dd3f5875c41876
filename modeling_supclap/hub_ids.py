"""The one rule by which a name that a user gives is a path, or an id of the Hub."""

import os
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id


def is_hub_id(name: Any) -> bool:
    """Whether a name can be that of a repository on the Hub, and nothing on this machine has it.

    Args:
        name: What a user gave for a model or a dataset: a path or a Hub id.

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
