// Starts the page: the views, which of them the address asks for, and the polling that feeds them.

import { makeAdapters } from "./adapters.js";
import { address, readAddress } from "./addresses.js";
import { makeDetail } from "./detail.js";
import { byId, setText } from "./dom.js";
import { makeFleet } from "./fleet.js";
import { askKey, showKey, showRefusedKey } from "./key.js";
import { Live } from "./live.js";
import { makePlayground } from "./playground.js";
import { askPush } from "./push.js";
import { makeReplica } from "./replica.js";
import { session } from "./session.js";

const VIEWS = { "": "fleet", fleet: "fleet", replicas: "replica", adapters: "adapters", playground: "playground" };
const SECTIONS = ["fleet", "replica", "adapters", "playground", "nowhere"];
const TABS = { replica: "fleet" }; // the navigation's tab of a view that has none of its own
const REFUSED = [401, 403];

let closed = "The server has not answered yet."; // why adapters cannot be changed, or null
let tenant = null; // the tenant of the key that was sent
let everShown = false;
let failed = null; // the last call's error, or null
let locked = false; // true while nothing is shown, since the server requires a key or rejects this one
let under = null; // the visible view, or the one below an adapter's sheet: {section, name, query, hash}

const live = new Live(show, showStatus);
const enterKey = () =>
  askKey(() => {
    fleet.reset();
    adapters.reset();
    return live.ask({ after: "", replicas_after: "" });
  });
const playground = makePlayground({ readdress: (query) => readdress("playground", query) });
const detail = makeDetail({
  rights: (adapter) => rightsTo(adapter),
  changed: () => live.ask({}),
  closed: () => (location.hash = under.hash),
  needKey: enterKey,
  tryIt: (name) => playground.show(name),
});
const fleet = makeFleet({ pageReplicas: (after) => live.ask({ replicas_after: after }) });
const replica = makeReplica();
const adapters = makeAdapters({ ask: (change) => live.ask(change), readdress: (query) => readdress("adapters", query) });

function show(state) {
  const isFirst = !everShown;
  everShown = true;
  closed = whyClosed(state.viewer.cannot_administer);
  ({ tenant } = state.viewer);
  setText(byId("base"), state.base_models[0]);
  showKey(state.viewer);
  byId("open-push").disabled = closed !== null;
  byId("push-reason").parentElement.hidden = closed === null;
  setText(byId("push-reason"), closed ?? "");
  if (under.section === "replica") replica.draw(state);
  else fleet.draw(state);
  adapters.draw(state);
  playground.start(state);
  if (isFirst) turn(); // A sheet needs to know what its viewer may do.
  else detail.refresh();
}

/** Returns the server's message, unless it is for programs that send no key. */
function whyClosed(refused) {
  if (refused === null) return null;
  return refused.code === "invalid_api_key" && !session.key ? "Changing adapters needs the admin key." : refused.message;
}

/** Returns why an adapter cannot be changed and why it cannot be pinned, or null where it can. */
function rightsTo(adapter) {
  const foreign = tenant !== null && adapter.tenant !== tenant ? "It is public: only the operator can change it." : null;
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
  setText(trouble, trouble.hidden ? "" : `${error.message}${everShown ? " The data below is out of date; the page keeps trying." : ""}`);
}

/** Replaces the views if the server rejects the key. Polling continues, since the key may become valid again. */
function lock(refusal) {
  const was = locked;
  locked = refusal !== null;
  if (locked) {
    setText(byId("locked-title"), session.key ? "This key does not open the console" : "This server requires a key");
    setText(byId("locked-reason"), session.key ? refusal.message : "The console shows what your API key may see, and can change what it may change. The admin key gives access to everything.");
    showRefusedKey();
  }
  if (locked === was) return;
  const lost = document.activeElement === document.body || byId("main").contains(document.activeElement);
  if (locked && detail.isOpen) history.replaceState(null, "", under.hash); // The next key must not request this adapter.
  turn();
  if (locked && lost) byId("locked-key").focus();
}

/** Shows the view that the address names. */
function turn() {
  const { view, name, query } = readAddress(location.hash);
  const isSheet = view === "adapters" && name !== "";
  const before = under;
  if (!isSheet) under = { section: sectionOf(view, name), name, query, hash: location.hash || address("fleet") };
  else under ??= { section: "adapters", name: "", query: new URLSearchParams(), hash: address("adapters") };
  const { section } = under;
  byId("locked").hidden = !locked;
  for (const candidate of SECTIONS) byId(`view-${candidate}`).hidden = locked || candidate !== section;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === address(TABS[section] ?? section)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (under !== before) fill();
  if (isSheet && everShown && !locked) detail.open(name);
  else detail.hide();
  if (before !== null && before.section !== section) {
    scrollTo(0, 0);
    if (document.activeElement !== document.body && !document.activeElement.checkVisibility()) byId("main").focus();
  }
}

const sectionOf = (view, name) => (view === "replicas" && !name ? "fleet" : Object.hasOwn(VIEWS, view) ? VIEWS[view] : "nowhere");

/** Requests the data that the view shows. */
function fill() {
  const { section, name, query } = under;
  if (section === "replica") replica.show(name);
  if (section === "playground") playground.choose(query.getAll("model"));
  live.change({
    ...adapters.choose(section === "adapters" ? query : new URLSearchParams()),
    replica: section === "replica" ? name.slice(0, 256) : "",
    history: section === "fleet" || section === "replica" ? "true" : "",
  });
}

/** Writes the choices in a view into the address, without adding an entry to the browser's history. */
function readdress(view, query) {
  if (under === null || under.section !== view) return;
  const hash = address(view, "", query);
  under = { ...under, query: readAddress(hash).query, hash };
  const now = readAddress(location.hash); // The viewer may have followed a link whose event has not arrived yet.
  if (now.name === "" && sectionOf(now.view, now.name) === view) history.replaceState(null, "", hash);
}

byId("pause").addEventListener("click", () => {
  live.pause(!live.paused);
  byId("pause").setAttribute("aria-pressed", String(live.paused));
  showStatus(failed);
});
for (const id of ["open-key", "push-key", "locked-key"]) byId(id).addEventListener("click", enterKey);
byId("open-push").addEventListener("click", () => askPush({ tenant, after: () => live.ask({}) }));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // Its "#main" is not the address of a view.
  byId("main").focus();
});
addEventListener("hashchange", turn);
turn();
live.now();
