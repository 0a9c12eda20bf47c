// Polls the cluster's state while the page is visible, and passes each state on.

import { send } from "./api.js";

const AGAIN_MS = 2000; // until an answer gives another interval

export class Live {
  /** Calls onState(state) for each new state, and onStatus(error or null) after each call. */
  constructor(onState, onStatus) {
    this.query = { search: "", order: "", after: "", replicas_after: "", replica: "", history: "" };
    this.paused = false;
    this.onState = onState;
    this.onStatus = onStatus;
    this.etag = null;
    this.asked = null;
    this.timer = 0;
    this.waitMs = AGAIN_MS;
    document.addEventListener("visibilitychange", () => this.soon());
  }

  /** Changes the query, to other adapters or replicas for example, and polls at once. */
  ask(change) {
    Object.assign(this.query, change);
    this.etag = null;
    return this.now();
  }

  /** Changes the query like ask(), but polls only if it differs and polling has begun. */
  change(wanted) {
    if (Object.entries(wanted).every(([name, value]) => this.query[name] === value)) return;
    if (this.asked === null) Object.assign(this.query, wanted);
    else this.ask(wanted);
  }

  soon() {
    clearTimeout(this.timer);
    if (!this.paused && !document.hidden) this.timer = setTimeout(() => this.now(), 0);
  }

  pause(paused) {
    this.paused = paused;
    this.soon();
  }

  /** Resolves when this answer, or a later one, has been shown. */
  async now() {
    clearTimeout(this.timer);
    this.asked?.abort();
    const asked = (this.asked = new AbortController());
    const query = new URLSearchParams(Object.entries(this.query).filter(([, value]) => value !== ""));
    try {
      const conditional = this.etag ? { "if-none-match": this.etag } : {};
      const response = await send("GET", `v1/console/state?${query}`, undefined, {
        signal: asked.signal,
        headers: conditional,
      });
      if (response.status !== 304) {
        const state = await response.json();
        this.etag = response.headers.get("etag");
        this.waitMs = state.poll_s * 1000;
        this.onState(state);
      }
      this.onStatus(null);
    } catch (error) {
      if (asked.signal.aborted) return;
      this.etag = null;
      this.onStatus(error);
    }
    if (this.asked === asked && !this.paused && !document.hidden) {
      this.timer = setTimeout(() => this.now(), this.waitMs);
    }
  }
}
