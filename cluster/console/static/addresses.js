// The addresses of this page's views, behind its "#":
//
//   #/fleet                          #/adapters?search=TEXT&order=busiest     #/playground?model=NAME&model=NAME
//   #/replicas/ID                    #/adapters/NAME
//
// Names are encoded, so that none ends up as another part of an address or as a URL of its own.

import { h } from "./dom.js";

/** Encodes a name for a path. Its slashes stay slashes. */
export const inPath = (name) => name.split("/").map(encodeURIComponent).join("/");

/** Returns whether a name can be in the path of a call, since browsers resolve dots between slashes to another path. */
export const fitsPath = (name) => !name.split("/").some((part) => ["", ".", ".."].includes(part));

/** Returns the address of a view. `query` has pairs of a parameter and its value; empty values are left out. */
export function address(view, name = "", query = []) {
  const given = query.filter(([, value]) => value !== "");
  return `#/${view}${name ? `/${inPath(name)}` : ""}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}

/** Returns the view, name ("" for none) and query of an address. The slash before the view may be missing. */
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
