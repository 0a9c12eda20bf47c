// Turns the pages of a list that the server sends page by page.

import { h, setText } from "./dom.js";

/** The pages of a list, each of which is requested by the last name of the page before. */
export class Pager {
  constructor(node, what, go) {
    this.node = node;
    this.go = go;
    this.pages = [""]; // for each page so far, the name after which it begins
    this.back = h("button", { type: "button", onclick: () => this.turn(-1), "aria-label": `Previous ${what}` }, "‹");
    this.on = h("button", { type: "button", onclick: () => this.turn(1), "aria-label": `Next ${what}` }, "›");
    this.number = h("span", { "aria-live": "polite" });
    node.append(this.back, this.number, this.on);
  }

  reset() {
    this.pages = [""];
  }

  show(last, hasMore) {
    this.last = last;
    this.back.disabled = this.pages.length === 1;
    this.on.disabled = !hasMore;
    this.node.hidden = this.pages.length === 1 && !hasMore;
    setText(this.number, `page ${this.pages.length}`);
  }

  turn(by) {
    if (by > 0) this.pages.push(this.last);
    else this.pages.pop();
    this.go(this.pages.at(-1));
  }
}
