"""What the server reads of a folder's `quantization.json`: names, a cap on the context, the probe.

A folder without the file, or without one of them, is served without it. No slow imports: settings
are checked against it before anything is loaded.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    ValidationError,
    model_validator,
)

from .errors import UnservableModel

RECORD_FILE = "quantization.json"


class Probe(BaseModel):
    """Logits of `top_ids` behind the last of `token_ids`, as the folder's graph gave them where it
    was built, and how far they may be off elsewhere."""

    model_config = ConfigDict(strict=True, frozen=True)

    token_ids: list[NonNegativeInt] = Field(min_length=1)
    top_ids: list[NonNegativeInt] = Field(min_length=1)
    top_logits: list[FiniteFloat]
    max_difference: FiniteFloat = Field(gt=0)

    @model_validator(mode="after")
    def _pairs(self) -> Probe:
        if len(self.top_ids) != len(self.top_logits):
            raise ValueError(f"{len(self.top_ids)} top_ids and {len(self.top_logits)} top_logits")
        return self


class Record(BaseModel):
    """Of a file that says more: what else it has is for people."""

    model_config = ConfigDict(strict=True, frozen=True)

    name: str | None = None
    precision: str | None = None
    context_length: int | None = Field(default=None, ge=2)
    context_note: str | None = None
    probe: Probe | None = None


def read_record(folder: Path) -> Record:
    """Raises UnservableModel, naming file and field, for a record that says something else."""
    path = folder / RECORD_FILE
    if not path.is_file():
        return Record()
    try:
        return Record.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UnservableModel(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UnservableModel(
            f"{path}: {f'{where}: ' if where else ''}{first['msg']}; build the folder anew with "
            "`python -m quantize`"
        ) from None
