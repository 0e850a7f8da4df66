"""Convert passes and targets of a recipe to and from the dataclasses whose fields are their options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from compressor.errors import CompressorError, RecipeError, UsageError
from compressor.formats.format import Format
from compressor.recipe.located_yaml import KeyPath, Source, nearest

_MOST_PASSES = 100


@dataclass(frozen=True)
class TargetSpec:
    """A target's name, and the options that the recipe gives."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def build(self) -> Any:
        """Return the target itself, a :class:`compressor.codegen.target.Target`; this imports its module, and so
        TVM.
        """
        from compressor.registry import TARGETS

        return TARGETS.find(self.name)(**dict(self.options))


def build_passes(source: Source, problems: list[str]) -> tuple[Any, ...]:
    """Return the passes of a recipe, in order; append messages about errors to ``problems``."""
    from compressor.registry import PASSES

    steps = source.data["passes"]
    if not isinstance(steps, list | tuple):
        problems.append(source.locate(("passes",), f"expected a list of `- name: {{options}}`; found {steps!r:.80}"))
        return ()
    if len(steps) > _MOST_PASSES:
        problems.append(source.locate(("passes",), f"{len(steps)} passes; a recipe has at most {_MOST_PASSES}"))
        return ()
    built = []
    for index, step in enumerate(steps):
        path: KeyPath = ("passes", index)
        if PASSES.fits(type(step)):
            built.append(step)
            continue
        entry = {step: {}} if isinstance(step, str) else step
        if not isinstance(entry, dict) or len(entry) != 1:
            problems.append(source.locate(path, f"expected one `name: {{options}}`; found {step!r:.80}{_advice(step)}"))
            continue
        ((name, options),) = entry.items()
        try:
            built.append(_build_pass(source, (*path, name), {} if options is None else options))
        except RecipeError as error:
            problems.append(str(error))
    return tuple(built)


def _advice(step: Any) -> str:
    from compressor.registry import PASSES

    if inspect.isclass(step):
        return f", a class; give an instance: {step.__name__}(...)" if PASSES.extends(step) else ", a class"
    if PASSES.extends(type(step)):
        return "; a pass of your own is a dataclass, and frozen: write @dataclass(frozen=True) above its class"
    return "; a pass of your own extends compressor.Pass" if dataclasses.is_dataclass(step) else ""


def _build_pass(source: Source, path: KeyPath, options: Any) -> Any:
    from compressor.registry import PASSES

    name = str(path[-1])
    if name not in PASSES.names():
        raise source.error(path[:-1], f"no pass is called {name!r:.80}; {nearest(name, PASSES.names())}")
    return instance(source, path, PASSES.find, options, lambda kind: kind.scheme_format)


def build_target(source: Source, problems: list[str]) -> TargetSpec | None:
    """Return the target of a recipe, or None after appending a message about the error to ``problems``.

    Options are checked against the target's dataclass, which is imported only where there are options.
    """
    from compressor.registry import TARGETS

    target = source.data["target"]
    path = ("target",)
    name: Any = target
    options: Any = None
    if isinstance(target, dict) and len(target) == 1:
        ((name, options),) = target.items()
    if not isinstance(name, str):
        problems.append(source.locate(path, f"expected a name or `name: {{options}}`; found {target!r:.80}"))
    elif name not in TARGETS.names():
        problems.append(source.locate(path, f"no target is called {name!r:.80}; {nearest(name, TARGETS.names())}"))
    else:
        try:
            if options not in (None, {}):
                instance(source, (*path, name), TARGETS.find, options)
            return TargetSpec(name, tuple((options or {}).items()))
        except RecipeError as error:
            problems.append(str(error))
    return None


def instance(
    source: Source,
    path: KeyPath,
    find_class: Callable[[str], type[Any]],
    options: Any,
    find_schemes: Callable[[Any], Any] = lambda _kind: Format,
    name: str | None = None,
) -> Any:
    """Return the dataclass called ``name`` (None: ``path[-1]``), with the options as its fields.

    Args:
        find_schemes: returns the class that parses the names under an option ``scheme``.
    """
    name = str(path[-1]) if name is None else name
    if not isinstance(options, dict):
        raise source.error(path, f"expected a mapping of options; found {options!r:.80}")
    try:
        kind = find_class(name)
        fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
        schemes = find_schemes(kind)
        for key in options:
            if key not in fields:
                raise source.error((*path, key), f"{name} has no such option; {nearest(str(key), fields)}")
        for key, field in fields.items():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and key not in options:
                example = f", such as `{key}: {schemes.example}`" if key == "scheme" else ""
                raise source.error(path, f"{key}: missing; {name} needs it{example}")
        if isinstance(scheme := options.get("scheme"), str):
            _check_scheme(source, (*path, "scheme"), scheme, schemes)
        hints = get_type_hints(kind)
        return kind(**{key: _option(source, (*path, key), value, hints[key]) for key, value in options.items()})
    except RecipeError:
        raise
    except (CompressorError, ArithmeticError, ValueError, TypeError, NameError) as error:
        # raised by the class, or by its annotations
        raise source.error(path, str(error)) from error


def _check_scheme(source: Source, path: KeyPath, scheme: str, schemes: Any) -> None:
    try:
        schemes.parse(scheme)
    except UsageError as error:
        raise source.error(path, str(error)) from error


def _option(source: Source, path: KeyPath, value: Any, hint: Any) -> Any:
    """Return one option, checked against its field's annotation."""
    try:
        checked = TypeAdapter(hint).validate_python(_frozen(value))
    except ValidationError as error:
        reasons = dict.fromkeys(problem["msg"] for problem in error.errors(include_url=False))
        raise source.error(path, f"{value!r:.80} does not fit; {'; or '.join(reasons)}") from error
    except PydanticUserError as error:
        raise source.error(path, f"the field's annotation {hint!r} cannot be read from a recipe") from error
    if isinstance(value, bool) and not isinstance(checked, bool):
        raise source.error(path, f"{value!r} does not fit; a number or text is expected")
    return checked


def options_of(instance: Any) -> dict[str, Any]:
    """Return all options of a pass or a target that affect a bundle's content, defaults included, as plain data."""
    fields = [f.name for f in dataclasses.fields(instance) if f.init and f.metadata.get("affects_content", True)]
    return {name: _plain(getattr(instance, name)) for name in fields}


def _frozen(value: Any) -> Any:
    """Turn lists into tuples, so that a pass stays immutable."""
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Format):
        return value.name
    return value if isinstance(value, str | int | float | bool | None) else str(value)
