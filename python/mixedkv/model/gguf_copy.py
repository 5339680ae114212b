"""Copy the metadata of a GGUF file into one that is being written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf


def copy_metadata(
    reader: gguf.GGUFReader, writer: gguf.GGUFWriter, changed: Mapping[str, Any] | None = None
) -> None:
    """Add the keys and values of `reader` to `writer`, with other values for the keys in `changed`.

    The writer must have been made for the same architecture; it adds `general.architecture` itself.
    """
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = (changed or {}).get(name, field.contents())
        kind = field.types[0]
        is_array = kind == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, value, kind, field.types[-1] if is_array else None)


def write_and_close(writer: gguf.GGUFWriter) -> None:
    """Write everything that was added to `writer`, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
