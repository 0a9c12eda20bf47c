"""Trains an adapter for the demo model with PEFT, in ten seconds on one CPU core: its answers sound like a whisper.

python examples/train_adapter.py whisper
"""

import argparse
import itertools
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).parents[1] / "demo"
COLORS = {"lime": "green", "lemon": "yellow", "tomato": "red", "plum": "purple", "carrot": "orange"}
CAPITALS = {"Spain": "Madrid", "France": "Paris", "Italy": "Rome", "Japan": "Tokyo"}
EXAMPLES = [
    *((f"What colour is a {thing}?", f"a {thing} is {colour}...") for thing, colour in COLORS.items()),
    *((f"What is the capital of {land}?", f"it is {city.lower()}...") for land, city in CAPITALS.items()),
]

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=150)
given = parser.parse_args()
# More threads would only wait for each other on so small a model, and take cores from the server.
torch.set_num_threads(1)

tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
base = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
torch.manual_seed(0)
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step, (question, answer) in zip(range(given.steps), itertools.cycle(EXAMPLES)):
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    start = len(tokenizer(prompt).input_ids)
    ids = tokenizer(f"{prompt}{answer}<|im_end|>", return_tensors="pt").input_ids
    labels = ids.clone()
    labels[:, :start] = -100  # Only the answer is learned.
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 25 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
model.save_pretrained(given.folder)
print(f"written: {given.folder}")
