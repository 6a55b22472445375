// The playground: a chat over the public API, with what it cost in time, and the same request as code.

import { call, events, key, urlOf } from "./api.js";

const element = (id) => document.getElementById(id);
const PATH = "v1/chat/completions";

export class Playground {
  #turns = [];
  #abort = null;
  #model = null;

  constructor() {
    element("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.#abort) this.#send();
    });
    element("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) element("ask").requestSubmit();
    });
    element("stop").addEventListener("click", () => this.#abort?.abort());
    element("clear").addEventListener("click", () => this.#clear());
    element("copy-curl").addEventListener("click", () => copy(asCurl(this.#body())));
    element("copy-python").addEventListener("click", () => copy(asPython(this.#body())));
  }

  setModel(model) {
    this.#model = model;
  }

  async #findModel() {
    const answer = await (await call("v1/models")).json();
    this.#model = answer.data[0]?.id ?? null;
    if (!this.#model) throw new Error("this key may use no model of this server");
  }

  #clear() {
    this.#abort?.abort();
    this.#turns = [];
    element("log").replaceChildren();
  }

  /** The request as it would be sent now. */
  #body() {
    const text = element("prompt").value.trim();
    const system = element("system").value.trim();
    const messages = [
      ...(system ? [{ role: "system", content: system }] : []),
      ...this.#turns,
      ...(text ? [{ role: "user", content: text }] : []),
    ];
    const body = {
      model: this.#model,
      messages,
      max_tokens: Number(element("max-tokens").value),
      temperature: Number(element("temperature").value),
      top_p: Number(element("top-p").value),
    };
    if (element("seed").value !== "") body.seed = Number(element("seed").value);
    if (element("tier").value !== "") body.priority = Number(element("tier").value);
    return body;
  }

  async #send() {
    this.#abort = new AbortController();
    this.#setBusy(true);
    const text = element("prompt").value.trim();
    let answer = null;
    try {
      if (!this.#model) await this.#findModel();
      const body = this.#body();
      this.#turns.push({ role: "user", content: text });
      addTurn("user", text);
      element("prompt").value = "";
      answer = addTurn("assistant", "");
      await this.#stream(body, answer);
    } catch (error) {
      const said = error.name === "AbortError" ? "Stopped." : error.message;
      fail(answer ?? addTurn("assistant", ""), said);
    }
    const answered = answer?.querySelector(".text").textContent;
    if (answered) this.#turns.push({ role: "assistant", content: answered });
    this.#abort = null;
    this.#setBusy(false);
  }

  async #stream(body, answer) {
    const sentAt = performance.now();
    const times = [];
    const text = answer.querySelector(".text");
    let usage = null;
    const response = await call(PATH, {
      body: { ...body, stream: true, stream_options: { include_usage: true } },
      signal: this.#abort.signal,
    });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const piece = event.choices?.[0]?.delta?.content;
      if (!piece) continue;
      times.push(performance.now());
      text.append(piece);
      answer.querySelector(".figures").textContent = figures(sentAt, times, usage);
    }
    answer.querySelector(".figures").textContent = figures(sentAt, times, usage);
  }

  #setBusy(isBusy) {
    element("send").disabled = isBusy;
    element("stop").hidden = !isBusy;
  }
}

function figures(sentAt, times, usage) {
  if (!times.length) return "no text came";
  const gaps = times.slice(1).map((at, index) => at - times[index]).sort((a, b) => a - b);
  const parts = [`TTFT ${Math.round(times[0] - sentAt)} ms`];
  if (gaps.length) {
    const at = (share) => gaps[Math.min(gaps.length - 1, Math.floor(share * gaps.length))].toFixed(1);
    parts.push(`ITL ${at(0.5)} ms median, ${at(0.99)} ms P99`);
  }
  if (usage) parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
  return parts.join(" · ");
}

function addTurn(role, text) {
  const item = document.createElement("li");
  item.className = role;
  const words = document.createElement("div");
  words.className = "text";
  words.textContent = text;
  const numbers = document.createElement("div");
  numbers.className = "figures";
  item.append(words, numbers);
  element("log").append(item);
  item.scrollIntoView({ block: "nearest" });
  return item;
}

function fail(item, message) {
  const words = document.createElement("div");
  words.className = "failed";
  words.textContent = message;
  item.append(words);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    element("copied").textContent = "Copied.";
  } catch {
    element("copied").textContent = "The browser did not allow it.";
  }
}

/** In single quotes for a POSIX shell. */
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function asCurl(body) {
  const auth = key() ? ` -H "Authorization: Bearer $KEY"` : "";
  return `curl -N ${quoted(urlOf(PATH))} -H 'Content-Type: application/json'${auth} \\\n  -d ${quoted(JSON.stringify({ ...body, stream: true }))}\n`;
}

function asPython(body) {
  const { model, messages, max_tokens, temperature, top_p, seed, priority } = body;
  const lines = [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(urlOf("v1"))}, api_key=${key() ? 'os.environ["KEY"]' : '"unused"'})`,
    "stream = client.chat.completions.create(",
    `    model=${JSON.stringify(model)},`,
    `    messages=${JSON.stringify(messages)},`,
    `    max_tokens=${max_tokens}, temperature=${temperature}, top_p=${top_p}${seed === undefined ? "" : `, seed=${seed}`},`,
    ...(priority === undefined ? [] : [`    extra_body={"priority": ${priority}},`]),
    "    stream=True,",
    ")",
    "for event in stream:",
    "    if event.choices:",
    '        print(event.choices[0].delta.content or "", end="", flush=True)',
    "",
  ];
  return (key() ? lines : lines.slice(2)).join("\n");
}
