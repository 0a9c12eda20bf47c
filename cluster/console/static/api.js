// Calls to the server that this page came from. Paths are relative to the page, so that a prefix before it is kept.

import { inPath } from "./addresses.js";
import { session } from "./session.js";

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function headers(more = {}) {
  return session.key ? { authorization: `Bearer ${session.key}`, ...more } : more;
}

/** Returns the path of a call that administers an adapter. */
export const adapterPath = (name, verb) => `v1/adapters/${inPath(name)}${verb ? `/${verb}` : ""}`;

export async function send(method, path, body, options = {}) {
  const json = body === undefined ? {} : { "content-type": "application/json" };
  let response;
  try {
    response = await fetch(path, {
      method,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      ...options,
      headers: headers({ ...json, ...options.headers }),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.", 0, null);
  }
  if (!response.ok && response.status !== 304) throw await errorOf(response);
  return response;
}

export const get = async (path, options) => (await send("GET", path, undefined, options)).json();
export const post = async (path, body) => (await send("POST", path, body)).json();

/** Returns the error of a response, with the server's own message if it has one. */
export async function errorOf(response) {
  return errorFrom(response.status, await response.text().catch(() => ""));
}

export function errorFrom(status, text) {
  try {
    const { error } = JSON.parse(text);
    if (typeof error.message === "string") return new ApiError(error.message, status, error.code);
  } catch {
    // A proxy's error page is not JSON.
  }
  return new ApiError(`The server answered ${status}.`, status, null);
}
