"""Adapters with random faults: each is read, and then fits the engine, or is refused with an AdapterError; never
another exception, never for long, never in much memory. LORAFLEET_FUZZ_S seconds of it; `make fuzz` takes an hour.
"""

from __future__ import annotations

import faulthandler
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file
from torch import Tensor

from lorafleet.protocol.errors import AdapterError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.forms import AdapterForms, LowRank
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.reader import read_adapter
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.slots.lora_model import LoRAModel
from lorafleet.workers.tp.adapter_sharding import AdapterSharding
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.shard import Shard
from tests.fuzz.mutations import Draft, draft_of, drafts
from tests.workers.adapters.kinds.harness import make, make_base
from tests.workers.adapters.kinds.test_against_peft import KINDS
from tests.workers.conftest import base_of

FUZZ_S = float(os.environ.get("LORAFLEET_FUZZ_S", "10"))
FIRST_SEED = int(os.environ.get("LORAFLEET_FUZZ_SEED", "0"))
FAMILY = "qwen2, tied"
MAX_RANK = 16
CPU_S = 20.0
HANG_S = 120.0
GROWTH_BYTES = 256 << 20
SETTINGS = settings(
    max_examples=200,  # of one seed
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

pytestmark = pytest.mark.timeout(FUZZ_S + 600)


class Target:
    """Reads one draft after another in the same folder, which keeps the last one for whom a hang ends the process."""

    def __init__(self, folder: Path, base: Base, sharding: AdapterSharding) -> None:
        self.folder = folder
        self.base = base
        self.sharding = sharding
        self.num_read = self.num_refused = 0
        self.has_failed = False

    def check(self, draft: Draft) -> None:
        try:
            self._check(draft)
        except BaseException:
            self.has_failed = True
            raise

    def _check(self, draft: Draft) -> None:
        self._write(draft.files())
        Path("/proc/self/clear_refs").write_text("5")
        before, started_s = _status_bytes("VmRSS"), time.thread_time()
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        error: AdapterError | None = None
        try:
            self._read()
        except AdapterError as refusal:
            error = refusal
        finally:
            faulthandler.cancel_dump_traceback_later()
        if error is not None:
            error.message.encode()
            assert error.message.startswith("adapter 'fuzz'"), error.message
            assert len(error.message) < 1500
            self.num_refused += 1
        assert time.thread_time() - started_s < CPU_S
        assert _status_bytes("VmHWM") - before < GROWTH_BYTES

    def _read(self) -> None:
        read = read_adapter(self.folder, base=self.base, max_rank=MAX_RANK, dtype=torch.float32, name="fuzz")
        check_forms(read.forms, self.base.layout)
        self.num_read += 1
        model = LoRAModel.from_local_checkpoint(
            self.folder,
            base=self.base,
            config=LoRAConfig(max_lora_rank=MAX_RANK),
            dtype=torch.bfloat16,
            name="fuzz",
            sharding=self.sharding,
        )
        assert model.digest == read.digest

    def _write(self, files: dict[str, bytes]) -> None:
        for path in self.folder.iterdir():
            path.unlink()
        for name, data in files.items():
            (self.folder / name).write_bytes(data)


def _status_bytes(name: str) -> int:
    [line] = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def check_forms(forms: AdapterForms, layout: BaseLayout) -> None:
    """What the engine takes on trust."""
    for module, form in forms.linears.items():
        inputs, outputs = layout.linears[module]
        if form.low_rank is not None:
            _check_low_rank(form.low_rank, inputs, outputs)
        if form.kronecker is not None:
            w1, w2 = form.kronecker.w1, form.kronecker.w2
            assert (w1.shape[0] * w2.shape[0], w1.shape[1] * w2.shape[1]) == (outputs, inputs)
            _check_finite(w1, w2)
        for vector in (form.out_scale_O, form.bias_O):
            if vector is not None:
                assert vector.shape == (outputs,)
                _check_finite(vector)
    for module, weight in forms.norms.items():
        assert weight.shape == (layout.norms[module],)
        _check_finite(weight)
    sizes = {
        layout.vocab_size if t is None or t.table_VD is None else len(t.table_VD) for t in (forms.embedding, forms.head)
    }
    assert len(sizes) == 1, "both tables have one vocabulary"
    [vocab_size] = sizes
    for table, is_head in ((forms.embedding, False), (forms.head, True)):
        if table is None:
            continue
        if table.table_VD is not None:
            assert table.table_VD.shape == (vocab_size, layout.hidden_size)
            _check_finite(table.table_VD)
        if table.rows is not None:
            tokens = table.rows.token_N.tolist()
            assert tokens == sorted(set(tokens)) and all(0 <= token < vocab_size for token in tokens)
            assert table.rows.row_ND.shape == (len(tokens), layout.hidden_size)
        if table.low_rank is not None:
            sides = (layout.hidden_size, vocab_size)
            _check_low_rank(table.low_rank, *(sides if is_head else sides[::-1]))
    assert all(0 <= token < vocab_size for token in forms.invocation_tokens)


def _check_low_rank(low_rank: LowRank, inputs: int, outputs: int) -> None:
    rank = low_rank.rank
    assert 1 <= rank <= MAX_RANK
    assert (low_rank.a_RD.shape, low_rank.b_OR.shape) == ((rank, inputs), (outputs, rank))
    _check_finite(low_rank.a_RD, low_rank.b_OR)


def _check_finite(*tensors: Tensor) -> None:
    assert all(tensor.is_floating_point() and tensor.isfinite().all() for tensor in tensors)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    base, folder = make_base(FAMILY), tmp_path_factory.mktemp("base")
    base.save_pretrained(folder)
    sharding = AdapterSharding(Shard.of(read_model_config(folder), 0, 1), TPGroup(0, 1))
    target = Target(tmp_path_factory.mktemp("fuzz"), base_of(base), sharding)
    yield target
    print(f"\n{target.num_read} adapters read, {target.num_refused} refused")


@pytest.fixture(scope="module")
def seed_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Draft]:
    """By kind; made when it is first drawn."""
    made: dict[str, tuple[dict[str, object], dict[str, Tensor]]] = {}

    def seed_of(kind: str) -> Draft:
        if kind not in made:
            path = make(tmp_path_factory.mktemp("seed") / "a", FAMILY, KINDS[kind]).path
            config = json.loads((path / "adapter_config.json").read_text())
            made[kind] = config, load_file(path / "adapter_model.safetensors")
        return draft_of(*made[kind])

    return seed_of


def test_whatever_an_adapter_s_files_hold_it_is_read_or_refused(
    target: Target, seed_of: Callable[[str], Draft]
) -> None:
    kinds = [kind for kind in KINDS if kind != "tokens alone, of both"]  # PEFT refuses it where the tables are tied
    ends_s = time.monotonic() + FUZZ_S
    seed = FIRST_SEED
    while time.monotonic() < ends_s:

        @hypothesis.seed(seed)
        @settings(SETTINGS)
        @given(drafts(seed_of, kinds))
        def property_holds(draft: Draft) -> None:
            # What was found is made small whatever the time, and something is tried where the machine is slow.
            if time.monotonic() < ends_s or target.has_failed or not target.num_refused:
                target.check(draft)

        property_holds()
        seed += 1
    assert target.num_refused > 0
