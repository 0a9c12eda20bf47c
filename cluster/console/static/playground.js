// Sends one prompt to several models through the public API, and shows their answers side by side as they stream in.

import { address } from "./addresses.js";
import { get, send } from "./api.js";
import { notify } from "./dialogs.js";
import { byId, h, setText } from "./dom.js";
import { plural, rate, seconds } from "./format.js";
import { events } from "./sse.js";

const MAX_MODELS = 8;
const SUGGESTIONS_MS = 150;

const form = byId("ask");
const pick = byId("pick");

/** Calls readdress(query) when the models change, since the view's address names them. */
export function makePlayground({ readdress }) {
  let base = null;
  let startedFor = null; // the viewer for whom the models were chosen
  let chosen = [];
  let running = [];
  let typing = 0;

  /** Chooses the first adapters. Starts again for another viewer, who may not see the models chosen before. */
  function start({ viewer, base_models: bases, adapters }) {
    const now = `${viewer.tenant} ${viewer.sees_all}`;
    if (startedFor === now) return;
    startedFor = now;
    stop();
    byId("answers").replaceChildren();
    byId("pick-list").replaceChildren();
    const isAddressed = base === null && chosen.length > 0;
    base = bases[0];
    if (!isAddressed) chosen = [base, ...adapters.slice(0, 2).map((adapter) => adapter.name)];
    chips();
  }

  /** Chooses the models that an address names. If it names none, the choice stays. */
  function choose(models) {
    const named = [...new Set(models)].filter((name) => name && name.length <= pick.maxLength).slice(0, MAX_MODELS);
    if (named.length) chosen = named;
    chips();
  }

  function add(name) {
    if (!name || chosen.includes(name)) return;
    if (chosen.length === MAX_MODELS) {
      notify(`At most ${MAX_MODELS} models side by side; remove one first.`);
      return;
    }
    chosen.push(name);
    chips();
  }

  function chips() {
    if (base !== null) readdress(chosen.map((name) => ["model", name]));
    byId("chips").replaceChildren(
      ...chosen.map((name) =>
        h("li", {}, h("span", {}, name), h("button", { type: "button", "aria-label": `Remove ${name}`, onclick: () => remove(name) }, "×")),
      ),
    );
  }

  function remove(name) {
    const index = chosen.indexOf(name);
    chosen.splice(index, 1);
    chips();
    (byId("chips").children[Math.min(index, chosen.length - 1)]?.querySelector("button") ?? pick).focus();
  }

  function take() {
    add(pick.value.trim());
    pick.value = "";
  }

  pick.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    take();
  });
  byId("add-pick").addEventListener("click", take);
  pick.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(suggest, SUGGESTIONS_MS);
  });

  async function suggest() {
    try {
      const query = new URLSearchParams({ search: pick.value.trim(), limit: "12" });
      const { adapters, base_models: bases } = await get(`v1/console/state?${query}`);
      const names = [...bases, ...adapters.flatMap((adapter) => [adapter.name, ...Object.keys(adapter.aliases)])];
      byId("pick-list").replaceChildren(...[...new Set(names)].map((name) => h("option", { value: name })));
    } catch {
      // Names can still be typed in full, and polling reports the error.
    }
  }

  for (const mode of form.elements.mode) {
    mode.addEventListener("change", () => (form.querySelector(".system").hidden = form.elements.mode.value !== "chat"));
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    take();
    if (!running.length && chosen.length) run();
  });
  document.addEventListener("keydown", (event) => {
    if (byId("view-playground").hidden || document.querySelector("dialog[open]")) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    else if (event.key === "Escape") stop();
  });
  byId("stop").addEventListener("click", stop);

  function stop() {
    for (const answer of running) answer.stop();
  }

  async function run() {
    const asked = request(form);
    running = chosen.map((name) => new Answer(name));
    byId("answers").replaceChildren(...running.map((answer) => answer.node));
    setRunning(true);
    await Promise.all(running.map((answer) => answer.run(asked)));
    notify(running.map((answer) => `${answer.model}: ${answer.outcome}`).join("; "));
    running = [];
    setRunning(false);
  }

  function setRunning(is) {
    const hadFocus = document.activeElement;
    byId("run").disabled = is;
    byId("stop").disabled = !is;
    if (is && hadFocus === byId("run")) byId("stop").focus();
    if (!is && hadFocus === byId("stop")) byId("run").focus();
  }

  return {
    start,
    choose,
    /** Opens the playground with the base model and one adapter. */
    show(name) {
      location.hash = address("playground", "", [base ?? "", name].map((model) => ["model", model]));
      addEventListener("hashchange", () => form.elements.prompt.focus(), { once: true });
    },
  };
}

function request(form) {
  const { mode, system, prompt, max_tokens: tokens, temperature, top_p: topP, seed } = form.elements;
  const body = {
    max_tokens: Number(tokens.value),
    temperature: Number(temperature.value),
    top_p: Number(topP.value),
    ...(seed.value ? { seed: Number(seed.value) } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (mode.value === "completion") return { path: "v1/completions", body: { ...body, prompt: prompt.value } };
  const messages = [{ role: "user", content: prompt.value }];
  if (system.value.trim()) messages.unshift({ role: "system", content: system.value });
  return { path: "v1/chat/completions", body: { ...body, messages } };
}

/** One model's answer: its text, and how fast it came. */
class Answer {
  constructor(model) {
    this.model = model;
    this.outcome = "";
    this.aborting = new AbortController();
    this.text = h("pre", { tabindex: "0", "aria-label": `Answer of ${model}` });
    this.state = h("span", { class: "badge", "data-state": "running" }, "waiting");
    this.first = h("dd", {}, "–");
    this.speed = h("dd", {}, "–");
    this.tokens = h("dd", {}, "–");
    this.node = h(
      "article",
      { class: "panel answer", "aria-label": model },
      h("header", {}, h("h3", { title: model }, model), this.state),
      h("dl", { class: "facts" }, ...[["TTFT", this.first], ["Tokens/s", this.speed], ["Tokens", this.tokens]].map(([name, dd]) => h("div", {}, h("dt", {}, name), dd))),
      this.text,
    );
  }

  stop() {
    this.aborting.abort();
  }

  async run({ path, body }) {
    const began = performance.now();
    let first = null;
    let pieces = 0;
    let reason = null;
    let usage = null;
    try {
      const response = await send("POST", path, { ...body, model: this.model }, { signal: this.aborting.signal });
      const fallback = response.headers.get("x-lorafleet-fallback");
      if (fallback) this.warn(`The base model answers instead: ${fallback}`);
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        usage = event.usage ?? usage;
        const choice = event.choices?.[0];
        if (!choice) continue;
        const piece = choice.text ?? choice.delta?.content ?? "";
        reason = choice.finish_reason ?? reason;
        if (!piece) continue;
        pieces += 1;
        if (first === null) {
          first = performance.now();
          setText(this.first, seconds((first - began) / 1000));
          this.mark("streaming", "running");
        }
        this.text.append(piece);
        this.measure(first, pieces);
      }
      this.mark(reason === "length" ? "cut at max tokens" : "done", "ready");
    } catch (error) {
      if (this.aborting.signal.aborted) this.mark("stopped", "draining");
      else {
        this.warn(error.message);
        this.mark("failed", "silent");
      }
    }
    this.measure(first, usage?.completion_tokens ?? pieces);
    this.outcome = `${this.state.textContent}, ${plural(usage?.completion_tokens ?? pieces, "token")}`;
  }

  /** Shows the speed, measured over the tokens after the first. */
  measure(first, count) {
    setText(this.tokens, count);
    const tookS = first === null ? 0 : (performance.now() - first) / 1000;
    if (count > 1 && tookS > 0.001) setText(this.speed, rate((count - 1) / tookS));
  }

  mark(words, state) {
    setText(this.state, words);
    this.state.dataset.state = state;
  }

  warn(message) {
    this.text.before(h("p", { class: "trouble" }, message));
  }
}
