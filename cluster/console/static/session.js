// The key that the viewer has entered. It stays in memory or, if the viewer wants that, until the tab is closed.

const PLACE = "lorafleet.key";

let key = sessionStorage.getItem(PLACE) ?? "";

export const session = {
  get key() {
    return key;
  },
  get kept() {
    return sessionStorage.getItem(PLACE) !== null;
  },
  set(value, keep) {
    key = value;
    if (keep && value) sessionStorage.setItem(PLACE, value);
    else sessionStorage.removeItem(PLACE);
  },
};
