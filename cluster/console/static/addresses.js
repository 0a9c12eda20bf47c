// The addresses of this page's views, behind its "#":
//
//   #/fleet                          #/adapters?search=TEXT&order=busiest     #/playground?model=NAME&model=NAME
//   #/replicas/ID                    #/adapters/NAME
//
// Names are encoded, so that none ends up as another part of an address or as a URL of its own.

import { h } from "./dom.js";

/** A name in a path: its slashes are part of it. */
export const inPath = (name) => name.split("/").map(encodeURIComponent).join("/");

/** Whether a name can be in the path of a call: a browser takes dots between slashes for a way to another path. */
export const fitsPath = (name) => !name.split("/").some((part) => ["", ".", ".."].includes(part));

/** query: pairs of a parameter and its value; empty ones are left out. */
export function address(view, name = "", query = []) {
  const given = query.filter(([, value]) => value !== "");
  return `#/${view}${name ? `/${inPath(name)}` : ""}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}

/** The view, name ("" for none) and query of an address. The slash before the view may be missing. */
export function readAddress(hash) {
  const [, path, query] = /^#?\/?([^?]*)\??(.*)$/s.exec(hash);
  const [view, ...name] = path.split("/");
  return { view, name: decoded(name.join("/")), query: new URLSearchParams(query) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // A stray "%" stands for itself.
  }
}

export const adapterLink = (name) => h("a", { class: "link", title: name, href: address("adapters", name) }, name);
