"""Drives AReaL's RemoteInfEngine, which calls an inference server, against a running lorafleet.

    AREAL_LLM_SERVER_ADDRS=127.0.0.1:8000 python examples/rl/drive_areal.py sglang ADAPTER_FOLDER

The first argument is AReaL's backend, sglang or vllm. It needs areal and its lighter dependencies (aiohttp, ray, torch,
torchdata, uvloop), but not numba. As AReaL does, it deletes each checkpoint after it was loaded.
"""

import asyncio
import shutil
import sys
import tempfile
import time
import uuid
from pathlib import Path

from stub_imports import stub

stub("numba")
from areal.api.cli_args import (  # noqa: E402  # numba must be stubbed before.
    GenerationHyperparameters,
    InferenceEngineConfig,
    NameResolveConfig,
)
from areal.api.io_struct import ModelRequest, WeightUpdateMeta  # noqa: E402
from areal.engine.sglang_remote import SGLangBackend  # noqa: E402
from areal.engine.vllm_remote import VLLMBackend  # noqa: E402
from areal.infra import RemoteInfEngine  # noqa: E402
from areal.infra.remote_inf_engine import _update_weights_from_disk  # noqa: E402
from areal.utils import name_resolve, names  # noqa: E402

RUN = ("experiment", "trial")
NAME = f"policy-{uuid.uuid4().hex[:8]}"  # vLLM's load refuses names of a former run, which stay in the catalogue.


def load(engine: RemoteInfEngine, folder: str, version: int, path: Path) -> None:
    """Does what AReaL's update_weights_from_disk does, in this process."""
    shutil.copytree(folder, path)
    engine.set_version(version)
    name_resolve.add(names.update_weights_from_disk(*RUN, version), str(time.time()), replace=True)
    meta = WeightUpdateMeta("disk", str(path), use_lora=True, lora_name=NAME, lora_keep_versions=2, version=version)
    engine.pause_generation()
    try:
        _update_weights_from_disk(engine.backend, *RUN, version, engine.addresses, meta, 1, 60)
    finally:
        engine.continue_generation()
    shutil.rmtree(path)


def main() -> None:
    backend, folder = sys.argv[1:]
    with tempfile.TemporaryDirectory() as records:
        name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=records))
        config = InferenceEngineConfig(
            experiment_name=RUN[0], trial_name=RUN[1], use_lora=True, request_timeout=60, pause_grace_period=0.0
        )
        engine = RemoteInfEngine(config, SGLangBackend() if backend == "sglang" else VLLMBackend())
        engine.initialize()
        for version in (1, 2, 3):
            load(engine, folder, version, Path(records) / f"weight_update_v{version}")
            sampling = GenerationHyperparameters(max_new_tokens=6, lora_name=NAME)
            answer = asyncio.run(engine.agenerate(ModelRequest(input_ids=[5, 6, 7, 8], gconfig=sampling)))
            print(f"version {version}:", answer.output_tokens, answer.output_logprobs, answer.stop_reason)
        engine.destroy()


if __name__ == "__main__":
    main()
