"""Join two pretrained encoders to a model and its processor. No saved model contains this folder.

`SupCLAPModel.from_encoders` and `SupCLAPProcessor.from_encoders` import it by name, because transformers requires each
package that the code of a saved folder imports.
"""

from .encoders import join_models, join_processors, load_tokenizer, load_tower

__all__ = ["join_models", "join_processors", "load_tokenizer", "load_tower"]
