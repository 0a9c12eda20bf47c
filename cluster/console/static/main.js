// Starts the page: the views, which of them is seen, and the polling that feeds them.

import { makeAdapters } from "./adapters.js";
import { makeDetail } from "./detail.js";
import { byId, setText } from "./dom.js";
import { makeFleet } from "./fleet.js";
import { askKey, showKey, showRefusedKey } from "./key.js";
import { Live } from "./live.js";
import { makePlayground } from "./playground.js";
import { askPush } from "./push.js";
import { session } from "./session.js";

const VIEWS = ["fleet", "adapters", "playground"];
const REFUSED = [401, 403];

let closed = "The server has not answered yet."; // why administration is closed
let tenant = null; // whose key was sent
let everShown = false;
let failed = null; // what the last call met with
let locked = false; // nothing is shown: the server wants a key, or another one

const live = new Live(show, showStatus);
const enterKey = () =>
  askKey(() => {
    fleet.reset();
    adapters.reset();
    return live.ask({ after: "", replicas_after: "" });
  });
const playground = makePlayground();
const detail = makeDetail({
  rights: (adapter) => rightsTo(adapter),
  changed: () => live.ask({}),
  needKey: enterKey,
  tryIt(name) {
    location.hash = "playground";
    playground.show(name);
  },
});
const fleet = makeFleet({ open: detail.open, pageReplicas: (after) => live.ask({ replicas_after: after }) });
const adapters = makeAdapters({ open: detail.open, ask: (change) => live.ask(change) });

function show(state) {
  everShown = true;
  closed = whyClosed(state.viewer.cannot_administer);
  ({ tenant } = state.viewer);
  setText(byId("base"), state.base_models[0]);
  showKey(state.viewer);
  byId("open-push").disabled = closed !== null;
  byId("push-reason").parentElement.hidden = closed === null;
  setText(byId("push-reason"), closed ?? "");
  fleet.draw(state);
  adapters.draw(state);
  playground.start(state);
  detail.refresh();
}

/** In the server's words, unless they tell a program what to send. */
function whyClosed(refused) {
  if (refused === null) return null;
  return refused.code === "invalid_api_key" && !session.key ? "Changing adapters needs the admin key." : refused.message;
}

/** Why an adapter cannot be changed, and why it cannot be pinned; null where it can. */
function rightsTo(adapter) {
  const foreign = tenant !== null && adapter.tenant !== tenant ? "It is public: the operator changes it." : null;
  const change = closed ?? foreign;
  return { change, pin: change ?? (tenant === null ? null : "Pinning takes slots from all tenants: it needs the operator's key.") };
}

function showStatus(error) {
  failed = error;
  const words = live.paused ? "Paused" : error === null ? "Live" : "Not live";
  setText(byId("live-text"), words);
  byId("live").dataset.state = live.paused ? "paused" : error === null ? "live" : "lost";
  lock(error !== null && REFUSED.includes(error.status) ? error : null);
  const trouble = byId("trouble");
  trouble.hidden = error === null || locked;
  setText(trouble, trouble.hidden ? "" : `${error.message}${everShown ? " What you see is from before; the page goes on asking." : ""}`);
}

/** In the place of the views, which are of a key that is not in force. The page goes on asking: it may be again. */
function lock(refusal) {
  const was = locked;
  locked = refusal !== null;
  if (locked) {
    setText(byId("locked-title"), session.key ? "This key does not open the console" : "This server asks for a key");
    setText(byId("locked-reason"), session.key ? refusal.message : "The console shows what an API key may see, and changes what it may change. The admin key opens everything.");
    showRefusedKey();
  }
  if (locked === was) return;
  const lost = document.activeElement === document.body || byId("main").contains(document.activeElement);
  byId("detail").close();
  turn();
  if (locked && lost) byId("locked-key").focus();
}

function turn() {
  const wanted = location.hash.slice(1);
  const view = VIEWS.includes(wanted) ? wanted : VIEWS[0];
  byId("locked").hidden = !locked;
  for (const one of VIEWS) byId(`view-${one}`).hidden = locked || one !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  scrollTo(0, 0);
}

byId("pause").addEventListener("click", () => {
  live.pause(!live.paused);
  byId("pause").setAttribute("aria-pressed", String(live.paused));
  showStatus(failed);
});
for (const id of ["open-key", "push-key", "locked-key"]) byId(id).addEventListener("click", enterKey);
byId("open-push").addEventListener("click", () => askPush({ tenant, after: () => live.ask({}) }));
addEventListener("hashchange", turn);
turn();
live.now();
