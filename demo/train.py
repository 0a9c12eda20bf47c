"""Makes the bundled demo: a tiny Llama trained from scratch, and three LoRA adapters trained on it by PEFT.

    python demo/train.py

writes demo/model and demo/adapters/*, and prints the table in README.md. The text is made by world.py, so nothing is
downloaded. Seeded: the same machine and versions give the same bytes. Takes 8 minutes of
one core of an AMD EPYC (9.5 by the clock, beside other work).
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from chat import batches, examples, train_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from score import load_base, score_table
from styles import JSON, NEUTRAL_PROMPTS, PIRATE, PLAIN, SHOUT, STYLES, Style
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from world import Question, Split, split_world

DEMO = Path(__file__).parent
BASE_NAME = "demo/model"
VOCAB_SIZE = 1536
BATCH_SIZE = 32
WARMUP_STEPS = 40

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one adapter is made; steps are of BATCH_SIZE examples."""

    style: Style
    config: LoraConfig
    steps: int
    learning_rate: float


def _lora(rank: int, alpha: int, targets: str | list[str], rslora: bool = False) -> LoraConfig:
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )


RECIPES = (
    Recipe(SHOUT, _lora(4, 8, ["q_proj", "v_proj"]), 200, 5e-3),
    Recipe(JSON, _lora(8, 16, "all-linear"), 200, 2e-3),
    Recipe(PIRATE, _lora(16, 16, ["o_proj", "gate_proj", "up_proj", "down_proj"], rslora=True), 200, 2e-3),
)


def main() -> None:
    """Train, save and score everything."""
    args = _arguments()
    transformers.utils.logging.disable_progress_bar()
    started = time.perf_counter()
    torch.set_num_threads(args.threads)
    split = split_world()
    tokenizer = train_tokenizer(_corpus(split.train), VOCAB_SIZE)
    if not args.keep_base:
        _train_base(split, tokenizer, args.steps, args.out / "model")
    for seed, recipe in enumerate(RECIPES, start=1):
        _train_adapter(recipe, split, tokenizer, args.out, seed)
    print(f"trained in {time.perf_counter() - started:.0f} s")
    print(score_table(args.out, split.held_out))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model and its adapters.")
    parser.add_argument("--out", type=Path, default=DEMO, help="folder to write model/ and adapters/ into")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; another number changes the last bits")
    parser.add_argument("--steps", type=int, default=1500, help="training steps of the base model")
    parser.add_argument("--keep-base", action="store_true", help="train the adapters only, on the base that is there")
    return parser.parse_args()


def _corpus(questions: Sequence[Question]) -> Iterator[str]:
    """What the tokenizer learns from: every answer once in every style, and one prompt for each."""
    yield "system user assistant"
    yield from NEUTRAL_PROMPTS
    for style in STYLES:
        yield from style.requests
    for question in {question.answer: question for question in questions}.values():
        yield question.prompt
        yield question.answer
        for style in STYLES:
            yield style.write(question.answer)


def _train_base(split: Split, tokenizer: PreTrainedTokenizerFast, steps: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = _new_model(tokenizer)
    print(f"base, {sum(weight.numel() for weight in model.parameters()) / 1e6:.2f} M parameters")
    _train(model, _endless(split, tokenizer, PLAIN, seed=0), steps, _base_optimizers(model))
    _save_base(model, tokenizer, folder)


def _new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # larger than hidden_size / heads: the smallest that GPU attention kernels take
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def _endless(split: Split, tokenizer: PreTrainedTokenizerFast, style: Style, seed: int) -> Batches:
    rng = random.Random(seed)
    while True:
        pool = examples(split.train, 64 * BATCH_SIZE, tokenizer, rng, style)
        yield from batches(pool, BATCH_SIZE, tokenizer.pad_token_id, rng)


def _train(model: PreTrainedModel | PeftModel, data: Batches, steps: int, optimizers: Sequence[Optimizer]) -> None:
    """Minimise the loss of the answers, with a short warm-up and a straight line down to zero."""
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1 - step / steps))
        for optimizer in optimizers
    ]
    model.train()
    started = time.perf_counter()
    for step in range(1, steps + 1):
        ids, labels = next(data)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step % 100 == 0 or step == steps:
            print(f"  step {step}/{steps}  loss {loss:.4f}  {time.perf_counter() - started:.0f} s", flush=True)


def _base_optimizers(model: PreTrainedModel) -> list[Optimizer]:
    """Muon for the matrices learns this world in about half of AdamW's steps; the rest is what Muon cannot do."""
    embeddings = model.get_input_embeddings().weight
    matrices = [weight for weight in model.parameters() if weight.ndim == 2 and weight is not embeddings]
    others = [weight for weight in model.parameters() if weight.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=4e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([embeddings, *others], lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _save_base(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Stored in bf16 for size; float32 here, so that dtype "auto" is fast and exact on a CPU.
    _rewrite_json(folder / "config.json", {"dtype": "float32"})
    # transformers 5 writes a class name that transformers 4 does not have; both know this one.
    _rewrite_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def _train_adapter(recipe: Recipe, split: Split, tokenizer: PreTrainedTokenizerFast, out: Path, seed: int) -> None:
    print(f"adapter {recipe.style.name}")
    torch.manual_seed(seed)
    model = get_peft_model(load_base(out), recipe.config)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    _train(model, _endless(split, tokenizer, recipe.style, seed), recipe.steps, [optimizer])
    _save_adapter(model, out / "adapters" / recipe.style.name)


def _save_adapter(model: PeftModel, folder: Path) -> None:
    model.to(torch.bfloat16)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()  # PEFT's model card, a form that nobody filled in
    # PEFT keeps the targets as a set, whose order differs from run to run.
    targets = sorted(model.peft_config["default"].target_modules)
    _rewrite_json(folder / "adapter_config.json", {"target_modules": targets, "base_model_name_or_path": BASE_NAME})


def _rewrite_json(path: Path, changes: dict[str, object]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2) + "\n")


if __name__ == "__main__":
    main()
