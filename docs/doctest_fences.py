"""Show doctests in the text of a docstring as code; Markdown would render `>>>` as a quotation."""

import re

import griffe

DOCTEST = re.compile(r"^( *)(>>> .*(?:\n\1\S.*|\n\1 +\S.*)*)", re.MULTILINE)


class DoctestFences(griffe.Extension):
    """Griffe extension that fences the doctests of docstrings without an "Example:" section."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Fence the doctests of a module, class, function or attribute."""
        if obj.docstring and "Example:" not in obj.docstring.value:
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\1\2\n\1```", obj.docstring.value)
