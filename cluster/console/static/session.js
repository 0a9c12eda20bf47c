// The key that a person has given. It stays in memory, or for as long as this tab where they want that; never longer.

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
