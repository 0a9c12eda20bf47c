// Makes and patches elements. Everything that comes from a server is set as text: nothing here takes HTML, and no
// attribute that can hold code is ever made from data. The only URLs that are made from data come from addresses.js:
// each begins with "#", and its data is encoded.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Makes an element. Properties are listeners (on…), the hue of an adapter, or attributes; false and null leave an attribute out. */
export function h(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "hue") node.style.setProperty("--hue", String(value));
    else setAttribute(node, name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function setAttribute(node, name, value) {
  if (value === false || value === null || value === undefined) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value === true ? "" : value)) {
    node.setAttribute(name, value === true ? "" : String(value));
  }
}

/** Touches the page only where something has changed, so that a selection or a screen reader is not disturbed. */
export function setText(node, text) {
  const wanted = String(text ?? "");
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Makes the children of `parent` stand for `items`, in their order. Nodes stay, and with them focus and selection. */
export function keyed(parent, items, keyOf, create, update) {
  const wanted = new Set(items.map(keyOf));
  const there = new Map();
  for (const node of [...parent.children]) {
    if (wanted.has(node.key)) there.set(node.key, node);
    else node.remove();
  }
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let node = there.get(key);
    if (node === undefined) {
      node = create(item);
      node.key = key;
    }
    update(node, item);
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
}

/** Returns the hue of an adapter's bytes, which is the same on every replica and in every view. */
export function hueOf(digest) {
  return Number.parseInt(digest.slice(2, 8), 16) % 360 || 0;
}
