// Pushes an adapter: a folder of this machine, which is sent as a tar, or a path or URI that the server reads.

import { ApiError, adapterPath, errorFrom, headers, post } from "./api.js";
import { ask, notify } from "./dialogs.js";
import { bytes, plural } from "./format.js";
import { tarOf } from "./tar.js";

const CONFIG = "adapter_config.json";
const WEIGHTS = ["adapter_model.safetensors", "adapter_model.bin"];
const LANGUAGE = ["chat_template.jinja", "generation_config.json", "lorafleet.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]; // sent if they exist
const DRAFT = ["draft/adapter_config.json", "draft/adapter_model.safetensors"]; // a LoRA for the draft model, sent if it exists

/** `name` is the adapter that gets a version; "" asks for one. `tenant` is the key's; null may push for any tenant. */
export function askPush({ name = "", tenant = null, after }) {
  ask({
    title: name ? `New version of ${name}` : "Push an adapter",
    text: "Choose a folder that PEFT has saved. Its files are checked and loaded before any request is served with them.",
    fields: [
      ...(name ? [] : [{ name: "name", label: "Name", required: true, maxlength: 256, hint: "Requests name it as their model." }]),
      { name: "folder", label: "Folder on this machine", type: "file", webkitdirectory: true, hint: `Its ${CONFIG} and ${WEIGHTS[0]} are sent, and its tokenizer, chat template and draft LoRA if it has them.` },
      { name: "source", label: "Or a path or URI that the server reads", placeholder: "s3://bucket/adapter" },
      { name: "replicas", label: "Replicas that must load it first", type: "number", min: 1, step: 1, value: 1, required: true },
      ...(tenant === null && !name ? [{ name: "pin", label: "Number of replicas to pin it to", type: "number", min: 1, step: 1, placeholder: "not pinned" }, { name: "tenant", label: "Tenant", placeholder: "public" }] : []),
      { name: "activate", label: "Send requests to it from now on", type: "checkbox", value: true },
    ],
    submit: "Push",
    run: async (values, under) => {
      const pushed = await push(name || values.name, values, under);
      const number = pushed.versions.at(-1).number;
      notify(`${pushed.id}: ${plural(pushed.versions.length, "version")}, the last is v${number}.`);
      await after();
    },
  });
}

async function push(name, values, under) {
  const options = {
    activate: values.activate,
    replicas: Number(values.replicas),
    ...(values.pin ? { pin: Number(values.pin) } : {}),
    ...(values.tenant ? { tenant: values.tenant } : {}),
  };
  if (values.folder.length && values.source) throw new Error("Choose a folder or give a path, not both.");
  if (values.source) return post("v1/adapters", { name, source: values.source, ...options });
  if (!values.folder.length) throw new Error("Choose a folder, or give a path or URI.");
  const [folder] = values.folder[0].webkitRelativePath.split("/");
  const query = new URLSearchParams({ options: JSON.stringify(options), source: `console: ${folder}` });
  return upload(`${adapterPath(name, "files")}?${query}`, tarOf(filesOf(values.folder)), under);
}

/** Selects the files that a server reads. The folder of a training run has many more. */
export function filesOf(folder) {
  const named = new Map(folder.map((file) => [file.webkitRelativePath.split("/").slice(1).join("/"), file]));
  const weights = WEIGHTS.find((name) => named.has(name));
  if (!named.has(CONFIG) || weights === undefined) {
    throw new Error(`The folder has no ${named.has(CONFIG) ? WEIGHTS.join(" or ") : CONFIG}; choose the folder that PEFT has saved.`);
  }
  return Object.fromEntries([CONFIG, weights, ...LANGUAGE, ...DRAFT].filter((name) => named.has(name)).map((name) => [name, named.get(name)]));
}

/** Uploads with XMLHttpRequest, since fetch does not report an upload's progress. */
function upload(path, content, { signal, progress }) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("PUT", path);
    for (const [name, value] of Object.entries(headers({ "content-type": "application/x-tar" }))) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
    request.onerror = () => reject(new ApiError(`The upload of ${bytes(content.size)} was interrupted.`, 0, null));
    request.onabort = () => reject(new ApiError("Cancelled.", 0, null));
    request.onload = () => (request.status === 200 ? resolve(JSON.parse(request.responseText)) : reject(errorFrom(request.status, request.responseText)));
    signal.addEventListener("abort", () => request.abort());
    request.send(content);
  });
}
