"""Save what is kept for each object in tables that are allocated once: the rows in use."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..schema.state import SavedPart


class RowTables:
    """A group of tables. Every attribute is an array with a row for each object."""


class SavedTables(SavedPart[Any]):
    """A part that keeps something for each object in tables, of which the rows in use are saved.

    A table is an array, a tensor of any device or a `RowTables`. Arrays in a tuple are saved whole. All are restored in
    place, after the fields before them, from which `used` follows.
    """

    @property
    def used(self) -> list[int]:
        """The rows in use."""
        raise NotImplementedError

    def _save(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return [torch.from_numpy(table.copy()) for table in value]
        return take_rows(value, self.used) if isinstance(value, _TABLE) else super()._save(value)

    def _put(self, name: str, value: Any, saved: Any) -> None:
        if isinstance(value, tuple):
            for table, values in zip(value, saved, strict=True):
                table[:] = values.numpy().reshape(table.shape)
        elif isinstance(value, _TABLE):
            put_rows(value, self.used, saved)
        else:
            super()._put(name, value, saved)


_TABLE = np.ndarray | torch.Tensor | RowTables


@torch.inference_mode()
def take_rows(table: Any, rows: Sequence[int]) -> Any:
    """Return copies of some rows of a table on the host; of `RowTables`, by the names of the tables."""
    if isinstance(table, RowTables):
        return {name.lstrip("_"): take_rows(each, rows) for name, each in vars(table).items()}
    if isinstance(table, np.ndarray):
        return torch.from_numpy(table[np.array(rows, np.int64)])
    return table[torch.tensor(rows, dtype=torch.int64, device=table.device)].cpu()


@torch.inference_mode()
def put_rows(table: Any, rows: Sequence[int], saved: Any) -> None:
    """Replace some rows of a table by those that `take_rows` returned."""
    if isinstance(table, RowTables):
        for name, each in vars(table).items():
            put_rows(each, rows, saved[name.lstrip("_")])
        return
    # of an array, it shares the memory
    tensor = torch.as_tensor(table)
    tensor[torch.tensor(rows, dtype=torch.int64, device=tensor.device)] = saved.to(tensor.device)
