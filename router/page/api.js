// Calls to the server this page came from: the key, errors, event streams.

const BASE = new URL("..", document.baseURI);
const KEY = "headway-key";

export const urlOf = (path) => new URL(path, BASE).href;
export const key = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (value) => sessionStorage.setItem(KEY, value.trim());

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request; resolves to a response that is ok, throws Refused for one that is not. */
export async function call(path, { body, signal } = {}) {
  const headers = key() ? { authorization: `Bearer ${key()}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(urlOf(path), {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    credentials: "omit",
    cache: "no-store",
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new Refused(response.status, answer?.error?.message ?? `the server answered ${response.status}`);
}

/** Yield the data of each server-sent event, until the stream ends. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
