"""``--config config.yaml``: fields of the engine's arguments, as they are written in a file.

Knows nothing about what the fields mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forethought.errors import DependencyError, UsageError


def load(path: Path) -> dict[str, Any]:
    """The fields in a YAML file, by name; an empty file has none.

    Raises:
        UsageError: the file cannot be read, is not YAML, names a field twice, or is no mapping.
        DependencyError: PyYAML is not installed.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise DependencyError.missing("PyYAML", "--config", "local") from error
    try:
        with path.open(encoding="utf-8") as stream:
            values = yaml.load(stream, Loader=_once_each(yaml))  # a SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(
            f"cannot read the configuration in {path}", str(error), "Give a YAML file"
        ) from error
    if not isinstance(values, dict | None):
        raise UsageError(
            f"no configuration in {path}",
            f"it holds {type(values).__name__}, not fields by name",
            "Write lines such as 'dtype: bfloat16'",
        )
    return {str(name): value for name, value in (values or {}).items()}


def _once_each(yaml: Any) -> Any:
    """YAML's safe loader, which would take the last of several equal names without a word."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value]
            twice = sorted({str(name) for name in names if names.count(name) > 1})
            if twice:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{twice[0]!r} is given twice", node.start_mark
                )
            return super().construct_mapping(node, deep)

    return Loader
