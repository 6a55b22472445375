// The style sheet's colours, for canvases.

const NAMES = ["ink", "quiet", "rail", "bad", "card", "tier-0", "tier-1", "tier-2", "tier-3"];
const dark = matchMedia("(prefers-color-scheme: dark)");
let colours = null;

dark.addEventListener("change", () => {
  colours = null;
});

export function palette() {
  if (!colours) {
    const style = getComputedStyle(document.documentElement);
    colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  return colours;
}

/** Tiers have colours in the order of their levels; those beyond the fourth share the last one. */
export const tierClass = (rank) => `tier-${Math.min(3, Math.max(0, rank))}`;

/** Call `changed` when the colours are no longer those that were drawn. */
export const onSchemeChange = (changed) => dark.addEventListener("change", changed);
