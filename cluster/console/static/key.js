// The key: asked for in a dialog, sent with every call from then on, forgotten with the page.

import { byId, setText } from "./dom.js";
import { ask } from "./dialogs.js";
import { session } from "./session.js";

export function askKey(changed) {
  ask({
    title: "Key",
    text: "An API key, or the server's admin key. It is kept in this page's memory only, and sent to this server only.",
    fields: [
      { name: "key", label: "Key", type: "password", value: session.key, hint: "Leave it empty to go on without one." },
      { name: "keep", label: "Keep it until this tab is closed", type: "checkbox", value: session.kept },
    ],
    submit: "Use it",
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
  say(session.key ? "Key refused" : "Key", false);
}

function say(words, isOpen) {
  setText(byId("key-text"), words);
  byId("open-key").toggleAttribute("data-open", isOpen);
}
