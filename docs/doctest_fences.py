"""Shows doctests that stand in the text of a docstring as code, where Markdown would read `>>>` as a quotation."""

import re

import griffe

DOCTEST = re.compile(r"^( *)(>>> .*(?:\n\1\S.*|\n\1 +\S.*)*)", re.MULTILINE)


class DoctestFences(griffe.Extension):
    """Puts fences around each doctest outside of an "Example:" section."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring and "Example:" not in obj.docstring.value:
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\1\2\n\1```", obj.docstring.value)
