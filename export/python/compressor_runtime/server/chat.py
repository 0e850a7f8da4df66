"""Write a chat as the text that the model was trained on: the bundle's template, run in jinja2's sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from compressor_runtime.errors import DamagedBundleError
from compressor_runtime.manifest import member
from compressor_runtime.server.errors import ApiError

CHAT_TEMPLATE = "chat_template.json"
"""A bundle's file: ``template``, and ``special_tokens``, which it may name."""


class ChatTemplate:
    """The template of a bundle.

    Args:
        root: the bundle's folder.
        files: that its manifest lists, and so were checked.
    Raises:
        DamagedBundleError: the file cannot be read, or is not a template.
    """

    def __init__(self, root: Path, files: Any) -> None:
        self._template: Any = None
        if CHAT_TEMPLATE not in files:
            return
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise
        file = member(root, CHAT_TEMPLATE)
        try:
            found = json.loads(file.read_bytes())
            self._tokens = {str(name): str(token) for name, token in found["special_tokens"].items()}
            self._template = environment.from_string(found["template"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, TemplateError) as error:
            raise DamagedBundleError(f"{file}: not a chat template: {error}; copy the bundle again") from error

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return the text of a chat, up to where the model's answer begins.

        Raises:
            ApiError: the bundle has no template, or it refuses the messages.
        """
        if self._template is None:
            raise ApiError(
                400,
                "messages: this bundle's model has no chat template, so that it is not known how it was taught to "
                "chat; give its text to /v1/completions",
                "messages",
                "no_chat_template",
            )
        from jinja2 import TemplateError

        try:
            text: str = self._template.render(messages=[*messages], add_generation_prompt=True, **self._tokens)
        except (TemplateError, LookupError, TypeError, ValueError) as error:
            raise ApiError(400, f"messages: the model's chat template refuses them: {error}", "messages") from error
        return text


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
