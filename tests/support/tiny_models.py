"""Makes tiny random checkpoints and PEFT adapters of every family, and computes transformers' and PEFT's answers.

These answers are the reference that the engine is compared with.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

logging.getLogger("peft").setLevel(logging.ERROR)

VOCAB = 320
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 1.0, 1.3, 3.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 5.0, 7.0, 9.0],
}
ROPE_LONG_PARTIAL = ROPE_LONG | {
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.2, 1.5, 2.0, 1.1, 3.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 5.0, 9.0],
}
ROPE_BY_LAYER_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": ROPE_LLAMA3, "tie_word_embeddings": True}),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama_dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
            "max_position_embeddings": 32,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 32}),
    "mistral_full": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2_yarn": ("Qwen2", {"rope_parameters": ROPE_YARN, "max_position_embeddings": 256}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 48}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3_moe_step": (
        "Qwen3Moe",
        {"head_dim": 32, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2_untied": (
        "Gemma2",
        GEMMA
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": ("Gemma3", GEMMA | {"rope_parameters": ROPE_BY_LAYER_TYPE, "sliding_window_pattern": 2}),
    "gemma3_untied": (
        "Gemma3",
        GEMMA
        | {
            "sliding_window_pattern": 3,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 8}),
    "phi3_long": (
        "Phi3",
        {
            "rope_parameters": ROPE_LONG,
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
    ),
    "phi3_partial": (
        "Phi3",
        {
            "rope_parameters": ROPE_LONG
            | {
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.2, 1.5, 2.0, 1.1, 3.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0, 5.0, 9.0],
            },
            "original_max_position_embeddings": 32,
        },
    ),
}
ALL_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def has_experts(family: str) -> bool:
    return FAMILIES[family][0] in ("Mixtral", "Qwen3Moe")


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with a few merges: it encodes any text, and characters may span tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["the fleet of adapters answers the harbour, the answer is there"] * 8, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|end|>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


def make_model(folder: Path, family: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    name, options = FAMILIES[family]
    model_class = getattr(transformers, f"{name}ForCausalLM")
    config = model_class.config_class(**(COMMON | options | overrides))
    torch.manual_seed(seed)
    model = model_class(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            torch.nn.init.normal_(parameter, mean=0.0 if parameter_name.endswith("bias") else 1.0, std=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@functools.lru_cache(maxsize=2)  # Tests with a GPU have large ones.
def _read_base(folder: Path, model_class: Any, _files: frozenset[tuple[Path, int]]) -> Any:
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def load_base(folder: Path, model_class: Any = AutoModelForCausalLM) -> Any:
    """Returns the folder's model in float32: a copy, which PEFT may change. Reading takes ten times as long."""
    files = frozenset((path, path.stat().st_mtime_ns) for path in folder.iterdir())  # A test may have changed one.
    return copy.deepcopy(_read_base(folder, model_class, files))


def make_adapter(
    folder: Path, model: Path, *, seed: int = 1, dtype: str = "float32", std: float = 0.12, **options: Any
) -> Path:
    """Saves a PEFT adapter with a random B, using PEFT itself."""
    import peft  # It is imported here and below, so that machines without it can run tests of bases.

    settings = {"r": 8, "lora_alpha": 16, "target_modules": ALL_TARGETS, "lora_dropout": 0.0} | options
    base = load_base(model)
    if base.config.model_type == "phi3":
        settings = fused_names(settings)
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(base, peft.LoraConfig(**settings))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=std)
    wrapped.to(getattr(torch, dtype)).save_pretrained(folder)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = model.name
    path.write_text(json.dumps(config))
    (folder / "README.md").unlink(missing_ok=True)
    return folder


def fused_names(value: Any) -> Any:
    """Returns the same options for a model with one linear for q, k and v, and one for gate and up."""
    if isinstance(value, dict):
        return {fused_names(key): fused_names(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(dict.fromkeys(map(fused_names, value)))
    if not isinstance(value, str):
        return value
    value = re.sub(r"\b[qkv]_proj", "qkv_proj", value.replace("(k|", "(qkv|"))
    return re.sub(r"\b(gate|up)_proj", "gate_up_proj", value)


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer of the reference."""

    tokens: list[int]
    logprobs: list[float]  # The log-probability of each token in the full distribution.


def rounded_to_fp8(adapter: Path, folder: Path) -> Path:
    """Saves the adapter with its values rounded to e4m3, in float32."""
    shutil.copytree(adapter, folder)

    def nearest(name: str, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(1 if "lora_A" in name else 0, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    path = folder / "adapter_model.safetensors"
    save_file({name: nearest(name, x) for name, x in load_file(path).items()}, path)
    return folder


def attention_with_caps(model: Path) -> str | None:
    """Returns the attention of transformers that caps the model's scores, or None if any does. In transformers 5.17
    Gemma 2's usual attention lets the caps go."""
    config = json.loads((model / "config.json").read_text())
    return None if config.get("attn_logit_softcapping") is None else "eager"


class Reference:
    """Runs transformers + PEFT, in float32 by default."""

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self._path = model
        self._dtype = dtype
        self._device = device
        self._models: dict[Path | None, Any] = {}

    def model(self, adapter: Path | None) -> Any:
        if adapter not in self._models:
            if adapter is None:
                attention = attention_with_caps(self._path)
                model = AutoModelForCausalLM.from_pretrained(
                    self._path, dtype=self._dtype, attn_implementation=attention
                )
            else:
                import peft

                # A copy, which PEFT changes, takes a tenth of the time of reading the base again.
                model = peft.PeftModel.from_pretrained(copy.deepcopy(self.model(None)), adapter)
            model = model.eval().to(self._device)
            self._models[adapter] = model
        return self._models[adapter]

    @torch.inference_mode()
    def greedy(
        self, prompt: list[int], num_tokens: int, adapter: Path | None = None, *, likely: list[int] | None = None
    ) -> Answer:
        """Returns the greedy answer of that many tokens. If `likely` is it, one forward pass finds that out, instead of
        one for each token."""
        if likely is not None and len(likely) == num_tokens:
            answer = self.greedy_along(prompt, likely, adapter)
            if answer.tokens == likely:
                return answer
        out = self.model(adapter).generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
        )
        tokens = out.sequences[0, len(prompt) :].tolist()
        scores = [step[0].log_softmax(-1)[token].item() for step, token in zip(out.logits, tokens, strict=True)]
        return Answer(tokens, scores)

    def greedy_along(self, prompt: list[int], tokens: list[int], adapter: Path | None = None) -> Answer:
        """Returns what greedy() does if `tokens` are its answer, by one forward pass instead of one for each token.

        If they are not, the first token that differs from `tokens` is right, and those behind it follow wrong ones.
        """
        logprobs_TV = self.next_logprobs([*prompt, *tokens[:-1]], adapter)[len(prompt) - 1 :]
        best = logprobs_TV.argmax(-1).tolist()
        return Answer(best, [logprobs_V[token].item() for logprobs_V, token in zip(logprobs_TV, best, strict=True)])

    @torch.inference_mode()
    def hidden(self, tokens: list[int], adapter: Path | None = None) -> torch.Tensor:
        """Returns the hidden states after the last norm as [T, D]."""
        ids = torch.tensor([tokens], device=self._device)
        model = self.model(adapter)
        model = model if adapter is None else model.get_base_model()
        # Llama 4 names a part that it lacks as its base model, which is then itself.
        decoder = model.model if model.base_model is model else model.base_model
        return decoder(input_ids=ids).last_hidden_state[0].float().cpu()

    @torch.inference_mode()
    def logprobs(self, tokens: list[int], adapter: Path | None = None, cache: Any = None) -> list[float]:
        """Returns the log-probability of each token but the first, given the tokens before it.

        `cache` is an empty cache, whose type may change the values that it stores.
        """
        logprobs_TV = self.next_logprobs(tokens, adapter, cache)
        return [logprobs_TV[i, token].item() for i, token in enumerate(tokens[1:])]

    @torch.inference_mode()
    def next_logprobs(self, tokens: list[int], adapter: Path | None = None, cache: Any = None) -> torch.Tensor:
        """Returns the log-probabilities of all tokens behind each of these, [T, V], by one forward pass."""
        return self.next_logits(tokens, adapter, cache).log_softmax(-1).cpu()

    @torch.inference_mode()
    def next_logits(self, tokens: list[int], adapter: Path | None = None, cache: Any = None) -> torch.Tensor:
        """Returns the logits of all tokens behind each of these, float32 [T, V] on the device, by one forward pass."""
        ids = torch.tensor([tokens], device=self._device)
        return self.model(adapter)(input_ids=ids, past_key_values=cache).logits[0].float()

    @torch.inference_mode()
    def mixed_logprobs(self, tokens: list[int], parts: dict[Path, float]) -> list[float]:
        """Returns log-probabilities under several adapters side by side, each with its weight.

        The first adapter must not be rsLoRA, as PEFT would apply its scaling to all.
        """
        import peft

        model = AutoModelForCausalLM.from_pretrained(self._path, dtype=self._dtype)
        names = {str(i): path for i, path in enumerate(parts)}
        mixed = peft.PeftModel.from_pretrained(model, names["0"], adapter_name="0")
        for name in list(names)[1:]:
            mixed.load_adapter(names[name], adapter_name=name)
        mixed.add_weighted_adapter(list(names), list(parts.values()), "mixed", combination_type="cat")
        mixed.set_adapter("mixed")
        logits = mixed.eval()(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        return [logits[i, token].item() for i, token in enumerate(tokens[1:])]


def make_layered_adapter(folder: Path, model: Path, *, seed: int = 1, **options: Any) -> Path:
    """Saves an adapter as PEFT did under transformers 4, where routers and experts' projections were Linear layers.

    The adapter covers all of these, and q_proj.
    """
    config = json.loads((model / "config.json").read_text())
    mixtral = config["model_type"] == "mixtral"
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * (config["head_dim"] or 16)
    inner = config["intermediate_size" if mixtral else "moe_intermediate_size"]
    leaves = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    experts = config["num_local_experts"]
    shapes = dict(zip(leaves, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True))
    modules: dict[str, tuple[int, int]] = {}
    for layer in range(config["num_hidden_layers"]):
        modules[f"{layer}.self_attn.q_proj"] = hidden, heads
        if layer in config.get("mlp_only_layers", []):
            continue
        block = f"{layer}.{'block_sparse_moe' if mixtral else 'mlp'}"
        modules[f"{block}.gate"] = hidden, experts
        modules |= {f"{block}.experts.{e}.{leaf}": shapes[leaf] for e in range(experts) for leaf in leaves}
    settings: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": model.name}
    # The dense MLPs have projections with the same names.
    settings["target_modules"] = ["q_proj", "gate", *leaves] if mixtral else r".*(q_proj|mlp\.gate|experts\..*_proj)"
    settings |= options
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (inputs, outputs) in modules.items():
        ends = (rank for name, rank in settings.get("rank_pattern", {}).items() if f".{module}".endswith(f".{name}"))
        rank = next(ends, settings["r"])
        name = f"base_model.model.model.layers.{module}"
        tensors[f"{name}.lora_A.weight"] = 0.12 * torch.randn(rank, inputs, generator=generator)
        tensors[f"{name}.lora_B.weight"] = 0.12 * torch.randn(outputs, rank, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def stack_experts(folder: Path) -> Path:
    """Rewrites the checkpoint in transformers 5's own layout of experts, which replaces the hub's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(folder, save_original_format=False)
    return folder
