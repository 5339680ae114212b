"""Fields that all rows have in common: pydantic models, from which the documentation and the checks are
made.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

_HALF_OR_MORE = ("f16", "bf16", "f32")


def measured(description: str) -> Any:
    """Declare a field that a row lacks where it does not apply."""
    return Field(default=None, description=description)


class RowPart(BaseModel):
    """A part of the JSON object. A field that was not given is not written."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=True)

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_unset=True)


class Row(RowPart):
    """Measurements of one setting."""

    test: str = Field(description="what kind of row it is: the name of its section below")
    kv: str = Field(description="the cache, as it was given")
    flash_attn: bool = Field(
        description="whether flash attention was on. Caches that can do without are measured both ways "
        "(`--flash-attn`)"
    )
    threads: int = Field(description="CPU threads")
    attention: str | None = measured(
        'who reads the rows: `"fused"` or `"merged"` of this package, or `"llama.cpp"`'
    )
    error: str | None = measured("why the model could not run the setting; the numbers are then missing")

    def model_post_init(self, _context: Any) -> None:
        self.model_fields_set.add("test")  # a constant of each kind of row, and always written

    @property
    def name(self) -> str:
        """The setting, with what the spec leaves open."""
        engine, control = getattr(self, "engine", "mixedkv"), getattr(self, "control", False)
        name = self.kv if engine == "mixedkv" else f"{engine}: {self.kv}"
        type_k, _, type_v = self.kv.partition("/")
        if type_k in _HALF_OR_MORE and type_v in ("", *_HALF_OR_MORE):
            name += " flash" if self.flash_attn else " no flash"
        return name + (" (reference)" if control else "")


class CacheRow(Row):
    """A row that says how large the cache is."""

    n_ctx: int = Field(description="tokens the cache was made for")
    kv_bytes: int | None = measured("bytes of the cache as allocated, from llama.cpp's own memory breakdown")
    bits_per_element: float | None = measured("its bits per K or V element; null if it has none")
