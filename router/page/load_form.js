// The demo load: starts it, shows what became of it, ends it.

import { call, events } from "./api.js";

const element = (id) => document.getElementById(id);
const FIGURES = [
  ["sent", "num_sent"], ["running", "num_running"], ["finished", "num_finished"],
  ["refused", "num_refused"], ["failed", "num_failed"], ["tokens", "output_tokens"],
];

export class LoadForm {
  #abort = null;

  constructor(complain) {
    this.complain = complain;
    element("load-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.#abort) this.#run();
    });
    element("load-stop").addEventListener("click", () => this.#abort?.abort());
  }

  async #run() {
    this.#abort = new AbortController();
    this.#setRunning(true);
    try {
      const response = await call("ui/load", { body: this.#body(), signal: this.#abort.signal });
      for await (const data of events(response)) this.#show(JSON.parse(data));
    } catch (error) {
      if (error.name === "AbortError") element("load-note").textContent = "Stopped.";
      else this.complain(error.message);
    }
    this.#abort = null;
    this.#setRunning(false);
  }

  #body() {
    const number = (id) => Number(element(id).value);
    const tier = element("load-tier").value;
    return {
      requests_per_s: number("rate"),
      duration_s: number("seconds"),
      prompt_tokens: number("prompt-tokens"),
      output_tokens: number("output-tokens"),
      priority: tier === "" ? null : Number(tier),
    };
  }

  #setRunning(isRunning) {
    element("load-start").disabled = isRunning;
    element("load-stop").hidden = !isRunning;
    if (isRunning) element("load-note").replaceChildren("Running. ", link("#line", "Watch it on the line"));
  }

  #show(event) {
    const figures = FIGURES.map(([title, field]) => {
      const entry = document.createElement("div");
      const name = document.createElement("dt");
      const value = document.createElement("dd");
      name.textContent = title;
      value.textContent = event[field].toLocaleString("en");
      entry.append(name, value);
      return entry;
    });
    element("load-state").replaceChildren(...figures);
    if (event.ended) element("load-note").textContent = "Ended.";
  }
}

function link(href, text) {
  const anchor = document.createElement("a");
  anchor.href = href;
  anchor.textContent = text;
  return anchor;
}
