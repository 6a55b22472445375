// The page: its views, its key, and the one event stream that feeds them.

import { Refused, call, events, key, setKey } from "./api.js";
import { showBoard } from "./board.js";
import { Line } from "./line.js";
import { LoadForm } from "./load_form.js";
import { Playground } from "./playground.js";

const VIEWS = ["line", "board", "playground", "load"];
const NEEDS_KEY = "Line, board and load need an admin key: enter it under Key. The playground works with any key.";
const RETRY_MS = 2000;
const element = (id) => document.getElementById(id);
const line = new Line();
const playground = new Playground();
let watching = null; // the AbortController of the stream

function showView() {
  const asked = location.hash.slice(1);
  const view = VIEWS.includes(asked) ? asked : "line";
  for (const name of VIEWS) element(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  scrollTo(0, 0);
}

function complain(message) {
  element("notice").hidden = !message;
  element("notice").textContent = message ?? "";
}

function setLink(state, text) {
  element("link").dataset.state = state;
  element("link").textContent = text;
}

function nameTiers(tiers) {
  for (const [id, everyone] of [["tier", "my own"], ["load-tier", "all, mixed"]]) {
    const select = element(id);
    if (select.options.length === tiers.length + 1) continue;
    const options = tiers.map((tier) => new Option(tier.name, tier.level));
    select.replaceChildren(new Option(everyone, ""), ...options);
  }
}

function take(event) {
  if (event.kind === "steps") return line.receive(event.replicas);
  line.setBoard(event);
  showBoard(event);
  nameTiers(event.tiers);
  playground.setModel(event.model);
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

/** Follow the server for ever. Streams end by themselves after a minute and are opened again at once. */
async function watch() {
  for (;;) {
    watching = new AbortController();
    try {
      const response = await call("ui/events", { signal: watching.signal });
      setLink("live", "live");
      complain(null);
      for await (const data of events(response)) take(JSON.parse(data));
    } catch (error) {
      if (error.name === "AbortError") continue;
      setLink("lost", "not connected");
      const isLocked = error instanceof Refused && [401, 403].includes(error.status);
      complain(isLocked ? `${NEEDS_KEY} (${error.message})` : error instanceof Refused ? error.message : "The server does not answer.");
      if (isLocked) await new Promise((done) => addEventListener("headway-key", done, { once: true }));
      else await pause(RETRY_MS);
    }
  }
}

element("key-button").addEventListener("click", () => {
  element("key").value = key();
  element("key-dialog").returnValue = ""; // that of the last time would count after Escape
  element("key-dialog").showModal();
});
element("key-cancel").addEventListener("click", () => element("key-dialog").close("cancel"));
element("key-dialog").addEventListener("close", () => {
  if (element("key-dialog").returnValue !== "ok") return;
  setKey(element("key").value);
  dispatchEvent(new Event("headway-key"));
  watching?.abort();
});
addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, textarea, select, dialog");
  if (event.key === "p" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) line.togglePause();
});
addEventListener("hashchange", showView);
new LoadForm(complain);
showView();
watch();
