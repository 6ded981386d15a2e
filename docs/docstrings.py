"""How docstrings reach the documentation site: lines of the form `name: what it is` become a list.

A setting has no docstring but a description in its `Field`, which is shown in its place.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from griffe import Docstring, ExprCall, ExprKeyword, Extension, Object

_ENTRY = re.compile(r"^(\w[\w, ]{0,40}): (?=\S)")


class Lists(Extension):
    """MkDocs' reader of docstrings calls this for everything that has one."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one object, or give a setting one."""
        if obj.docstring is None and (text := described(obj)):
            obj.docstring = Docstring(text, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def described(obj: Object) -> str:
    """Take the description out of `name: type = Field(..., description="...")`; "" for anything else."""
    call = getattr(obj, "value", None)
    if not isinstance(call, ExprCall) or str(call.function) != "Field":
        return ""
    texts = [a for a in call.arguments if isinstance(a, ExprKeyword) and a.name == "description"]
    call.arguments = [a for a in call.arguments if a not in texts]
    return str(ast.literal_eval(str(texts[0].value))) if texts else ""


def listed(text: str) -> str:
    """Two or more `name: text` lines, with what is indented under them, as a Markdown list."""
    lines = text.splitlines()
    if sum(bool(_ENTRY.match(line)) for line in lines) < 2:
        return text
    out: list[str] = []
    for line in lines:
        if _ENTRY.match(line):
            if out and out[-1].strip() and not out[-1].startswith(("- ", "  ")):
                out.append("")
            out.append(_ENTRY.sub(r"- `\1`: ", line))
        else:
            out.append(line)
    return "\n".join(out)
