// The key: the viewer enters it in a dialog, every later call sends it, and it is forgotten with the page.

import { byId, setText } from "./dom.js";
import { ask } from "./dialogs.js";
import { session } from "./session.js";

export function askKey(changed) {
  ask({
    title: "Key",
    text: "Enter an API key or the server's admin key. It is stored only in this page's memory and sent only to this server.",
    fields: [
      { name: "key", label: "Key", type: "password", value: session.key, hint: "Leave it empty to continue without a key." },
      { name: "keep", label: "Keep it until this tab is closed", type: "checkbox", value: session.kept },
    ],
    submit: "Use key",
    run: async ({ key, keep }) => {
      session.set(key, keep);
      await changed();
    },
  });
}

export function showKey({ cannot_administer: closed, tenant }) {
  const kind = closed === null ? "Admin key" : "Key";
  say(!session.key ? "Key" : tenant !== null ? `${kind} of ${tenant}` : closed === null ? kind : "Key in use", Boolean(session.key));
}

export function showRefusedKey() {
  say(session.key ? "Key rejected" : "Key", false);
}

function say(words, isOpen) {
  setText(byId("key-text"), words);
  byId("open-key").toggleAttribute("data-open", isOpen);
}
