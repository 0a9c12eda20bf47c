"""All damaged, hostile and unsupported adapters, by what each is: how a sound adapter becomes it, and the error."""

from __future__ import annotations

from tests.workers.adapters.bad_adapters import configs, features, kinds, paths, safetensors_files, tensors, torch_files

_TABLES = (paths, configs, features, tensors, kinds, safetensors_files, torch_files)
CASES = {name: case for table in _TABLES for name, case in table.CASES.items()}
assert len(CASES) == sum(len(table.CASES) for table in _TABLES), "two of one name"
