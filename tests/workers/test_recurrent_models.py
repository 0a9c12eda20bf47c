"""Models with recurrent layers: states that follow their sequences through chunks, preemptions, aborts and ranks."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from family_cases import CASES, DELTA_NET, SMALL, make_case, make_case_adapter
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import AdapterMismatch, ConfigError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.messages import EngineRequest
from lorafleet.tools.checkpoint_inspection import inspect_checkpoint
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.rank_startup import build_rank
from lorafleet.workers.startup import build_engine
from ranks import start_llm
from tests.workers.conftest import peft_warnings_ignored
from tiny_models import Reference, tokenizer

LENGTHS = (200, 1, 130, 2, 64, 63, 3, 65, 15, 31, 130, 14)  # Two prompts are equal, with different adapters.
NEW_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A tiny Qwen3.5 and two adapters on all of its linears."""
    folder = tmp_path_factory.mktemp("recurrent")
    base = make_case(folder / "base", CASES["qwen3_5"])
    options = {"lora": {}, "dora": {"use_dora": True, "r": 3}}
    return base, {
        name: make_case_adapter(folder / name, base, CASES["qwen3_5"], **given) for name, given in options.items()
    }


@pytest.fixture(scope="module")
def reference(made: tuple[Path, dict[str, Path]]) -> Reference:
    return Reference(made[0])


def check_answers(made: tuple[Path, dict[str, Path]], reference: Reference, prompt, **options: object) -> None:
    """Compares the answers of prompts with different adapters, some of which are preempted."""
    base, adapters = made
    # The KV cache is so small that sequences are preempted.
    sizes = {"max_num_seqs": 6, "kv_cache_tokens": 336, "max_model_len": 256}
    llm = LLM(str(base), enable_lora=True, max_loras=2, **sizes, **options)
    loras = {name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(adapters.items(), 1)}
    names = [(None, "lora", "dora")[i % 3] for i in range(len(LENGTHS))]
    prompts = [{"prompt_token_ids": prompt(length)} for length in LENGTHS]
    outputs = llm.generate(prompts, GREEDY, [None if name is None else loras[name] for name in names])
    assert llm._engine.stats().preemptions_total > 0
    for length, name, output in zip(LENGTHS, names, outputs, strict=True):
        [completion] = output.outputs
        adapter = None if name is None else adapters[name]
        expected = reference.greedy(prompt(length), NEW_TOKENS, adapter, likely=completion.token_ids)
        assert completion.token_ids == expected.tokens, (length, name)
        assert [p.logprob for p in completion.logprobs] == pytest.approx(expected.logprobs, abs=1e-3)


@pytest.mark.parametrize(("most_tokens", "overlap"), [(23, True), (90, False)])
def test_states_survive_chunks_of_any_size_and_sequences_that_are_preempted(
    made, reference, prompt, most_tokens: int, overlap: bool
) -> None:
    check_answers(made, reference, prompt, max_num_batched_tokens=most_tokens, async_scheduling=overlap)


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_gpu_answers_as_transformers_does_with_graphs_and_without(
    made, reference, prompt, enforce_eager: bool
) -> None:
    check_answers(made, reference, prompt, device="cuda", max_num_batched_tokens=23, enforce_eager=enforce_eager)


def check_aborts(base: Path, reference: Reference, prompt) -> None:
    """Compares the answers of sequences, of which some get the slot of an aborted one."""
    config = EngineConfig(
        str(base), kv_cache_tokens=1024, max_num_seqs=2, max_num_batched_tokens=16, async_scheduling=True
    )
    engine = build_engine(config)

    def add(name: str, length: int) -> None:
        engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt(length), params=GREEDY))

    add("stays", 9)
    add("goes", 50)
    outputs = [output for _ in range(4) for output in engine.step()]
    engine.abort("goes")  # in the middle of its prompt, with a step in flight
    for name, length in (("one", 1), ("two", 33)):
        add(name, length)
    while engine.has_work:
        outputs += engine.step()
    engine.close()
    for name, length in (("stays", 9), ("one", 1), ("two", 33)):
        tokens = [token for output in outputs if output.request_id == name for token in output.token_ids]
        assert tokens == reference.greedy(prompt(length), NEW_TOKENS, likely=tokens).tokens


def test_an_aborted_sequence_leaves_nothing_to_the_next_in_its_slot(made, reference, prompt) -> None:
    check_aborts(made[0], reference, prompt)


def test_two_ranks_answer_as_one_does(made, prompt) -> None:
    base, adapters = made
    lora, dora = (LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(adapters.items(), 1))
    config = LoRAConfig(max_loras=2, max_lora_rank=16, fully_sharded_loras=True)
    prompts = [{"prompt_token_ids": prompt(length)} for length in (40, 1, 130)]
    answers = []
    for size in (1, 2):
        llm = start_llm(str(base), size, enable_lora=True, lora_config=config)
        outputs = llm.generate(prompts, GREEDY, [lora, None, dora])
        llm.close()
        answers.append([completion.token_ids for output in outputs for completion in output.outputs])
    assert answers[0] == answers[1]


def test_the_text_part_of_a_wrapper_and_adapters_with_either_class_s_names(tmp_path: Path, prompt) -> None:
    base, tokens = tmp_path / "base", prompt(40)
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=SMALL | DELTA_NET, vision_config=vision | {"deepstack_visual_indexes": []})
    ).eval()
    model.save_pretrained(base)
    tokenizer().save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(3)}, base / "model.safetensors")
    with peft_warnings_ignored():
        wrapped = get_peft_model(model, LoraConfig(target_modules=r".*language_model.*\.(in_proj_\w+|out_proj|q_proj)"))
    assert isinstance(wrapped, PeftModel)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(tmp_path / "whole")
    with torch.inference_mode():
        rows = wrapped(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    expected = [rows[i, token].item() for i, token in enumerate(tokens[1:])]
    shutil.copytree(tmp_path / "whole", tmp_path / "text")
    path = tmp_path / "text/adapter_model.safetensors"
    save_file({name.replace("language_model.", ""): tensor for name, tensor in load_file(path).items()}, path)
    settings = tmp_path / "text/adapter_config.json"
    settings.write_text(settings.read_text().replace(".*language_model", ".*"))
    llm = LLM(str(base), enable_lora=True, kv_cache_tokens=1024)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for i, name in enumerate(("whole", "text"), 1):
        [output] = llm.generate({"prompt_token_ids": tokens}, params, LoRARequest(name, i, str(tmp_path / name)))
        assert [p.logprob for p in output.prompt_logprobs[1:]] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_layer_types_follow_from_the_interval_that_hub_configs_have(tmp_path: Path, name: str) -> None:
    kinds = ["linear_attention", "full_attention"] * 2
    case = CASES[name]
    base = make_case(tmp_path, type(case)(case.name, case.options | {"num_hidden_layers": 4, "layer_types": kinds}))
    given = read_model_config(base)
    path = base / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"]
    rope = config.pop("rope_parameters")
    config |= {"full_attention_interval": 2, "partial_rotary_factor": rope["partial_rotary_factor"]}
    path.write_text(json.dumps(config | {"rope_theta": rope["rope_theta"], "rope_scaling": None}))
    assert read_model_config(base) == given
    assert given.attention_layers == (1, 3)


def test_states_count_in_the_memory_that_inspect_shows(made) -> None:
    config = EngineConfig(str(made[0]), device="cpu", max_num_seqs=5, kv_cache_tokens=1024)
    [share] = inspect_checkpoint(config, None, (1,)).shares
    channels, numbers = 2 * 2 * 8 + 4 * 16, 4 * 8 * 16
    assert share.needs is not None
    assert share.needs.states == 2 * 6 * (channels * 3 + numbers) * 4  # two layers, float32
    held = build_rank(config).steps.states
    assert held is not None
    assert held.num_bytes == share.needs.states + share.needs.state_snapshots
    assert share.needs.state_snapshots == 16 * share.needs.states // 6


def test_what_is_not_served_is_refused_by_name(made, tmp_path: Path) -> None:
    base, adapters = made
    with pytest.raises(ConfigError, match="linear_num_key_heads=2"):
        build_rank(EngineConfig(str(base), tensor_parallel_size=4))
    shutil.copytree(adapters["lora"], tmp_path / "conv")
    path = tmp_path / "conv/adapter_model.safetensors"
    renamed = {re.sub("in_proj_qkv", "conv1d", name): tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path)
    llm = LLM(str(base), enable_lora=True, kv_cache_tokens=1024)
    with pytest.raises(AdapterMismatch, match=r"linear_attn\.conv1d"):
        llm.generate({"prompt_token_ids": [5]}, GREEDY, LoRARequest("conv", 1, str(tmp_path / "conv")))
