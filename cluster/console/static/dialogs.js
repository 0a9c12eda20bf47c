// The dialog that asks for an action's parameters, and the notifications that report its result.

import { byId, h, setText } from "./dom.js";

const NOTE_MS = 8000;

const dialog = byId("form");
const trouble = byId("form-trouble");
const progress = byId("form-progress");
const submit = byId("form-submit");
const cancel = byId("form-cancel");
const fieldsAt = byId("form-fields");

let act = null; // the action of the open dialog
let running = null; // AbortController of the action in progress
let opener = null; // the element that had the focus before the dialog opened

/**
 * Opens the dialog, and calls `run(values, {signal, progress})` with the fields' values by name. If it fails, the dialog
 * stays open and shows the error. Each field is {name, label, type, value, hint, required, …attributes}.
 */
export function ask({ title, text = "", fields = [], submit: label, danger = false, run }) {
  act = run;
  opener = document.activeElement;
  setText(byId("form-title"), title);
  setText(byId("form-text"), text);
  byId("form-text").hidden = !text;
  fieldsAt.replaceChildren(...fields.map(field));
  setText(submit, label);
  submit.classList.toggle("danger", danger);
  show(null);
  busy(false);
  dialog.showModal();
  const first = fieldsAt.querySelector("input, select") ?? submit;
  first.focus();
  first.select?.(); // typing replaces the present value
}

function field({ name, label, type = "text", hint, options, value, ...attributes }) {
  const id = `field-${name}`;
  const described = hint ? { "aria-describedby": `${id}-hint` } : {};
  const control = options
    ? h("select", { id, name, ...described }, ...options.map(([choice, words]) => h("option", { value: choice, selected: choice === value }, words)))
    : h("input", { id, name, type, autocomplete: "off", spellcheck: "false", ...described, ...attributes });
  if (type === "checkbox") control.checked = Boolean(value);
  else if (type !== "file" && value !== undefined) control.value = value;
  const words = hint ? h("small", { id: `${id}-hint` }, hint) : null;
  if (type === "checkbox") return h("div", { class: "field check" }, control, h("label", { for: id }, label), words);
  return h("div", { class: "field" }, h("label", { for: id }, label), control, words);
}

function values() {
  const found = {};
  for (const control of fieldsAt.querySelectorAll("input, select")) {
    if (control.type === "checkbox") found[control.name] = control.checked;
    else if (control.type === "file") found[control.name] = [...control.files];
    else found[control.name] = control.value.trim();
  }
  return found;
}

function show(error) {
  trouble.hidden = error === null;
  setText(trouble, error ?? "");
}

function busy(is) {
  submit.disabled = is;
  progress.hidden = true;
  dialog.toggleAttribute("data-busy", is);
}

dialog.querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const invalid = fieldsAt.querySelector(":invalid");
  if (invalid) {
    show(`${fieldsAt.querySelector(`label[for="${invalid.id}"]`).textContent}: ${invalid.validationMessage}`);
    invalid.focus();
    return;
  }
  running = new AbortController();
  show(null);
  busy(true);
  try {
    await act(values(), {
      signal: running.signal,
      progress: (share) => {
        progress.hidden = false;
        progress.value = share;
      },
    });
    close();
  } catch (error) {
    show(running.signal.aborted ? "Cancelled." : error.message);
  } finally {
    busy(false);
    running = null;
  }
});

// Cancels an action in progress; otherwise closes the dialog.
function leave() {
  if (running) running.abort();
  else close();
}

cancel.addEventListener("click", leave);
dialog.addEventListener("cancel", (event) => {
  event.preventDefault();
  leave();
});
dialog.addEventListener("close", settle); // the browser may close it by itself

function close() {
  dialog.close();
  settle(); // at once, so that the next event finds the focus in its final place
}

function settle() {
  if (dialog.open || opener === null) return;
  fieldsAt.replaceChildren(); // a key that was typed is not kept
  refocus();
  opener = null;
}

/** Returns the focus to the element that opened the dialog. It may have been drawn again, or be gone. */
function refocus() {
  const again = opener.dataset.act && document.querySelector(`[data-act="${CSS.escape(opener.dataset.act)}"]`);
  const others = ["dialog[open] .close", "#locked-key", "#main"].map((selector) => document.querySelector(selector));
  [opener, again, ...others].find((node) => node?.checkVisibility() && !node.disabled).focus();
}

/** Shows a notification, which screen readers announce and which disappears by itself. */
export function notify(text) {
  const line = h("p", {}, text);
  byId("toasts").append(line);
  setTimeout(() => line.remove(), NOTE_MS);
}
