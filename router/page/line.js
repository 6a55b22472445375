// The line: a card per replica, drawn at most once per frame, and one clock for all of them.

import { onSchemeChange, tierClass } from "./palette.js";
import { ReplicaCard } from "./replica_card.js";

export class Line {
  #cards = new Map();
  #tiers = [];
  #isPaused = false;
  #drawnAt = performance.now();

  constructor() {
    this.holder = document.getElementById("replicas");
    this.pauseButton = document.getElementById("pause");
    this.pauseButton.addEventListener("click", () => this.togglePause());
    onSchemeChange(() => this.#cards.forEach((card) => card.redraw()));
    const frame = (at) => {
      this.#cards.forEach((card) => card.advance(at - this.#drawnAt));
      this.#drawnAt = at;
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  /** The strictest ITL target of the tiers; null without one. */
  get targetMs() {
    const targets = this.#tiers.map((tier) => tier.itl_target_ms).filter(Boolean);
    return targets.length ? Math.min(...targets) : null;
  }

  rankOf(level) {
    return this.#tiers.findIndex((tier) => tier.level === level);
  }

  tierName(level) {
    return this.#tiers.find((tier) => tier.level === level)?.name ?? `tier ${level}`;
  }

  togglePause() {
    this.#isPaused = !this.#isPaused;
    this.pauseButton.setAttribute("aria-pressed", this.#isPaused);
    this.pauseButton.textContent = this.#isPaused ? "Resume" : "Pause";
    this.#cards.forEach((card) => card.pause(this.#isPaused));
  }

  setBoard({ replicas, tiers }) {
    if (JSON.stringify(tiers.map((tier) => tier.name)) !== JSON.stringify(this.#tiers.map((tier) => tier.name)))
      this.#nameTiers(tiers);
    this.#tiers = tiers;
    const names = new Set(replicas.map((row) => row.name));
    for (const [name, card] of this.#cards) if (!names.has(name)) this.#remove(name, card);
    for (const row of replicas) this.#cards.get(row.name)?.setRow(row);
    this.rows = new Map(replicas.map((row) => [row.name, row]));
  }

  receive(reports) {
    for (const [name, report] of Object.entries(reports)) {
      const row = this.rows?.get(name);
      if (!row) continue;
      if (!this.#cards.has(name)) this.#add(name, row);
      this.#cards.get(name).receive(report);
    }
    document.getElementById("no-steps").hidden = [...this.#cards.values()].some((card) => card.train.end);
  }

  /** Show lines about a place of the picture; null hides them. */
  tell(lines, x, y) {
    const tip = document.getElementById("tip");
    tip.hidden = !lines;
    if (!lines) return;
    const texts = lines.map((text, index) => {
      const element = document.createElement(index ? "span" : "b");
      element.textContent = text;
      return element;
    });
    tip.replaceChildren(...texts);
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - height - 8))}px`;
  }

  #add(name, row) {
    const card = new ReplicaCard(name, this);
    this.#cards.set(name, card);
    this.holder.append(card.element);
    card.setRow(row);
    if (this.#isPaused) card.pause(true);
  }

  #remove(name, card) {
    card.element.remove();
    this.#cards.delete(name);
  }

  #nameTiers(tiers) {
    const items = tiers.map((tier, rank) => {
      const item = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = `swatch ${tierClass(rank)}`;
      item.append(swatch, tier.name);
      return item;
    });
    document.getElementById("tiers").replaceChildren(...items);
  }
}
