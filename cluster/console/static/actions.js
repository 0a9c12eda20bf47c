// The administrator's actions on an adapter: each asks for its parameters, calls the API, and reports the result.

import { adapterPath, post, send } from "./api.js";
import { ask, notify } from "./dialogs.js";
import { plural, split } from "./format.js";
import { askPush } from "./push.js";

/** Calls after() when the adapter has changed, and removed() when it has been removed. */
export function actionsOf(adapter, { after, removed }) {
  const { name } = adapter;
  const call = (verb, body) => post(adapterPath(name, verb), body);

  async function done(words) {
    notify(words);
    await after();
  }

  const replicas = (hint) => ({ name: "replicas", label: "Replicas", type: "number", min: 1, step: 1, value: 1, required: true, hint });

  return {
    push: () => askPush({ name, after }),

    pin: () =>
      ask({
        title: `Pin ${name}`,
        text: "The versions that its names stand for stay in slots, whichever other adapters are requested.",
        fields: [replicas("Number of replicas that keep it in a slot.")],
        submit: "Pin",
        run: async ({ replicas: count }) => {
          await call("pin", { replicas: Number(count) });
          await done(`${name} is pinned to ${plural(Number(count), "replica")}.`);
        },
      }),

    unpin: () =>
      ask({
        title: `Unpin ${name}`,
        text: "Other adapters may use its slots again.",
        submit: "Unpin",
        run: async () => {
          await call("unpin", {});
          await done(`${name} is no longer pinned.`);
        },
      }),

    prefetch: () =>
      ask({
        title: `Prefetch ${name}`,
        text: "Loads it into host memory before its first request.",
        fields: [replicas("Number of replicas that load it.")],
        submit: "Prefetch",
        run: async ({ replicas: count }) => {
          const { replicas: loadedOn } = await call("prefetch", { replicas: Number(count) });
          await done(`${name} is in the memory of ${plural(loadedOn.length, "replica")}.`);
        },
      }),

    verify: () =>
      ask({
        title: `Verify ${name}`,
        text: "Reads the files of every version again and compares their digests.",
        submit: "Verify",
        run: async () => {
          const { verified } = await call("verify", {});
          await done(`${name}: ${verified.map((version) => `v${version}`).join(", ")} ${verified.length > 1 ? "have" : "has"} the bytes that were registered.`);
        },
      }),

    alias: (alias) => {
      const present = alias === null ? {} : adapter.aliases[alias];
      ask({
        title: alias === null ? `Add an alias of ${name}` : `Move ${alias}`,
        text: "Enter a weight for each version that its requests should go to; leave the others empty.",
        fields: [
          ...(alias === null ? [{ name: "alias", label: "Alias", required: true, maxlength: 256 }] : []),
          ...adapter.versions.toReversed().map((version) => ({ name: `v${version.number}`, label: `Version ${version.number}`, type: "number", min: 0, step: "any", value: present[version.number] ?? "", hint: version.digest.slice(0, 12) })),
        ],
        submit: alias === null ? "Add" : "Move",
        run: async (values) => {
          const weights = {};
          for (const { number } of adapter.versions) {
            if (Number(values[`v${number}`]) > 0) weights[number] = Number(values[`v${number}`]);
          }
          const wanted = alias ?? values.alias;
          await call("alias", { alias: wanted, split: weights });
          await done(`${wanted} stands for ${split(weights)}.`);
        },
      });
    },

    rollback: (alias, moves) =>
      ask({
        title: `Roll ${alias} back`,
        text: `From ${split(moves.at(-1).split)} to ${split(moves.at(-2).split)}, at once and on every replica.`,
        submit: "Roll back",
        run: async () => {
          await call("rollback", { alias });
          await done(`${alias} stands for ${split(moves.at(-2).split)} again.`);
        },
      }),

    unalias: (alias) =>
      ask({
        title: `Remove the alias ${alias}`,
        text: `Requests for ${alias} will be answered with 404. ${name} stays.`,
        submit: "Remove alias",
        danger: true,
        run: async () => {
          await send("DELETE", `${adapterPath(name)}?${new URLSearchParams({ alias })}`);
          await done(`The alias ${alias} is removed.`);
        },
      }),

    remove: () =>
      ask({
        title: `Remove ${name}`,
        text: adapter.found
          ? "It is forgotten until a request names it and a resolver finds it again."
          : `${adapter.versions.length > 1 ? `All ${adapter.versions.length} versions` : "The adapter"} and every alias are removed from every replica and from the catalogue. Requests in flight are answered first. This cannot be undone.`,
        fields: [{ name: "sure", label: `Type ${name} to confirm`, required: true }],
        submit: "Remove",
        danger: true,
        run: async ({ sure }) => {
          if (sure !== name) throw new Error(`The text is not ${name}.`);
          await send("DELETE", adapterPath(name));
          notify(`${name} is removed.`);
          removed();
          await after();
        },
      }),
  };
}
